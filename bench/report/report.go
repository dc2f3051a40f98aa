// Package report reads, writes and compares the reports of package bench:
//
//	r, err := report.Read(file)
//	err = r.WriteTable(os.Stdout)    // text for people
//	err = r.WriteJSON(file)          // everything; Read reads it
//	err = r.WriteMarkdown(file)      // a table for a page of documentation
//	err = r.WriteGoBench(file)       // a line a round, for benchstat
//	err = r.WritePage(file)          // HTML with pictures and tables that sort
//
//	changes := report.Compare(old, new, 4)
//	err = report.WriteChanges(os.Stdout, old, new, changes, 4)
//
// One table of columns drives all forms but JSON, see columns.go.
package report

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"

	"github.com/seed90331342/attn/kernels"
)

// Schema is the version of the JSON form of a [Report]. Every change of a field changes it.
const Schema = 4

// Report is the result of a run. As JSON it is
//
//	{
//	  "schema": 3,
//	  "interrupted": false,
//	  "environment": { ... },
//	  "cases": [ { ... }, ... ]
//	}
//
// with the fields of [Environment] and [Measurement]. A figure that was not measured is null, never 0 and never absent.
type Report struct {
	// Schema is the version of this form.
	Schema int `json:"schema"`
	// Interrupted is set when the run stopped early, or had not ended when the report was
	// written; Cases has what was measured.
	Interrupted bool        `json:"interrupted"`
	Environment Environment `json:"environment"`
	// Cases has a row for every case, including those that did not run.
	Cases []Measurement `json:"cases"`
}

// ErrInterrupted reports a run that stopped before its end; its report has what it measured until then.
var ErrInterrupted = errors.New("interrupted")

// Err returns an error when a case is wrong or failed, when the run was interrupted (ErrInterrupted), or when nothing
// was measured. Cases that were predicted or that a backend does not support are no error.
func (r *Report) Err() error {
	n := map[Status]int{}
	var first Measurement // the first wrong or failed case
	for _, c := range r.Cases {
		n[c.Status]++
		if first.Status == "" && (c.Status == Wrong || c.Status == Failed) {
			first = c
		}
	}
	all := len(r.Cases)
	name := func(m Measurement) string { return fmt.Sprintf("%s at S = %d", m.Backend, m.SeqK) }
	switch {
	case r.Interrupted && n[Wrong] > 0:
		return fmt.Errorf("%w with %d of %d cases measured and %d wrong", ErrInterrupted, n[OK], all, n[Wrong])
	case r.Interrupted:
		return fmt.Errorf("%w with %d of %d cases measured", ErrInterrupted, n[OK], all)
	case n[Wrong] > 0:
		return fmt.Errorf("%d of %d cases give a wrong result, the first is %s", n[Wrong], all, name(first))
	case n[Failed] > 0:
		return fmt.Errorf("%d of %d cases failed, the first is %s: %s", n[Failed], all, name(first), first.Note)
	case n[OK] == 0 && all > 0:
		return fmt.Errorf("no case was measured, %s: %s", name(r.Cases[0]), r.Cases[0].Note)
	case n[OK] == 0:
		return errors.New("no case was measured: there is no backend")
	}
	return nil
}

// refusal is ErrFile with a text of its own, which describes the file.
type refusal string

func (r refusal) Error() string { return string(r) }

func (r refusal) Is(target error) bool { return target == kernels.ErrFile }

// Read reads a report that [Report.WriteJSON] wrote and derives again what follows from other
// figures. It returns kernels.ErrFile for another schema, for an unknown field and for values that no
// run can have, and with the error of from.
func Read(from io.Reader) (*Report, error) {
	text, err := io.ReadAll(io.LimitReader(from, maxText+1))
	if err != nil {
		return nil, fmt.Errorf("report: %w: %w", err, kernels.ErrFile)
	}
	if len(text) > maxText || bytes.Count(text, []byte("{")) > maxObjects { // a short text can stand for much memory
		return nil, refusal(fmt.Sprintf("the report is larger than %d MiB, or than %d objects", maxText>>20, maxObjects))
	}
	var version struct {
		Schema int `json:"schema"`
	}
	if err := json.Unmarshal(text, &version); err != nil {
		return nil, notReport(text, err)
	}
	switch version.Schema {
	case Schema:
	case 0:
		return nil, refusal(`this is not a report of attn bench (no "schema" field)`)
	default:
		return nil, refusal(fmt.Sprintf("the report has schema %d, this program reads %d: measure again", version.Schema, Schema))
	}
	var r Report
	strict := json.NewDecoder(bytes.NewReader(text))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&r); err != nil {
		return nil, notReport(text, err)
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	for i := range r.Cases {
		r.Cases[i].Derive()
	}
	return &r, nil
}

// embedded matches the names of embedded structs, which JSON does not have.
var embedded = regexp.MustCompile(`[A-Z]\w*\.`)

// notReport returns the refusal of a text that does not decode, with the line where that is known.
func notReport(text []byte, err error) error {
	at, what := len(text), err.Error()
	if wrong := new(json.UnmarshalTypeError); errors.As(err, &wrong) {
		at, what = int(wrong.Offset), cmp.Or(embedded.ReplaceAllString(wrong.Field, ""), "the text")+" is of type "+wrong.Value
	} else if wrong := new(json.SyntaxError); errors.As(err, &wrong) {
		at = int(wrong.Offset)
	}
	return refusal(fmt.Sprintf("this is not a report of attn bench (line %d: %s)", 1+bytes.Count(text[:at], []byte("\n")), what))
}

// WriteJSON writes the whole report.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
