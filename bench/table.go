package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/seed90331342/attn/backend"
)

// barWidth is how many characters stand for 100% of the ceiling.
const barWidth = 16

// column is a column of a table: figures are set right. One as wide as its widest
// usual figure keeps the tables of all backends, and of two runs, aligned.
type column struct {
	head  string
	width int // in characters
}

// The columns of a backend's table.
var columns = []column{
	{"S", 9}, {"time", 9}, {"GFLOP/s", 9}, {"GB/s", 7}, {"ceiling", 11}, {"%", 6}, {"", barWidth}, {"vs stages", 9}, {"allocs", 7}, {"error / bound", 19},
}

// heads writes the heads of columns and the rule that sets them apart.
func heads(b *strings.Builder, columns []column) {
	cells, width := make([]string, len(columns)), len("   status")
	for i, c := range columns {
		cells[i] = c.head
		width += c.width + 1
	}
	line(b, columns, cells, "status")
	b.WriteString(strings.Repeat("─", width) + "\n")
}

// WriteTable writes the report for people: a head that says what ran on what, a
// block for each backend with a row for each case, and how the figures were
// taken. That of [Ceilings] has a row for each contender instead.
func (r *Report) WriteTable(w io.Writer) error {
	if len(r.Cases) == 0 && len(r.Ceilings) > 0 {
		return r.writeCeilings(w)
	}
	var b strings.Builder
	r.head(&b)
	compared := r.compared()
	if compared {
		r.comparison(&b)
	} else {
		for _, info := range r.Environment.Backends {
			b.WriteByte('\n')
			r.block(&b, info)
		}
	}
	for _, m := range r.Environment.Missing {
		fmt.Fprintf(&b, "\n%s\n", m)
	}
	r.foot(&b, compared)
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Report) head(b *strings.Builder) {
	e := &r.Environment
	fmt.Fprintf(b, "attn bench · %s · %s · %s/%s · %s", e.CPU, count(e.CPUs, "CPU"), e.OS, e.Arch, e.GoVersion)
	if e.Commit != "" {
		fmt.Fprintf(b, " · %.10s", e.Commit)
		if e.Modified {
			b.WriteString("+")
		}
	}
	b.WriteByte('\n')
	if len(r.Cases) > 0 {
		c := r.Cases[0]
		fmt.Fprintf(b, "softmax(QKᵀ/√D)·V · B=%d H=%d", c.Batch, c.Heads)
		if c.KVHeads != c.Heads {
			fmt.Fprintf(b, " Hkv=%d", c.KVHeads)
		}
		fmt.Fprintf(b, " D=%d %s", c.Dim, c.DType)
		if c.SeqQ != c.SeqK {
			fmt.Fprintf(b, " Sq=%d", c.SeqQ)
		}
		if c.Causal {
			b.WriteString(" causal")
		}
		if c.WindowLeft != nil || c.WindowRight != nil {
			fmt.Fprintf(b, " window %s,%s", pointed(c.WindowLeft), pointed(c.WindowRight))
		}
		if c.Softcap > 0 {
			fmt.Fprintf(b, " softcap %v", c.Softcap)
		}
		if c.Mask != "" {
			fmt.Fprintf(b, " + mask %s", c.Mask)
		}
		b.WriteByte('\n')
	}
}

// block writes the table of one backend.
func (r *Report) block(b *strings.Builder, info backend.Info) {
	fmt.Fprintf(b, "%s · %s · %s", info.Name, info.Device, info.Provider)
	if info.Driver != "" {
		fmt.Fprintf(b, " · %s", info.Driver)
	}
	if info.Threads > 0 {
		fmt.Fprintf(b, " · %s", count(info.Threads, "thread"))
	}
	var peaks []float64
	for _, c := range r.Cases {
		if c.Backend == info.Name && c.CeilingGFLOPS != nil {
			peaks = append(peaks, *c.CeilingGFLOPS)
		}
	}
	if len(peaks) > 0 {
		fmt.Fprintf(b, " · FMA ceiling %s GFLOP/s\n", number3(median(peaks)))
	} else {
		b.WriteString(" · ceiling not measured\n")
	}
	timed := slices.ContainsFunc(r.Cases, func(m Measurement) bool { return m.Backend == info.Name && m.KernelS != nil })
	table := columns
	if timed {
		table = slices.Insert(slices.Clone(columns), kernelAt, column{"kernel", columns[kernelAt-1].width})
	}
	heads(b, table)
	for _, c := range r.Cases {
		if c.Backend == info.Name {
			c.row(b, table, timed)
		}
	}
	r.beside(b, info)
}

