package bench

import (
	"math"

	"github.com/seed90331342/attn/kernels"
)

// figures fills in what t says.
func (m *Measurement) figures(t timing) {
	if t.check.Rows > 0 {
		m.MaxError, m.ErrorBound = figure(t.check.MaxError), figure(t.check.Bound)
	}
	switch {
	case t.check.Rows > 0 && !t.check.OK():
		m.Status, m.Note = Wrong, "WRONG: "+t.check.Worst
		return
	case len(t.calls) == 0:
		m.Status, m.Note = NotRun, "not run: "+m.Note
		return
	}
	m.Status, m.Repetitions = OK, len(t.calls)
	least := math.Inf(1)
	for _, s := range t.calls {
		least = min(least, s)
	}
	mid := median(t.calls)
	m.MedianS, m.MinS, m.Allocs = figure(mid), figure(least), &t.allocs
	m.GFLOPS, m.GBS = figure(float64(m.FLOPs)/mid/1e9), figure(float64(m.Bytes)/mid/1e9)
	m.ceilings(median(t.peaks), median(t.reads), median(t.launches))
	if len(t.kernels) > 0 {
		m.KernelS = figure(median(t.kernels))
	}
	if t.compiled > 0 {
		m.CompileS, m.Compiled = figure(t.compile.Seconds()), t.compiled
	}
	if t.moved > 0 {
		m.MoveS, m.MovedBytes = figure(t.move.Seconds()), t.moved
	}
	if len(t.stages) > 0 {
		s := median(t.stages)
		m.StagesS, m.SpeedupVsStages = figure(s), figure(s/mid)
	}
}

// ceilings fills in the ceilings, in operations and in bytes a second and in seconds,
// 0 for what was not measured, and how near the figures come to them.
func (m *Measurement) ceilings(peak, read, launch float64) {
	if peak > 0 {
		m.CeilingGFLOPS = figure(peak / 1e9)
		m.Percent = figure(100 * *m.GFLOPS / *m.CeilingGFLOPS)
	}
	if read > 0 {
		m.CeilingGBS = figure(read / 1e9)
	}
	if launch > 0 {
		m.LaunchS = figure(launch)
	}
	switch m.Bound = bind(m.FLOPs, m.Bytes, peak, read, launch); m.Bound {
	case BoundFMA:
		m.PercentOfBound = m.Percent
	case BoundRead:
		m.PercentOfBound = figure(100 * *m.GBS / *m.CeilingGBS)
	case BoundLaunch:
		m.PercentOfBound = figure(100 * *m.LaunchS / *m.MedianS)
	}
}

// figure returns x, or null for what JSON cannot hold.
func figure(x float64) *float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return nil
	}
	return &x
}

// bounded returns one side of a window, or null when it has no limit.
func bounded(n int) *int {
	if n == kernels.Unbounded {
		return nil
	}
	return &n
}
