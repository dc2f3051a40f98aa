package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/kernels"
)

// WriteTable writes the report as text for people: what ran on what, a row for each case
// below its backend, and the meaning of the columns.
func (r *Report) WriteTable(w io.Writer) error {
	var b strings.Builder
	r.head(&b)
	for i := range r.Environment.Backends {
		b.WriteByte('\n')
		r.block(&b, &r.Environment.Backends[i])
	}
	r.missing(&b)
	r.foot(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Report) head(b *strings.Builder) {
	e := &r.Environment
	b.WriteString(strings.Join(nonEmpty("attn bench", e.CPU, format.Count(e.CPUs, "CPU"), e.OS+"/"+e.Arch, e.GoVersion, e.Version), " · "))
	b.WriteString("\nsoftmax(QKᵀ/√D)·V · ")
	if names := r.seriesNames(); len(names) == 1 {
		b.WriteString(r.Cases[0].Shape())
	} else {
		fmt.Fprintf(b, "%d series", len(names))
	}
	b.WriteByte('\n')
}

func (r *Report) missing(b *strings.Builder) {
	for _, m := range r.Environment.Missing {
		fmt.Fprintf(b, "\n%s\n", plain.Line(m))
	}
}

// seriesNames returns the names of the series in the order of their first cases.
func (r *Report) seriesNames() []string {
	var names []string
	for _, c := range r.Cases {
		if !slices.Contains(names, c.Series) {
			names = append(names, c.Series)
		}
	}
	return names
}

// on returns the cases of a backend; all of them for nil.
func (r *Report) on(info *kernels.Info) []*Measurement {
	var cases []*Measurement
	for i := range r.Cases {
		if c := &r.Cases[i]; info == nil || c.on(info) {
			cases = append(cases, c)
		}
	}
	return cases
}

// textColumns returns the columns of the text table for some cases: without the kernel time unless one of them has it.
func textColumns(cases []*Measurement) []column {
	timed := slices.ContainsFunc(cases, func(m *Measurement) bool { return m.KernelS != nil })
	return slices.DeleteFunc(slices.Clone(columns), func(c column) bool {
		return c.width == 0 || c.head == kernelHead && !timed
	})
}

// block writes the table of one backend.
func (r *Report) block(b *strings.Builder, info *kernels.Info) {
	cases := r.on(info)
	peaks := map[Bound][]float64{}
	for _, c := range cases {
		if c.CeilingGFLOPS != nil {
			peaks[c.unit()] = append(peaks[c.unit()], *c.CeilingGFLOPS)
		}
	}
	ceiling := "ceiling not measured"
	if all := peaks[BoundFMA]; len(all) > 0 {
		ceiling = "FMA ceiling " + format.Number(stats.Median(all)) + " GFLOP/s"
	} else if len(peaks) > 0 {
		ceiling = "ceilings of matrix units in the table"
	}
	fmt.Fprintf(b, "%s · %s\n", describe(info), ceiling)
	table := textColumns(cases)
	var heads []string
	width := len("  status")
	for _, c := range table {
		heads = append(heads, c.head)
		width += c.width + 1
	}
	line(b, table, heads, "status")
	b.WriteString(strings.Repeat("─", width) + "\n")
	several := len(r.seriesNames()) > 1
	for i, c := range cases {
		if several && (i == 0 || c.Series != cases[i-1].Series) {
			b.WriteString(strings.Join(slices.Compact([]string{c.Series, c.Shape()}), " · ") + "\n")
		}
		shown, status := table, c.outcome()
		if c.unmeasured() { // its length and its note
			shown, status = table[:1], strings.ReplaceAll(status, "; ", "\n"+strings.Repeat(" ", table[0].width+3))
		}
		line(b, shown, cells(shown, c), status)
	}
}

// WriteMarkdown writes the cases as a table in Markdown, with the columns of the text table.
func (r *Report) WriteMarkdown(w io.Writer) error {
	table := textColumns(r.on(nil))
	var b strings.Builder
	line := func(cells ...string) {
		for i, c := range cells {
			cells[i] = strings.ReplaceAll(c, "|", "/") // a bar would end the cell
		}
		b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
	}
	heads := []string{"case", "device"}
	for _, c := range table {
		heads = append(heads, c.head)
	}
	line(append(heads, "status")...)
	b.WriteString(strings.Repeat("| --- ", len(heads)+1) + "|\n")
	for _, m := range r.on(nil) {
		line(slices.Concat([]string{cmp.Or(m.Series, m.Shape()), m.Backend}, cells(table, m), []string{m.outcome()})...)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// cells returns the figures of a case in columns.
func cells(table []column, m *Measurement) []string {
	all := make([]string, len(table))
	for i, c := range table {
		all[i] = c.unit.show(c.value(m))
	}
	return all
}

// line writes cells into columns, and the status after them.
func line(b *strings.Builder, table []column, cells []string, status string) {
	for i, text := range cells {
		b.WriteString(strings.Repeat(" ", max(table[i].width-utf8.RuneCountInString(text), 0)) + text + " ")
	}
	b.WriteString("  " + status + "\n")
}

// foot writes the legend, and that the run was interrupted.
func (r *Report) foot(b *strings.Builder) {
	b.WriteByte('\n')
	for _, e := range legend {
		fmt.Fprintf(b, "%-10s %s\n", e[0], strings.ReplaceAll(e[1], "\n", "\n           "))
	}
	if r.Interrupted {
		b.WriteString("\ninterrupted: the cases after that were not measured\n")
	}
}
