package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/page"
)

//go:embed page.html
var pageBody string

var pageTemplate = template.Must(template.New("report").Parse(pageBody))

// pageData is the input of the template.
type pageData struct {
	Subtitle, Measured string
	Problems           []string
	Drawings           []pageDrawing
	Tables             []pageTable
	Environment        [][2]string
	Repeat             string
	Legend             [][2]string
}

// pageDrawing is a picture with its title and caption.
type pageDrawing struct {
	Title, About string
	Drawing      template.HTML
}

// pageTable is a table that sorts.
type pageTable struct {
	Title, About string
	Heads        []pageHead
	Rows         [][]pageCell
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
		Tables:      r.pageTables(),
	}
	data.Measured, data.Problems = r.outcome()
	if len(e.Args) > 0 {
		data.Repeat = e.command()
	}
	for _, c := range r.charts() {
		drawing, err := c.Inline()
		if err != nil {
			return fmt.Errorf("page: %s: %w", c.Name, err)
		}
		data.Drawings = append(data.Drawings, pageDrawing{c.Title, c.About, drawing})
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
			problems = append(problems, fmt.Sprintf("%s at S = %d: %s", m.who(), m.SeqK, m.Note))
		}
	}
	if r.Interrupted {
		problems = append(problems, "The run was interrupted; the cases after that were not measured.")
	}
	if len(r.Cases) == 0 {
		return fmt.Sprintf("The ceilings of %s.", format.Count(len(r.Ceilings), "contender")), problems
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

// pageTables returns the tables of cases, growth and ceilings that the report has.
func (r *Report) pageTables() []pageTable {
	growth := newPageTable("Growth", "Time and memory as powers of S, fitted in logarithms over the longer half of the lengths.",
		[]string{"series"}, "from S", "to S", "lengths", "time ~ S^", "memory ~ S^")
	for _, g := range r.Growth {
		growth.add([]string{r.growthName(g)}, g.From, g.To, g.Lengths, number.show(g.Time), number.show(g.Memory))
	}
	ceilings := newPageTable("Ceilings", "The most that each reaches, whatever it computes: the best of several measurements.",
		[]string{"contender", "others"}, "threads", "FMA GFLOP/s", "memory GB/s", "cache GB/s", "launch, µs")
	for _, c := range r.Ceilings {
		var others []string
		for _, o := range c.Others {
			others = append(others, fmt.Sprintf("%s %s GB/s", o.Name, number.show(o.GBS)))
		}
		var launch *float64
		if c.LaunchS != nil {
			launch = Figure(*c.LaunchS * 1e6)
		}
		ceilings.add([]string{c.Contender, strings.Join(others, ", ")}, c.Threads, c.GFLOPS, c.MemoryGBS, c.CacheGBS, launch)
	}
	return slices.DeleteFunc([]pageTable{r.casesTable(), growth, ceilings}, func(t pageTable) bool { return len(t.Rows) == 0 })
}

// newPageTable returns a table with columns of words, then of figures.
func newPageTable(title, about string, words []string, figures ...string) pageTable {
	t := pageTable{Title: title, About: about}
	for _, name := range words {
		t.Heads = append(t.Heads, pageHead{name, true})
	}
	for _, name := range figures {
		t.Heads = append(t.Heads, pageHead{name, false})
	}
	return t
}

func (t *pageTable) add(words []string, figures ...any) {
	var row []pageCell
	for _, w := range words {
		row = append(row, pageCell{Text: w, Class: "text"})
	}
	for _, f := range figures {
		u := number
		if _, ok := f.(int); ok {
			u = integer
		}
		row = append(row, pageCell{Text: u.show(f), Key: exact(f)})
	}
	t.Rows = append(t.Rows, row)
}

// growthName is the name of the curve that g was fitted to.
func (r *Report) growthName(g Growth) string {
	for _, l := range r.curves() {
		if m := l.cases[0]; g.Backend == m.Backend && g.Contender == m.Contender && g.Series == m.Series && g.Variant == m.Variant && g.Threads == m.Threads {
			return l.name
		}
	}
	return strings.Join(nonEmpty(g.Backend, g.Contender, g.Series, g.Variant), " · ")
}

// casesTable is the table of the cases in the order of the report. Columns that no case
// fills are left out.
func (r *Report) casesTable() pageTable {
	names := map[*Measurement]string{}
	for _, l := range r.curves() {
		for _, m := range l.cases {
			names[m] = l.name
		}
	}
	t := pageTable{Title: "Figures", Rows: make([][]pageCell, len(r.Cases))}
	add := func(head pageHead, cell func(m *Measurement) pageCell) {
		cells := make([]pageCell, len(r.Cases))
		empty := true
		for i := range r.Cases {
			cells[i] = cell(&r.Cases[i])
			empty = empty && (cells[i].Text == "" || cells[i].Text == "-")
		}
		if empty {
			return
		}
		t.Heads = append(t.Heads, head)
		for i, c := range cells {
			t.Rows[i] = append(t.Rows[i], c)
		}
	}
	add(pageHead{"series", true}, func(m *Measurement) pageCell { return pageCell{Text: names[m], Class: "text"} })
	for _, c := range columns {
		if c.in&inPage == 0 {
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
	return t
}
