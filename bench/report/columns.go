package report

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/bench/internal/format"
)

// column is a figure of a case. To add one to the text table, the page, CSV or Go
// benchmark lines, add a row to columns.
type column struct {
	name  string // in CSV, as in JSON; "" is not in CSV
	unit  unit
	value func(m *Measurement) any // a number, a pointer to one, or a string; nil is "not measured"
	head  string                   // in tables for people
	in    place
	// width of the column in the text table: that of its widest usual figure, so that the
	// tables of all backends and of two runs are aligned.
	width int
	line  string // unit in a Go benchmark line; "" is not there
}

// place is a set of tables for people.
type place int

const (
	inText place = 1 << iota
	inPage
)

// unit is how a value is written for people.
type unit int

const (
	word unit = iota
	bar
	number
	integer
	seqLength
	seconds
	byteSize
	percent // 12.5%
	share   // 12.5, below a header with the sign
	ratio
	deviation
)

var columns = []column{
	{name: "backend", value: func(m *Measurement) any { return m.Backend }},
	{name: "contender", value: func(m *Measurement) any { return m.Contender }},
	{name: "series", value: func(m *Measurement) any { return m.Series }},
	{name: "name", value: func(m *Measurement) any { return m.Name }},
	{name: "variant", value: func(m *Measurement) any { return m.Variant }},
	{name: "dtype", value: func(m *Measurement) any { return m.DType }},
	{name: "batch", value: func(m *Measurement) any { return m.Batch }},
	{name: "heads", value: func(m *Measurement) any { return m.Heads }},
	{name: "kv_heads", value: func(m *Measurement) any { return m.KVHeads }},
	{name: "seq_q", value: func(m *Measurement) any { return m.SeqQ }},
	{name: "seq_k", value: func(m *Measurement) any { return m.SeqK }, head: "S", in: inText | inPage, unit: seqLength, width: 9},
	{name: "dim", value: func(m *Measurement) any { return m.Dim }},
	{name: "causal", value: func(m *Measurement) any { return fmt.Sprint(m.Causal) }},
	{name: "window_left", value: func(m *Measurement) any { return m.WindowLeft }},
	{name: "window_right", value: func(m *Measurement) any { return m.WindowRight }},
	{name: "softcap", value: func(m *Measurement) any { return m.Softcap }},
	{name: "mask", value: func(m *Measurement) any { return m.Mask }},
	{name: "threads", value: func(m *Measurement) any { return m.Threads }},
	{name: "status", value: func(m *Measurement) any { return string(m.Status) }},
	{name: "note", value: func(m *Measurement) any { return m.Note }},
	{name: "path", value: func(m *Measurement) any { return m.Path }},
	{name: "repetitions", value: func(m *Measurement) any { return m.Repetitions }, head: "calls", in: inPage, unit: integer},
	{name: "predicted_s", value: func(m *Measurement) any { return m.PredictedS }},
	{name: "median_s", value: func(m *Measurement) any { return m.MedianS }, head: "time", in: inText | inPage, unit: seconds, width: 9, line: "ns/op"},
	{name: "spread_percent", value: func(m *Measurement) any { return m.spread() }, head: "±", in: inPage, unit: percent},
	{value: func(m *Measurement) any { return m.spreadText() }, head: "±", in: inText, width: 6},
	{name: "low_s", value: func(m *Measurement) any { return m.LowS }},
	{name: "high_s", value: func(m *Measurement) any { return m.HighS }},
	{name: "confidence", value: func(m *Measurement) any { return m.Confidence }},
	{name: "min_s", value: func(m *Measurement) any { return m.MinS }},
	{name: "q1_s", value: func(m *Measurement) any { return m.Q1S }},
	{name: "q3_s", value: func(m *Measurement) any { return m.Q3S }},
	{name: "others_percent", value: func(m *Measurement) any { return m.OthersPercent }, head: "other processes", in: inPage, unit: percent},
	{name: "kernel_s", value: func(m *Measurement) any { return m.KernelS }, head: kernelHead, in: inText | inPage, unit: seconds, width: 9},
	{name: "compile_s", value: func(m *Measurement) any { return m.CompileS }, head: "compiling", in: inPage, unit: seconds},
	{name: "move_s", value: func(m *Measurement) any { return m.MoveS }, head: "upload", in: inPage, unit: seconds},
	{name: "moved_bytes", value: func(m *Measurement) any { return m.MovedBytes }},
	{name: "pairs", value: func(m *Measurement) any { return m.Pairs }},
	{name: "flops", value: func(m *Measurement) any { return m.FLOPs }},
	{name: "flops_full", value: func(m *Measurement) any { return m.FLOPsFull }},
	{name: "gflops", value: func(m *Measurement) any { return m.GFLOPS }, head: "GFLOP/s", in: inText | inPage, unit: number, width: 9, line: "GFLOP/s"},
	{name: "gflops_full", value: func(m *Measurement) any { return m.GFLOPSFull }, head: "GFLOP/s, all pairs", in: inPage, unit: number},
	{name: "ceiling_gflops", value: func(m *Measurement) any { return m.CeilingGFLOPS }},
	{name: "percent", value: func(m *Measurement) any { return m.Percent }},
	{name: "bytes", value: func(m *Measurement) any { return m.Bytes }},
	{name: "gbs", value: func(m *Measurement) any { return m.GBS }, head: "GB/s", in: inText | inPage, unit: number, width: 7, line: "GB/s"},
	{name: "ceiling_gbs", value: func(m *Measurement) any { return m.CeilingGBS }},
	{name: "intensity", value: func(m *Measurement) any { return Positive(m.Intensity) }, head: "FLOP/byte", in: inPage, unit: number},
	{name: "roof_gflops", value: func(m *Measurement) any { return m.RoofGFLOPS }},
	{name: "launch_s", value: func(m *Measurement) any { return m.LaunchS }},
	{name: "bound", value: func(m *Measurement) any { return string(m.Bound) }, head: "bound by", in: inPage},
	{value: func(m *Measurement) any { return m.ceilingText() }, head: "ceiling", in: inText, width: 11},
	{name: "percent_of_bound", value: func(m *Measurement) any { return m.PercentOfBound }, head: "% of ceiling", in: inPage, unit: share, line: "%ceiling"},
	{value: func(m *Measurement) any { return m.PercentOfBound }, head: "%", in: inText, unit: share, width: 6},
	{value: func(m *Measurement) any { return m.PercentOfBound }, in: inText, unit: bar, width: barWidth},
	{name: "stages_s", value: func(m *Measurement) any { return m.StagesS }},
	{name: "speedup_vs_stages", value: func(m *Measurement) any { return m.SpeedupVsStages }, head: stagesHead, in: inText | inPage, unit: ratio, width: 9},
	{value: func(m *Measurement) any { return m.memoryText() }, head: "memory", in: inText, width: 9},
	{name: "memory_counted", value: func(m *Measurement) any { return m.Memory.Counted() }, head: "memory", in: inPage, unit: byteSize},
	{name: "memory_operands", value: func(m *Measurement) any { return m.Memory.Operands }},
	{name: "memory_scratch", value: func(m *Measurement) any { return m.Memory.Scratch }},
	{name: "memory_square", value: func(m *Measurement) any { return m.Memory.Square }, head: "part that grows as S²", in: inPage, unit: byteSize},
	{name: "memory_host_peak", value: func(m *Measurement) any { return m.Memory.HostPeak }, head: "host peak", in: inPage, unit: byteSize},
	{name: "memory_device", value: func(m *Measurement) any { return m.Memory.Device }},
	{name: "memory_device_peak", value: func(m *Measurement) any { return m.Memory.DevicePeak }, head: "device peak", in: inPage, unit: byteSize},
	{name: "max_error", value: func(m *Measurement) any { return m.MaxError }, head: "error", in: inPage, unit: deviation},
	{name: "error_bound", value: func(m *Measurement) any { return m.ErrorBound }, head: "error bound", in: inPage, unit: deviation},
	{value: func(m *Measurement) any { return deviation.show(m.MaxError) + " / " + deviation.show(m.ErrorBound) }, head: "error / bound", in: inText, width: 19},
	{name: "allocs", value: func(m *Measurement) any { return m.Allocs }, head: "allocations", in: inPage, unit: integer, line: "allocs/op"},
}

