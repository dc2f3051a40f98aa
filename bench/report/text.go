package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/bench/page"
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
	fmt.Fprintf(b, "attn bench · %s · %s · %s/%s · %s", e.CPU, format.Count(e.CPUs, "CPU"), e.OS, e.Arch, e.GoVersion)
	if e.Commit != "" {
		b.WriteString(" · " + e.revision())
	}
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
		fmt.Fprintf(b, "\n%s\n", page.Line(m))
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

// textColumns returns the columns of the text table for some cases: without the kernel
// time unless one of them has it.
func textColumns(cases []*Measurement) []column {
	timed := slices.ContainsFunc(cases, func(m *Measurement) bool { return m.KernelS != nil })
	return slices.DeleteFunc(slices.Clone(columns), func(c column) bool {
		return c.width == 0 || c.head == kernelHead && !timed
	})
}

// block writes the table of one backend.
func (r *Report) block(b *strings.Builder, info *kernels.Info) {
	cases := r.on(info)
	var peaks []float64
	for _, c := range cases {
		if c.CeilingGFLOPS != nil {
			peaks = append(peaks, *c.CeilingGFLOPS)
		}
	}
	ceiling := "ceiling not measured"
	if len(peaks) > 0 {
		ceiling = "FMA ceiling " + format.Number(stats.Median(peaks)) + " GFLOP/s"
	}
	fmt.Fprintf(b, "%s · %s\n", describe(info), ceiling)
	table := textColumns(cases)
	headers(b, table)
	several := len(r.seriesNames()) > 1
	for i, c := range cases {
		if several && (i == 0 || c.Series != cases[i-1].Series) {
			b.WriteString(strings.Join(slices.Compact([]string{c.Series, c.Shape()}), " · ") + "\n")
		}
		row(b, table, c)
	}
	preparation(b, cases)
}

// headers writes the column headers and a rule.
func headers(b *strings.Builder, table []column) {
	cells, width := make([]string, len(table)), len("   status")
	for i, c := range table {
		cells[i] = c.head
		width += c.width + 1
	}
	line(b, table, cells, "status")
	b.WriteString(strings.Repeat("─", width) + "\n")
}

