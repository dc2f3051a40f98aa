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
const barWidth = 10

// column is a column of a table: figures are set right. One as wide as its widest
// usual figure keeps the tables of all backends, and of two runs, aligned.
type column struct {
	head  string
	width int // in characters
}

// The columns of a backend's table.
var columns = []column{
	{"S", 9}, {"time", 9}, {"±", 6}, {"GFLOP/s", 9}, {"GB/s", 7}, {"ceiling", 11}, {"%", 6}, {"", barWidth}, {"vs stages", 9}, {"memory", 9}, {"error / bound", 19},
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
	b.WriteString("softmax(QKᵀ/√D)·V")
	if names := r.seriesNames(); len(names) == 1 {
		b.WriteString(" · ")
		r.Cases[0].shape(b)
	} else {
		fmt.Fprintf(b, " · %d series", len(names))
	}
	b.WriteByte('\n')
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

// shape writes what the cases of a series have in common.
func (m *Measurement) shape(b *strings.Builder) {
	fmt.Fprintf(b, "B=%d H=%d", m.Batch, m.Heads)
	if m.KVHeads != m.Heads {
		fmt.Fprintf(b, " Hkv=%d", m.KVHeads)
	}
	fmt.Fprintf(b, " D=%d %s", m.Dim, m.DType)
	if m.SeqQ != m.SeqK {
		fmt.Fprintf(b, " Sq=%d", m.SeqQ)
	}
	if m.Causal {
		b.WriteString(" causal")
	}
	if m.WindowLeft != nil || m.WindowRight != nil {
		fmt.Fprintf(b, " window %s,%s", pointed(m.WindowLeft), pointed(m.WindowRight))
	}
	if m.Softcap > 0 {
		fmt.Fprintf(b, " softcap %v", m.Softcap)
	}
	if m.Mask != "" {
		fmt.Fprintf(b, " + mask %s", m.Mask)
	}
	if m.Variant != Fused {
		b.WriteString(" " + m.Variant)
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
		if c.on(info) && c.CeilingGFLOPS != nil {
			peaks = append(peaks, *c.CeilingGFLOPS)
		}
	}
	if len(peaks) > 0 {
		fmt.Fprintf(b, " · FMA ceiling %s GFLOP/s\n", number3(median(peaks)))
	} else {
		b.WriteString(" · ceiling not measured\n")
	}
	timed := slices.ContainsFunc(r.Cases, func(m Measurement) bool { return m.on(info) && m.KernelS != nil })
	table := columns
	if timed {
		table = slices.Insert(slices.Clone(columns), kernelAt, column{"kernel", columns[kernelAt-2].width})
	}
	heads(b, table)
	names := r.seriesNames()
	for _, name := range names {
		first := true
		for _, c := range r.Cases {
			if !c.on(info) || c.Series != name {
				continue
			}
			if first && len(names) > 1 {
				b.WriteString(name)
				var shape strings.Builder
				if c.shape(&shape); shape.String() != name {
					b.WriteString(" · " + shape.String())
				}
				b.WriteByte('\n')
			}
			first = false
			c.row(b, table, timed)
		}
		r.grows(b, info, name)
	}
	r.beside(b, info)
}

// on reports whether the case ran on a backend.
func (m *Measurement) on(info backend.Info) bool {
	return m.Backend == info.Name && m.Threads == info.Threads
}

// grows writes how a series grows with its length.
func (r *Report) grows(b *strings.Builder, info backend.Info, series string) {
	for _, g := range r.Growth {
		if g.Backend == info.Name && g.Threads == info.Threads && g.Series == series {
			fmt.Fprintf(b, "          time grows as S^%.2f, memory as S^%.2f (S = %d to %d)\n", g.Time, g.Memory, g.From, g.To)
		}
	}
}

// kernelAt is where the column of the device's own time stands: after the time and how
// sure that is.
const kernelAt = 3

// beside writes what a backend's cases cost once: compiling, and moving inputs.
func (r *Report) beside(b *strings.Builder, info backend.Info) {
	var compile, move float64
	var compiled int
	var moved int64
	for _, c := range r.Cases {
		if !c.on(info) {
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
		m.plusMinus(),
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

// plusMinus returns half of the median's interval in percent, with a question mark
// where it is less sure than it should be.
func (m *Measurement) plusMinus() string {
	half := m.halfInterval()
	switch {
	case half == nil:
		return "-"
	case *m.Confidence < 100*sureness:
		return fmt.Sprintf("%.1f%%?", *half)
	}
	return fmt.Sprintf("%.1f%%", *half)
}

// halfInterval returns half of the median's interval in percent of the median.
func (m *Measurement) halfInterval() *float64 {
	if m.MedianS == nil || m.LowS == nil || m.HighS == nil || m.Confidence == nil {
		return nil
	}
	return figure(50 * (*m.HighS - *m.LowS) / *m.MedianS)
}

// cost returns the cells of memory and error.
func (m *Measurement) cost() []string {
	if m.Status != OK {
		return []string{"-", scientific(m.MaxError) + " / " + scientific(m.ErrorBound)}
	}
	// Of small cases the process may find the memory in what it has.
	memory := m.Memory.Counted()
	switch {
	case m.Memory.Device > 0 && m.Memory.DevicePeak != nil:
		memory = *m.Memory.DevicePeak
	case m.Memory.Device == 0 && m.Memory.HostPeak != nil:
		memory = max(memory, *m.Memory.HostPeak)
	}
	return []string{size(float64(memory)), scientific(m.MaxError) + " / " + scientific(m.ErrorBound)}
}

// status returns what stands behind the figures.
func (m *Measurement) status() string {
	switch {
	case m.Status != OK:
		return m.Note
	case m.busy():
		return strings.TrimSuffix(fmt.Sprintf("ok, busy: others took %.0f%%, %s", *m.OthersPercent, m.Note), ", ")
	case m.Note != "":
		return "ok, " + m.Note
	}
	return "ok"
}

// busyPercent is how much of the threads others may take before figures are doubtful.
const busyPercent = 5

// busy reports whether others disturbed the case.
func (m *Measurement) busy() bool { return m.OthersPercent != nil && *m.OthersPercent >= busyPercent }

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
time       median of one call, inputs and outputs in the backend's memory, and ±: half of the interval that holds it with 95%
`)
	if slices.ContainsFunc(r.Cases, func(m Measurement) bool { return m.Confidence != nil && *m.Confidence < 100*sureness }) {
		b.WriteString("           (?: with less, of fewer than 6 rounds)\n")
	}
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
	b.WriteString("memory     of the case at most: what the process grew by with operands and first calls; of a device with its own, what they held there\n")
	fmt.Fprintf(b, "error      of %s against float64, at the element nearest to its bound; what is over it is WRONG and gets no figure\n",
		count(r.Environment.CheckedRows, "sampled row"))
	if slices.ContainsFunc(r.Cases, func(m Measurement) bool { return m.Status == OK && m.busy() }) {
		b.WriteString("busy       other programs, or the machine's host, took that much of the backend's threads: measure again when it is quiet\n")
	}
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