// kernelAt is where the column of the device's own time stands: after the time.
const kernelAt = 2

// beside writes what a backend's cases cost once: compiling, and moving inputs.
func (r *Report) beside(b *strings.Builder, info backend.Info) {
	var compile, move float64
	var compiled int
	var moved int64
	for _, c := range r.Cases {
		if c.Backend != info.Name {
			continue
		}
		compiled += c.Compiled
		moved += c.MovedBytes
		if c.CompileS != nil {
			compile += *c.CompileS
		}
		if c.MoveS != nil {
			move += *c.MoveS
		}
	}
	var parts []string
	if compiled > 0 {
		parts = append(parts, fmt.Sprintf("%s compiled in %s", count(compiled, "kernel"), duration(compile)))
	}
	if moved > 0 && move > 0 {
		parts = append(parts, fmt.Sprintf("%s of inputs moved in %s, %s GB/s", size(float64(moved)), duration(move), number3(float64(moved)/move/1e9)))
	}
	if len(parts) > 0 {
		fmt.Fprintf(b, "once, beside these times: %s\n", strings.Join(parts, "; "))
	}
}

// row writes a case as a row of its backend's table.
func (m *Measurement) row(b *strings.Builder, table []column, timed bool) {
	seq := strconv.Itoa(m.SeqK)
	if m.unmeasured() {
		// Nothing to put in the columns: the words take their place.
		fmt.Fprintf(b, "%*s   %s\n", columns[0].width, seq, m.Note)
		return
	}
	cells := append([]string{seq}, m.speed()...)
	if timed {
		cells = slices.Insert(cells, kernelAt, shown(m.KernelS, duration))
	}
	cells = append(cells, shown(m.SpeedupVsStages, func(x float64) string { return number3(x) + "x" }))
	line(b, table, append(cells, m.cost()...), m.status())
}

// shown writes a figure; "-" when it was not measured.
func shown(x *float64, format func(float64) string) string {
	if x == nil {
		return "-"
	}
	return format(*x)
}

// speed returns the cells from the time to the bar.
func (m *Measurement) speed() []string {
	ceiling := m.CeilingGFLOPS
	switch m.Bound {
	case BoundRead:
		ceiling = m.CeilingGBS
	case BoundLaunch:
		ceiling = figure(*m.LaunchS * 1e6)
	}
	cells := []string{
		shown(m.MedianS, duration),
		shown(m.GFLOPS, number3),
		shown(m.GBS, number3),
		shown(ceiling, func(x float64) string { return number3(x) + " " + string(m.Bound) }),
		shown(m.PercentOfBound, func(x float64) string { return fmt.Sprintf("%.1f", x) }),
		"",
	}
	if m.PercentOfBound != nil {
		cells[len(cells)-1] = bar(*m.PercentOfBound)
	}
	return cells
}

// cost returns the cells of allocations and error.
func (m *Measurement) cost() []string {
	allocs := "-"
	if m.Allocs != nil {
		allocs = strconv.FormatInt(*m.Allocs, 10)
	}
	return []string{allocs, scientific(m.MaxError) + " / " + scientific(m.ErrorBound)}
}

// status returns what stands behind the figures.
func (m *Measurement) status() string {
	switch {
	case m.Status != OK:
		return m.Note
	case m.Note != "":
		return "ok, " + m.Note
	}
	return "ok"
}

