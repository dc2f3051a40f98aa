//go:build !js

// Browsers have the page of attn-web instead; the templates are a twentieth of a program for wasm.

package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/bench/internal/chart"
	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/page"
	"github.com/seed90331342/attn/kernels"
)

//go:embed page.html
var pageBody string

var pageTemplate = template.Must(template.New("report").Funcs(template.FuncMap{
	"join": strings.Join, "describe": func(b kernels.Info) string { return describe(&b) },
}).Parse(pageBody))

// pageData is the input of the template.
type pageData struct {
	*Environment
	Subtitle, Measured, Problem string
	Charts                      []chart.Chart
	Heads                       []pageHead
	Rows                        [][]pageCell // of the cases
	Legend                      [][2]string
}

// pageHead is a column header. A Text column is aligned left and sorts by words.
type pageHead struct {
	Name string
	Text bool
}

// pageCell is the text of a cell; Key is its value for sorting where that differs.
type pageCell struct{ Text, Key, Class string }

// WritePage writes the report as one HTML file that loads nothing: pictures with a tip for every figure, tables that
// sort, the environment, and the command that repeats the run. Without scripts only zoom and sorting are missing.
func (r *Report) WritePage(w io.Writer) error {
	e := &r.Environment
	data := pageData{
		Environment: e,
		Subtitle:    strings.Join(nonEmpty(e.CPU, format.Count(e.CPUs, "CPU"), e.OS+"/"+e.Arch, e.GoVersion, e.Version, e.Date), " · "),
		Measured:    r.measured(),
		Legend:      legend,
		Charts:      r.charts(),
	}
	data.Heads, data.Rows = r.casesTable()
	if err := r.Err(); err != nil {
		data.Problem = err.Error()
	}
	var body strings.Builder
	if err := pageTemplate.Execute(&body, data); err != nil {
		return fmt.Errorf("page: %w", err)
	}
	return page.Write(w, page.Page{Title: "attn bench", Body: template.HTML(body.String())})
}

// measured returns how many cases have which outcome.
func (r *Report) measured() string {
	n := map[Status]int{}
	for i := range r.Cases {
		n[r.Cases[i].Status]++
	}
	parts := []string{fmt.Sprintf("%d of %s measured", n[OK], format.Count(len(r.Cases), "case"))}
	for _, s := range []Status{Wrong, Failed, Predicted, NotRun} {
		if n[s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[s], s))
		}
	}
	return fmt.Sprintf("%s. Results were compared with float64 on %s.", strings.Join(parts, ", "), format.Count(r.Environment.CheckedRows, "row"))
}

// casesTable is the table of the cases in the order of the report. Columns that no case fills are left out.
func (r *Report) casesTable() (heads []pageHead, rows [][]pageCell) {
	cases := r.on(nil)
	rows = make([][]pageCell, len(cases))
	for i, m := range cases {
		rows[i] = append(rows[i], pageCell{Text: m.curve(), Class: "text"})
	}
	heads = append(heads, pageHead{"series", true})
	for _, c := range columns {
		if !slices.ContainsFunc(cases, func(m *Measurement) bool { return c.unit.show(c.value(m)) != "-" }) {
			continue
		}
		heads = append(heads, pageHead{c.head, c.unit == word})
		for i, m := range cases {
			cell := pageCell{Text: c.unit.show(c.value(m))}
			if x, ok := of(c.value(m)); ok {
				cell.Key = strconv.FormatFloat(x, 'g', -1, 64)
			} else if c.unit == word {
				cell.Class = "text"
			}
			rows[i] = append(rows[i], cell)
		}
	}
	heads = append(heads, pageHead{"status", true})
	for i, m := range cases {
		class := "note"
		if m.Status == Wrong || m.Status == Failed {
			class = "note bad"
		}
		rows[i] = append(rows[i], pageCell{Text: m.outcome(), Class: class})
	}
	return heads, rows
}
