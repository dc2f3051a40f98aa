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
	head string // in tables for people
	page bool   // it is on the page
	unit unit
	// width of the column in the text table, 0 if it is not there: that of its widest usual
	// figure, so that the tables of all backends and of two runs are aligned.
	width int
	line  string                   // unit in a Go benchmark line; "" is not there
	value func(m *Measurement) any // a number, a pointer to one, or a string; nil is "not measured"
}

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
	{head: "S", page: true, unit: seqLength, width: 9, value: func(m *Measurement) any { return m.SeqK }},
	{head: "calls", page: true, unit: integer, value: func(m *Measurement) any { return m.Repetitions }},
	{head: "time", page: true, unit: seconds, width: 9, line: "ns/op", value: func(m *Measurement) any { return m.MedianS }},
	{head: "±", page: true, unit: percent, value: func(m *Measurement) any { return m.spread() }},
	{head: "±", width: 6, value: func(m *Measurement) any { return m.spreadText() }},
	{head: "other processes", page: true, unit: percent, value: func(m *Measurement) any { return m.OthersPercent }},
	{head: kernelHead, page: true, unit: seconds, width: 9, value: func(m *Measurement) any { return m.KernelS }},
	{head: "compiling", page: true, unit: seconds, value: func(m *Measurement) any { return m.CompileS }},
	{head: "upload", page: true, unit: seconds, value: func(m *Measurement) any { return m.MoveS }},
	{head: "GFLOP/s", page: true, unit: number, width: 9, line: "GFLOP/s", value: func(m *Measurement) any { return m.GFLOPS }},
	{head: "GFLOP/s, all pairs", page: true, unit: number, value: func(m *Measurement) any { return m.GFLOPSFull }},
	{head: "GB/s", page: true, unit: number, width: 7, line: "GB/s", value: func(m *Measurement) any { return m.GBS }},
	{head: "FLOP/byte", page: true, unit: number, value: func(m *Measurement) any { return Positive(m.Intensity) }},
	{head: "bound by", page: true, value: func(m *Measurement) any { return m.Bound }},
	{head: "ceiling", width: 11, value: func(m *Measurement) any { return m.ceilingText() }},
	{head: "% of ceiling", page: true, unit: share, line: "%ceiling", value: func(m *Measurement) any { return m.PercentOfBound }},
	{head: "%", unit: share, width: 6, value: func(m *Measurement) any { return m.PercentOfBound }},
	{unit: bar, width: barWidth, value: func(m *Measurement) any { return m.PercentOfBound }},
	{head: stagesHead, page: true, unit: ratio, width: 9, value: func(m *Measurement) any { return m.SpeedupVsStages }},
	{head: "memory", width: 9, value: func(m *Measurement) any { return m.memoryText() }},
	{head: "memory", page: true, unit: byteSize, value: func(m *Measurement) any { return m.Memory.Counted() }},
	{head: "part that grows as S²", page: true, unit: byteSize, value: func(m *Measurement) any { return m.Memory.Square }},
	{head: "host peak", page: true, unit: byteSize, value: func(m *Measurement) any { return m.Memory.HostPeak }},
	{head: "device peak", page: true, unit: byteSize, value: func(m *Measurement) any { return m.Memory.DevicePeak }},
	{head: "error", page: true, unit: deviation, value: func(m *Measurement) any { return m.MaxError }},
	{head: "error bound", page: true, unit: deviation, value: func(m *Measurement) any { return m.ErrorBound }},
	{head: "error / bound", width: 19, value: func(m *Measurement) any { return deviation.show(m.MaxError) + " / " + deviation.show(m.ErrorBound) }},
	{head: "allocations", page: true, unit: integer, line: "allocs/op", value: func(m *Measurement) any { return m.Allocs }},
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
