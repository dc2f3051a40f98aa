package report

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/bench/internal/format"
)

// column is a figure of a case in the text table, the page or Go benchmark lines. CSV has
// all fields.
type column struct {
	name string // as in CSV; "" for one with a value of its own
	head string // in tables for people
	in   place
	unit unit
	// width of the column in the text table: that of its widest usual figure, so that the
	// tables of all backends and of two runs are aligned.
	width int
	line  string                   // unit in a Go benchmark line; "" is not there
	value func(m *Measurement) any // a number, a pointer to one, or a string; nil is "not measured"
}

// of returns the column's figure of a case with these figures.
func (c *column) of(m *Measurement, figures map[string]any) any {
	if c.value != nil {
		return c.value(m)
	}
	return figures[c.name]
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
	{name: "seq_k", head: "S", in: inText | inPage, unit: seqLength, width: 9},
	{name: "repetitions", head: "calls", in: inPage, unit: integer},
	{name: "median_s", head: "time", in: inText | inPage, unit: seconds, width: 9, line: "ns/op"},
	{name: "spread_percent", head: "±", in: inPage, unit: percent},
	{value: func(m *Measurement) any { return m.spreadText() }, head: "±", in: inText, width: 6},
	{name: "others_percent", head: "other processes", in: inPage, unit: percent},
	{name: "kernel_s", head: kernelHead, in: inText | inPage, unit: seconds, width: 9},
	{name: "compile_s", head: "compiling", in: inPage, unit: seconds},
	{name: "move_s", head: "upload", in: inPage, unit: seconds},
	{name: "gflops", head: "GFLOP/s", in: inText | inPage, unit: number, width: 9, line: "GFLOP/s"},
	{name: "gflops_full", head: "GFLOP/s, all pairs", in: inPage, unit: number},
	{name: "gbs", head: "GB/s", in: inText | inPage, unit: number, width: 7, line: "GB/s"},
	{name: "intensity", value: func(m *Measurement) any { return Positive(m.Intensity) }, head: "FLOP/byte", in: inPage, unit: number},
	{name: "bound", head: "bound by", in: inPage},
	{value: func(m *Measurement) any { return m.ceilingText() }, head: "ceiling", in: inText, width: 11},
	{name: "percent_of_bound", head: "% of ceiling", in: inPage, unit: share, line: "%ceiling"},
	{value: func(m *Measurement) any { return m.PercentOfBound }, head: "%", in: inText, unit: share, width: 6},
	{value: func(m *Measurement) any { return m.PercentOfBound }, in: inText, unit: bar, width: barWidth},
	{name: "speedup_vs_stages", head: stagesHead, in: inText | inPage, unit: ratio, width: 9},
	{value: func(m *Measurement) any { return m.memoryText() }, head: "memory", in: inText, width: 9},
	{name: "memory_counted", head: "memory", in: inPage, unit: byteSize},
	{name: "memory_square", head: "part that grows as S²", in: inPage, unit: byteSize},
	{name: "memory_host_peak", head: "host peak", in: inPage, unit: byteSize},
	{name: "memory_device_peak", head: "device peak", in: inPage, unit: byteSize},
	{name: "max_error", head: "error", in: inPage, unit: deviation},
	{name: "error_bound", head: "error bound", in: inPage, unit: deviation},
	{value: func(m *Measurement) any { return deviation.show(m.MaxError) + " / " + deviation.show(m.ErrorBound) }, head: "error / bound", in: inText, width: 19},
	{name: "allocs", head: "allocations", in: inPage, unit: integer, line: "allocs/op"},
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
	x, ok := of(value)
	switch v := reflect.ValueOf(value); {
	case v.Kind() == reflect.String || v.Kind() == reflect.Bool:
		return fmt.Sprint(value)
	case !ok:
		return ""
	case x == math.Trunc(x) && math.Abs(x) < 1<<53:
		return strconv.FormatInt(int64(x), 10)
	}
	return strconv.FormatFloat(x, 'g', -1, 64)
}

// show writes a value for people: null is "-".
func (u unit) show(value any) string {
	if text := reflect.ValueOf(value); text.Kind() == reflect.String {
		return text.String()
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
