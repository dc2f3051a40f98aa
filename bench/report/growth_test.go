package report

import (
	"math"
	"testing"
)

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-12*max(1, math.Abs(b)) }

func TestGrowthFindsExponents(t *testing.T) {
	row := func(series string, seq int, status Status, seconds float64) Measurement {
		return Measurement{Backend: "cpu", Threads: 2, Series: series, Variant: "fused", SeqK: seq, Status: status, MedianS: &seconds, Memory: Memory{Operands: int64(100 * seq)}}
	}
	var cases []Measurement
	for _, s := range []int{256, 512, 1024, 2048, 4096, 8192} {
		x := float64(s)
		cases = append(cases, row("full", s, OK, 1e-3+x*x*1e-9), row("window", s, OK, x*1e-6), row("wrong", s, Wrong, x))
	}
	cases = append(cases, row("two", 256, OK, 1), row("two", 512, OK, 2))
	r := &Report{Cases: cases}
	r.FitGrowth()
	got := r.Growth
	if len(got) != 2 {
		t.Fatalf("%+v", got)
	}
	full, window := got[0], got[1]
	if full.Series != "full" || full.Lengths != 3 || full.From != 2048 || full.To != 8192 || full.Time < 1.8 || full.Time > 2 || !near(full.Memory, 1) || full.Threads != 2 {
		t.Errorf("%+v: overhead bends the short lengths only", full)
	}
	if window.Series != "window" || !near(window.Time, 1) {
		t.Errorf("%+v", window)
	}
}
