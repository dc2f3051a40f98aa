package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Schema is the version of the JSON form of a [Report]. Fields are added without a new
// one.
const Schema = 2

// Report is what a run measured. As JSON it is
//
//	{
//	  "schema": 2,
//	  "interrupted": false,
//	  "environment": { ... },
//	  "cases": [ { ... }, ... ],
//	  "ceilings": [ { ... }, ... ],
//	  "growth": [ { ... }, ... ]
//	}
//
// with the fields of [Environment], [Measurement], [Ceiling] and [Growth]. A figure that
// was not measured is null, never 0 and never absent.
type Report struct {
	// Schema is the version of this form, see [Schema].
	Schema int `json:"schema"`
	// Interrupted says that the run was stopped before its end; the cases
	// hold what was measured until then.
	Interrupted bool        `json:"interrupted"`
	Environment Environment `json:"environment"`
	// Cases has a row for every case, those that did not run included.
	Cases []Measurement `json:"cases"`
	// Ceilings are those that [Ceilings] measured; empty in other runs.
	Ceilings []Ceiling `json:"ceilings"`
	// Growth says how time and memory grow with the length in each series of at
	// least three lengths that were measured.
	Growth []Growth `json:"growth"`
}

// Status says what became of a case.
type Status string

// What becomes of a case.
const (
	// OK: measured, and the sampled rows lie within their bound.
	OK Status = "ok"
	// Wrong: a sampled row is off by more than its bound; there are no figures.
	Wrong Status = "wrong"
	// Failed: the backend returned an error, in the note.
	Failed Status = "failed"
	// NotRun: the case did not run to its first figure; the note says why.
	NotRun Status = "not run"
	// Predicted: the case did not run, as it would take more time or memory than
	// there is, which the note says; PredictedS is what the cases before let
	// expect.
	Predicted Status = "predicted"
)

// ErrInterrupted reports a run that was stopped before its end; what it measured
// until then is in the report.
var ErrInterrupted = errors.New("interrupted")

// Err returns nil when every case that was asked for gave a figure or could not
// have been expected to: an error when one is wrong or failed, when the run was
// interrupted (ErrInterrupted), or when nothing was measured.
func (r *Report) Err() error {
	n := map[Status]int{}
	var first Measurement // of those that explain the error
	for _, c := range r.Cases {
		n[c.Status]++
		if first.Status == "" && (c.Status == Wrong || c.Status == Failed) {
			first = c
		}
	}
	all := len(r.Cases)
	name := func() string { return fmt.Sprintf("%s at S = %d", first.who(), first.SeqK) }
	switch {
	case r.Interrupted && n[Wrong] > 0:
		return fmt.Errorf("%w with %d of %d cases measured and %d wrong", ErrInterrupted, n[OK], all, n[Wrong])
	case r.Interrupted:
		return fmt.Errorf("%w with %d of %d cases measured", ErrInterrupted, n[OK], all)
	case n[Wrong] > 0:
		return fmt.Errorf("%d of %d cases give a wrong result, the first is %s", n[Wrong], all, name())
	case n[Failed] > 0:
		return fmt.Errorf("%d of %d cases failed, the first is %s: %s", n[Failed], all, name(), first.Note)
	case n[OK] == 0 && all > 0:
		return fmt.Errorf("no case was measured, %s at S = %d: %s", r.Cases[0].who(), r.Cases[0].SeqK, r.Cases[0].Note)
	case n[OK] == 0 && len(r.Ceilings) == 0:
		return errors.New("no case was measured: there is no backend")
	}
	return nil
}

// who names what ran: the contender of a comparison, else the backend.
func (m *Measurement) who() string {
	if m.Contender != "" {
		return m.Contender
	}
	return m.Backend
}

// WriteFile writes the report as JSON. The file appears complete or not at all:
// it is written beside and renamed.
func (r *Report) WriteFile(path string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return writeFile(path, append(text, '\n'))
}

// writeFile writes a file that appears complete or not at all.
func writeFile(path string, text []byte) error {
	f, err := beside(path)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Chmod(0o644) // CreateTemp makes it for its owner alone
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// CheckFile reports what would keep WriteFile from writing to path, so that it
// is known before minutes of measuring. It leaves an existing file as it is.
func CheckFile(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return fmt.Errorf("report: %s is a folder, a file is wanted", path)
	}
	f, err := beside(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// beside opens a new file in path's folder.
func beside(path string) (*os.File, error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("report: the folder %s does not exist: %w", dir, os.ErrNotExist)
	}
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	return f, nil
}
