package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/internal/chart"
	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/page"
)

//go:embed page.html
var pageBody string

var pageTemplate = template.Must(template.New("report").Funcs(template.FuncMap{
	"draw": func(c chart.Chart) (template.HTML, error) { return c.Inline() },
}).Parse(pageBody))

// pageData is the input of the template.
type pageData struct {
	Subtitle, Measured string
	Problems           []string
	Charts             []chart.Chart
	Heads              []pageHead
	Rows               [][]pageCell // of the cases
	Environment        [][2]string
	Repeat             string
	Legend             [][2]string
}

// pageHead is a column header. A Text column is aligned left and sorts by words.
type pageHead struct {
	Name string
	Text bool
}

// pageCell is the text of a cell; Key is its value for sorting where that differs.
type pageCell struct{ Text, Key, Class string }

// WritePage writes the report as one HTML file that loads nothing: pictures with a tip for
// every figure, tables that sort, the environment, and the command that repeats the run.
// Without scripts only zoom and sorting are missing.
func (r *Report) WritePage(w io.Writer) error {
	e := &r.Environment
	data := pageData{
		Subtitle:    strings.Join(nonEmpty(e.CPU, format.Count(e.CPUs, "CPU"), e.OS+"/"+e.Arch, e.GoVersion, e.revision(), e.Date), " · "),
		Environment: e.table(),
		Repeat:      "(the report does not contain the command)",
		Legend:      r.legend(),
		Charts:      r.charts(),
	}
	data.Heads, data.Rows = r.casesTable()
	data.Measured, data.Problems = r.outcome()
	if len(e.Args) > 0 {
		data.Repeat = e.command()
	}
	var body strings.Builder
	if err := pageTemplate.Execute(&body, data); err != nil {
		return fmt.Errorf("page: %w", err)
	}
	return page.Write(w, page.Page{Title: "attn bench", Body: template.HTML(body.String())})
}

// outcome returns how many cases were measured, and what went wrong.
func (r *Report) outcome() (measured string, problems []string) {
	n := map[Status]int{}
	for i := range r.Cases {
		m := &r.Cases[i]
		n[m.Status]++
		if m.Status == Wrong || m.Status == Failed {
			problems = append(problems, fmt.Sprintf("%s at S = %d: %s", m.Backend, m.SeqK, m.Note))
		}
	}
	if r.Interrupted {
		problems = append(problems, "The run was interrupted; the cases after that were not measured.")
	}
	parts := []string{fmt.Sprintf("%d of %s measured", n[OK], format.Count(len(r.Cases), "case"))}
	for _, s := range []Status{Wrong, Failed, Predicted, NotRun} {
		if n[s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[s], s))
		}
	}
	measured = strings.Join(parts, ", ") + "."
	if n[OK] > 0 {
		measured += fmt.Sprintf(" Each result was compared with float64 on %s.", format.Count(r.Environment.CheckedRows, "row"))
	}
	return measured, problems
}

// casesTable is the table of the cases in the order of the report. Columns that no case
// fills are left out.
func (r *Report) casesTable() (heads []pageHead, rows [][]pageCell) {
	names := map[*Measurement]string{}
	for _, l := range r.curves() {
		for _, m := range l.cases {
			names[m] = l.name
		}
	}
	rows = make([][]pageCell, len(r.Cases))
	add := func(head pageHead, cell func(m *Measurement) pageCell) {
		var cells []pageCell
		for i := range r.Cases {
			cells = append(cells, cell(&r.Cases[i]))
		}
		if !slices.ContainsFunc(cells, func(c pageCell) bool { return c.Text != "" && c.Text != "-" }) {
			return
		}
		heads = append(heads, head)
		for i, c := range cells {
			rows[i] = append(rows[i], c)
		}
	}
	add(pageHead{"series", true}, func(m *Measurement) pageCell { return pageCell{Text: names[m], Class: "text"} })
	for _, c := range columns {
		if !c.page {
			continue
		}
		add(pageHead{c.head, c.unit == word}, func(m *Measurement) pageCell {
			value := c.value(m)
			x, _ := of(value)
			switch {
			case c.unit == word:
				return pageCell{Text: c.unit.show(value), Class: "text"}
			case c.unit == seqLength:
				return pageCell{Text: format.Length(m.SeqK), Key: exact(value)}
			case x == 0 && (c.unit == byteSize || c.unit == integer && m.Status != OK):
				value = nil
			}
			return pageCell{Text: c.unit.show(value), Key: exact(value)}
		})
	}
	add(pageHead{"status", true}, func(m *Measurement) pageCell {
		class := "note"
		if m.Status == Wrong || m.Status == Failed {
			class = "note bad"
		}
		return pageCell{Text: m.outcome(), Class: class}
	})
	return heads, rows
}