// WriteMarkdown writes the cases as a table in Markdown, with the columns of the text table.
func (r *Report) WriteMarkdown(w io.Writer) error {
	table := slices.DeleteFunc(textColumns(r.on(nil)), func(c column) bool { return c.unit == bar })
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

// row writes a case. A row without figures has its length and its note.
func row(b *strings.Builder, table []column, m *Measurement) {
	if m.unmeasured() {
		table = table[:1]
	}
	line(b, table, cells(table, m), m.outcome())
}

// line writes cells into columns, and the status after them.
func line(b *strings.Builder, table []column, cells []string, status string) {
	var l strings.Builder
	for i, c := range table {
		pad := strings.Repeat(" ", max(c.width-utf8.RuneCountInString(cells[i]), 0))
		if i > 0 {
			l.WriteByte(' ')
		}
		if c.unit == bar { // aligned left
			l.WriteString(" " + cells[i] + pad)
		} else {
			l.WriteString(pad + cells[i])
		}
	}
	fmt.Fprintf(b, "%s   %s\n", strings.TrimRight(l.String(), " "), status)
}

// preparation writes what cases cost once: compiling, and moving inputs.
func preparation(b *strings.Builder, cases []*Measurement) {
	var compile, move, moved float64
	var compiled int
	for _, c := range cases {
		compiled += c.Compiled
		moved += float64(c.MovedBytes)
		if c.CompileS != nil {
			compile += *c.CompileS
		}
		if c.MoveS != nil {
			move += *c.MoveS
		}
	}
	var once []string
	if compiled > 0 {
		once = append(once, fmt.Sprintf("%s compiled in %s", format.Count(compiled, "kernel"), format.Duration(compile)))
	}
	if moved > 0 && move > 0 {
		once = append(once, fmt.Sprintf("%s of inputs moved in %s, %s GB/s", format.Size(moved), format.Duration(move), format.Number(moved/move/1e9)))
	}
	if len(once) > 0 {
		fmt.Fprintf(b, "once, not in these times: %s\n", strings.Join(once, "; "))
	}
}

// spreadText is the spread with a question mark where the interval is unsure.
func (m *Measurement) spreadText() string {
	text := percent.show(m.spread())
	if m.spread() != nil && m.unsure() {
		text += "?"
	}
	return text
}

// ceilingText is the ceiling that limits the case with its kind.
func (m *Measurement) ceilingText() string {
	ceiling := m.CeilingGFLOPS
	switch {
	case m.Bound == BoundRead:
		ceiling = m.CeilingGBS
	case m.Bound == BoundLaunch && m.LaunchS != nil:
		ceiling = Figure(*m.LaunchS * 1e6)
	}
	return strings.Join(nonEmpty(number.show(ceiling), string(m.Bound)), " ")
}

// memoryText is the memory of a case that gave a right result.
func (m *Measurement) memoryText() any {
	if m.Status != OK {
		return nil
	}
	return byteSize.show(m.Memory.peak())
}

// legend returns the columns of the tables with their meanings, without those that no
// case needs.
func (r *Report) legend() [][2]string {
	some := func(f func(m *Measurement) bool) bool {
		return slices.ContainsFunc(r.Cases, func(m Measurement) bool { return f(&m) })
	}
	var entries [][2]string
	for _, e := range []struct {
		name, text string
		ok         bool
	}{
		{"time", "median of a call with inputs and outputs in the backend's memory; ±: half of its 95% confidence interval", true},
		{"?", "of fewer than 6 rounds, with less confidence", some((*Measurement).unsure)},
		{kernelHead, "computing time on the device by its own clock, measured in separate calls", some(func(m *Measurement) bool { return m.KernelS != nil })},
		{"GFLOP/s", "2·(D+Dv) operations for each visible pair of query and key; softmax is not counted", true},
		{Backward, "gradients of q, k and v from the result of a forward call, which is not timed; 2·(3·D+2·Dv) operations for each visible pair",
			some(func(m *Measurement) bool { return m.Variant == Backward })},
		{"GB/s", "each operand and output once, except keys and values that no row sees", true},
		{"ceiling", "the limiting one, measured between the repetitions on all threads of the backend: fma, GFLOP/s of float32 fused " +
			"multiply-adds (2 operations) in registers; read, GB/s of these operands, from cache if they fit, else from memory", true},
		{"launch", "a ceiling too: µs of an empty call", some(func(m *Measurement) bool { return m.LaunchS != nil })},
		{stagesHead, "time of QKᵀ, softmax and PV with all weights in memory, relative to this call", true},
		{"memory", "maximum for the case: growth of the process by operands and first calls, or memory held on the device", true},
		{"error", fmt.Sprintf("of %s against float64, at the element closest to its bound; WRONG: the bound is exceeded, no figures",
			format.Count(r.Environment.CheckedRows, "sampled row")), true},
		{"noisy", "other processes used that share of the backend's CPU time: measure again on a quiet machine",
			some(func(m *Measurement) bool { return m.Status == OK && m.noisy() })},
	} {
		if e.ok {
			entries = append(entries, [2]string{e.name, e.text})
		}
	}
	return entries
}

// foot writes the legend, and that the run was interrupted.
func (r *Report) foot(b *strings.Builder) {
	const indent, width = 11, 130
	b.WriteByte('\n')
	for _, e := range r.legend() {
		line := fmt.Sprintf("%-*s", indent-1, e[0])
		for _, word := range strings.Fields(e[1]) {
			if utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
				b.WriteString(line + "\n")
				line = strings.Repeat(" ", indent-1)
			}
			line += " " + word
		}
		b.WriteString(line + "\n")
	}
	if r.Interrupted {
		b.WriteString("\ninterrupted: the cases after that were not measured\n")
	}
}

// WritePlans writes the plans of the cases as text for people.
func (r *Report) WritePlans(w io.Writer) error {
	var b strings.Builder
	r.head(&b)
	for i := range r.Environment.Backends {
		info := &r.Environment.Backends[i]
		short := kernels.Info{Name: info.Name, Device: info.Device, Provider: info.Provider}
		fmt.Fprintf(&b, "\n%s\n", describe(&short))
		for _, c := range r.on(info) {
			c.writePlan(&b)
		}
	}
	r.missing(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

func (m *Measurement) writePlan(b *strings.Builder) {
	name, p := fmt.Sprintf("S=%d", m.SeqK), m.Plan
	if m.Series != "" {
		name = m.Series + ", " + name
	}
	if p == nil {
		fmt.Fprintf(b, "  %s   %s\n", name, page.Line(m.Note))
		return
	}
	fmt.Fprintf(b, "  %s   %s\n", name, p.Path)
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "    %s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	line("why", "%s", p.Why)
	line("work", "%.4g GFLOP for %d visible pairs, %.4g a byte", float64(m.FLOPs)/1e9, m.Pairs, m.Intensity)
	line("moves", "at least %s", byteSize.show(m.Bytes))
	line("memory", "%s of operands, %s of scratch memory, %s that grow with S²",
		byteSize.show(m.Memory.Operands), byteSize.show(m.Memory.Scratch), byteSize.show(m.Memory.Square))
	line("chunks", "%d (%s)", p.Chunks, p.Cut)
	for _, l := range p.Limits {
		line("limit", "%s %d", l.Name, l.Value)
	}
	w.Flush()
}
