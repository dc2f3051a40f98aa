package bench

import (
	"math"
	"slices"

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
	case len(t.rounds) == 0:
		m.Status, m.Note = NotRun, "not run: "+m.Note
		return
	}
	calls, medians := t.calls(), t.medians()
	mid := median(medians)
	low, high, sure := medianInterval(medians)
	m.Status, m.Repetitions = OK, len(calls)
	m.MedianS, m.MinS, m.Allocs = figure(mid), figure(slices.Min(calls)), &t.allocs
	m.LowS, m.HighS, m.Confidence = figure(low), figure(high), figure(100*sure)
	m.Q1S, m.Q3S = figure(quantile(calls, 0.25)), figure(quantile(calls, 0.75))
	if t.others >= 0 {
		m.OthersPercent = figure(100 * t.others)
	}
	if t.peak >= 0 {
		m.Memory.HostPeak = &t.peak
	}
	if t.devicePeak >= 0 {
		m.Memory.DevicePeak = &t.devicePeak
	}
	if m.FLOPs > 0 {
		m.GFLOPS, m.GFLOPSFull = figure(float64(m.FLOPs)/mid/1e9), figure(float64(m.FLOPsFull)/mid/1e9)
	}
	m.GBS = figure(float64(m.Bytes) / mid / 1e9)
	peak := median(t.measured(func(r *round) float64 { return r.peak }))
	read := median(t.measured(func(r *round) float64 { return r.read }))
	m.ceilings(peak, read, median(t.measured(func(r *round) float64 { return r.launch })))
	for _, r := range t.rounds {
		m.Rounds = append(m.Rounds, Round{TimesS: r.calls, PaceS: r.paces, CeilingGFLOPS: rate(r.peak), CeilingGBS: rate(r.read), LaunchS: positive(r.launch)})
	}
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
		if m.GFLOPS != nil {
			m.Percent = figure(100 * *m.GFLOPS / *m.CeilingGFLOPS)
		}
	}
	if read > 0 {
		m.CeilingGBS = figure(read / 1e9)
	}
	if peak > 0 && read > 0 {
		m.RoofGFLOPS = figure(min(peak, m.Intensity*read) / 1e9)
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

// rate returns operations or bytes a second in 10^9, null for 0.
func rate(x float64) *float64 { return positive(x / 1e9) }

// positive returns x, or null for 0.
func positive(x float64) *float64 {
	if x <= 0 {
		return nil
	}
	return figure(x)
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