// line writes cells into columns, and the status after them.
func line(b *strings.Builder, columns []column, cells []string, status string) {
	var l strings.Builder
	for i, c := range columns {
		pad := strings.Repeat(" ", max(c.width-utf8.RuneCountInString(cells[i]), 0))
		if i > 0 {
			l.WriteByte(' ')
		}
		if c.head == "" { // the bar starts at its left
			l.WriteString(" " + cells[i] + pad)
		} else {
			l.WriteString(pad + cells[i])
		}
	}
	fmt.Fprintf(b, "%s   %s\n", strings.TrimRight(l.String(), " "), status)
}

func (r *Report) foot(b *strings.Builder, compared bool) {
	b.WriteString(`
time       median of the repetitions of one call, inputs and outputs in the backend's memory
`)
	if slices.ContainsFunc(r.Cases, func(m Measurement) bool { return m.KernelS != nil }) {
		b.WriteString("kernel     what the device computes of it, by its own clock, in calls beside the repetitions\n")
	}
	b.WriteString(`GFLOP/s    2·(D+Dv) operations for each visible pair of query and key; softmax is not counted
GB/s       each operand and output once, less the keys and values that no row sees
ceiling    that which binds, measured between the repetitions on all the backend's threads: fma, GFLOP/s of float32 fused
           multiply-adds (2 operations) in registers; or read, GB/s of these operands, from the cache that they fit or from memory
`)
	if slices.ContainsFunc(r.Cases, func(m Measurement) bool { return m.LaunchS != nil }) {
		b.WriteString("           or launch, µs that the device takes for a call that does nothing\n")
	}
	if compared {
		b.WriteString("vs         how many times as long as the first contender takes; all have their turn in every round\n")
	} else {
		b.WriteString("vs stages  how many times as long the same call takes as QKᵀ, softmax and PV with all weights in memory\n")
	}
	fmt.Fprintf(b, "error      of %s against float64, at the element nearest to its bound; what is over it is WRONG and gets no figure\n",
		count(r.Environment.CheckedRows, "sampled row"))
	if r.Interrupted {
		b.WriteString("\ninterrupted: this is what was measured until then\n")
	}
}

// pointed writes one side of a window.
func pointed(n *int) string {
	if n == nil {
		return "inf"
	}
	return strconv.Itoa(*n)
}

// bar draws a percentage in eighths of a character.
func bar(percent float64) string {
	eighths := int(math.Round(min(max(percent, 0), 100) / 100 * barWidth * 8))
	s := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		s += string(rune('█' + 8 - rest)) // U+2588 full, then one eighth less each
	}
	return s
}

// count writes a number of things: "1 thread", "2 threads".
func count(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// duration writes seconds with three digits: "1.23 ms".
func duration(seconds float64) string {
	switch {
	case seconds < 999.5e-9:
		return fmt.Sprintf("%.0f ns", seconds*1e9)
	case seconds < 999.5e-6:
		return number3(seconds*1e6) + " µs"
	case seconds < 999.5e-3:
		return number3(seconds*1e3) + " ms"
	default:
		return number3(seconds) + " s"
	}
}

// size writes bytes in binary units: "4.0 GiB".
func size(bytes float64) string {
	units := [...]string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	i := 0
	for bytes >= 1024 && i < len(units)-1 {
		bytes /= 1024
		i++
	}
	return fmt.Sprintf("%.1f %s", bytes, units[i])
}

// number3 writes x with three digits, more where the integer part has them.
func number3(x float64) string {
	decimals := 0
	switch a := math.Abs(x); {
	case a < 9.995:
		decimals = 2
	case a < 99.95:
		decimals = 1
	}
	return strconv.FormatFloat(x, 'f', decimals, 64)
}

// scientific writes an error: "1.2e-07"; what is not a number is "-".
func scientific(x *float64) string {
	if x == nil {
		return "-"
	}
	return strconv.FormatFloat(*x, 'e', 1, 64)
}
