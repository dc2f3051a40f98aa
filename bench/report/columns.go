package report

import (
	"fmt"
	"reflect"
	"strconv"

	"github.com/seed90331342/attn/bench/internal/format"
)

// column is a figure of a case in the tables for people.
type column struct {
	head string
	unit unit
	// width of the column in the text table: that of its widest usual figure, so that the
	// tables of all backends and of two runs are aligned. With 0 it is on the page only.
	width int
	value func(m *Measurement) any // a number, a pointer to one, or a string; nil is "not measured"
}

// unit is how a value is written for people.
type unit int

const (
	word unit = iota
	number
	integer
	seconds
	byteSize
	percent
	ratio
	deviation
)

// kernelHead is the column that the text table has only for devices with a clock.
const kernelHead = "kernel"

var columns = []column{
	{"S", integer, 9, func(m *Measurement) any { return m.SeqK }},
	{"calls", integer, 0, func(m *Measurement) any { return m.Repetitions }},
	{"time", seconds, 9, func(m *Measurement) any { return m.MedianS }},
	{"±", percent, 6, func(m *Measurement) any { return m.spread() }},
	{"other processes", percent, 0, func(m *Measurement) any { return m.OthersPercent }},
	{kernelHead, seconds, 9, func(m *Measurement) any { return m.KernelS }},
	{"compiling", seconds, 0, func(m *Measurement) any { return m.CompileS }},
	{"upload", seconds, 0, func(m *Measurement) any { return m.MoveS }},
	{"GFLOP/s", number, 9, func(m *Measurement) any { return m.GFLOPS }},
	{"GB/s", number, 7, func(m *Measurement) any { return m.GBS }},
	{"ceiling", word, 11, func(m *Measurement) any { return m.ceilingText() }},
	{"reached", percent, 7, func(m *Measurement) any { return m.PercentOfBound }},
	{"vs stages", ratio, 9, func(m *Measurement) any { return m.SpeedupVsStages }},
	{"±", percent, 6, func(m *Measurement) any { return m.StagesPercent }},
	{"memory", byteSize, 9, func(m *Measurement) any { return m.peak() }},
	{"part that grows as S²", byteSize, 0, func(m *Measurement) any { return Positive(float64(m.Memory.Square)) }},
	{"host peak", byteSize, 0, func(m *Measurement) any { return m.Memory.HostPeak }},
	{"device peak", byteSize, 0, func(m *Measurement) any { return m.Memory.DevicePeak }},
	{"error", deviation, 8, func(m *Measurement) any { return m.MaxError }},
	{"bound", deviation, 8, func(m *Measurement) any { return m.ErrorBound }},
	{"allocations", integer, 0, func(m *Measurement) any { return m.Allocs }},
}

// legend explains the columns. A text has at most 119 characters a line.
var legend = [][2]string{
	{"time", "median of a call with inputs and outputs in the backend's memory; ±: half of its 95% confidence interval"},
	{"kernel", "computing time on the device by its own clock, measured in separate calls"},
	{"GFLOP/s", "2·(D+Dv) operations for each visible pair of query and key, of gradients 2·(3·D+2·Dv); softmax is not counted"},
	{"GB/s", "each operand and output once, except keys and values that no row sees"},
	{"ceiling", "the limiting one, measured between the repetitions on all threads of the backend:\n" +
		"fma, GFLOP/s of float32 fused multiply-adds (2 operations) in registers;\n" +
		"matrix, GFLOP/s of products of f16 matrices in registers, a third of it where three stand for one;\n" +
		"read, GB/s of these operands, from cache if they fit, else from memory; launch, µs of an empty call"},
	{"reached", "GFLOP/s, GB/s or the launch in percent of the ceiling"},
	{"vs stages", "time of QKᵀ, softmax and PV with all weights in memory, relative to this call; ±: from six rounds on"},
	{"memory", "maximum for the case: growth of the process by operands and first calls, or memory held on the device"},
	{"error", "of sampled rows against float64, at the element closest to its bound; WRONG: the bound is exceeded, no figures"},
	{"noisy", "other processes used that share of the backend's CPU time: measure again on a quiet machine"},
}

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

// show writes a value for people: null is "-".
func (u unit) show(value any) string {
	if text, ok := value.(string); ok {
		return text
	}
	x, ok := of(value)
	if !ok {
		return "-"
	}
	switch u {
	case integer:
		return strconv.Itoa(int(x))
	case seconds:
		return format.Duration(x)
	case byteSize:
		return format.Size(x)
	case percent:
		return fmt.Sprintf("%.1f%%", x)
	case ratio:
		return format.Number(x) + "x"
	case deviation:
		return strconv.FormatFloat(x, 'e', 1, 64)
	}
	return format.Number(x)
}

// spread is half the interval of the median in percent of the median.
func (m *Measurement) spread() *float64 {
	if m.MedianS == nil || m.LowS == nil || m.HighS == nil {
		return nil
	}
	return Figure(50 * (*m.HighS - *m.LowS) / *m.MedianS)
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
	if ceiling == nil {
		return "-"
	}
	return format.Number(*ceiling) + " " + string(m.Bound)
}

// peak is the memory of a case that gave a right result: as measured, if that is more than counted.
func (m *Measurement) peak() *float64 {
	bytes := m.Memory.Counted()
	switch {
	case m.Status != OK:
		return nil
	case m.Memory.DevicePeak != nil:
		bytes = *m.Memory.DevicePeak
	case m.Threads > 0 && m.Memory.HostPeak != nil: // a small case may fit in memory that the process has already
		bytes = max(bytes, *m.Memory.HostPeak)
	}
	return Figure(float64(bytes))
}