// Headers that the text table refers to.
const (
	kernelHead = "kernel"
	stagesHead = "vs stages"
)

// barWidth is the number of characters that stand for 100% of the ceiling.
const barWidth = 10

// of returns a number as a float64; false for strings and null.
func of(value any) (x float64, ok bool) {
	v := reflect.Indirect(reflect.ValueOf(value))
	switch {
	case v.CanInt():
		return float64(v.Int()), true
	case v.CanFloat():
		return v.Float(), true
	}
	return 0, false
}

// exact writes a value for programs: null is "".
func exact(value any) string {
	if text, ok := value.(string); ok {
		return text
	}
	x, ok := of(value)
	switch {
	case !ok:
		return ""
	case x == math.Trunc(x) && math.Abs(x) < 1<<53:
		return strconv.FormatInt(int64(x), 10)
	}
	return strconv.FormatFloat(x, 'g', -1, 64)
}

// show writes a value for people: null is "-".
func (u unit) show(value any) string {
	if text, ok := value.(string); ok {
		return text
	}
	x, ok := of(value)
	if u == bar {
		return drawBar(x)
	}
	if !ok {
		return "-"
	}
	switch u {
	case integer, seqLength:
		return strconv.Itoa(int(x))
	case seconds:
		return format.Duration(x)
	case byteSize:
		return format.Size(x)
	case percent:
		return fmt.Sprintf("%.1f%%", x)
	case share:
		return fmt.Sprintf("%.1f", x)
	case ratio:
		return format.Number(x) + "x"
	case deviation:
		return strconv.FormatFloat(x, 'e', 1, 64)
	}
	return format.Number(x)
}

// drawBar draws a percentage in eighths of a character.
func drawBar(percent float64) string {
	eighths := int(math.Round(min(max(percent, 0), 100) / 100 * barWidth * 8))
	s := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		s += string(rune('█' + 8 - rest)) // the characters after U+2588 lose an eighth each
	}
	return s
}
