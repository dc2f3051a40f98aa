package report

import (
	"slices"

	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/kernels"
)

// Derive computes the figures that follow from others: the name and the counts from the
// call and Plan, the statistics from Rounds, the rates and percentages from both.
func (m *Measurement) Derive() {
	m.Name, m.Repetitions, m.Times, m.Rates = m.Case.Name(), 0, Times{}, Rates{}
	m.SpeedupVsStages, m.StagesPercent = nil, nil
	m.Memory = Memory{HostPeak: m.Memory.HostPeak, DevicePeak: m.Memory.DevicePeak}
	m.count()
	m.summarize()
	m.findBound()
	m.findRates()
}

// count sets the figures that follow from the call and its plan, without a measurement:
// operations, bytes moved and memory.
func (m *Measurement) count() {
	if m.Plan == nil {
		return
	}
	t, cached := m.Types()
	size, rows := int64(t.Size()), int64(m.Batch)*int64(m.Heads)*int64(m.SeqQ)
	all := rows * int64(m.SeqK)
	keyRow := cached.Bytes(kernels.Shape{1, 1, 1, m.Dim})
	q, k := size*rows*int64(m.Dim), keyRow*int64(m.Batch)*int64(m.KVHeads)*int64(m.SeqK) // also of O and V
	operands, scores, stage := 2*q+2*k, 4*all, 2*int64(m.Dim)
	unseen := 2 * k / int64(m.SeqK) * int64(m.SeqK-m.SeenKeys())
	var mask int64
	if m.Mask != "" {
		mask = 4 * int64(m.SeqQ) * int64(m.SeqK)
	}
	m.Pairs = m.Visible().Pairs(m.Batch, m.SeqQ, m.SeqK) * int64(m.Heads)
	m.FLOPs = m.Pairs * 2 * stage
	m.Memory.Operands, m.Memory.Scratch, m.Memory.Square = operands, m.Plan.Scratch, mask+scores
	switch m.Variant {
	case QK, PV:
		m.FLOPs, m.Bytes = all*stage, q+k+scores
	case Softmax:
		m.FLOPs, m.Bytes = 0, 2*scores+mask
	case Stages: // the scores are written, read and written, and read
		m.Bytes = operands + mask + 4*scores
	case Backward: // five products; as large as the operands are their gradients
		m.FLOPs = m.Pairs * 5 * stage
		m.Memory.Operands = 2*operands + 4*rows
		m.Bytes, m.Memory.Square = m.Memory.Operands+mask-unseen, mask
	default: // without the keys and values that no row sees
		m.Bytes = operands + mask - unseen
		m.Memory.Square = mask
	}
}

// summarize sets the statistics of Rounds, which only a measured case has.
func (m *Measurement) summarize() {
	if len(m.Rounds) == 0 {
		return
	}
	median := func(of func(r *Round) *float64) *float64 {
		var all []float64
		for i := range m.Rounds {
			if x := of(&m.Rounds[i]); x != nil {
				all = append(all, *x)
			}
		}
		return Positive(stats.Median(all))
	}
	var calls []float64
	for _, r := range m.Rounds {
		calls = append(calls, r.TimesS...)
	}
	low, high, sure := stats.MedianInterval(m.Medians())
	m.Repetitions, m.MinS = len(calls), Figure(slices.Min(calls))
	m.MedianS, m.LowS, m.HighS, m.Confidence = Figure(stats.Median(m.Medians())), Figure(low), Figure(high), Figure(100*sure)
	m.CeilingGFLOPS = median(func(r *Round) *float64 { return r.CeilingGFLOPS })
	m.CeilingGBS = median(func(r *Round) *float64 { return r.CeilingGBS })
	m.LaunchS = median(func(r *Round) *float64 { return r.LaunchS })
}

// Medians returns the median time of a call in each round.
func (m *Measurement) Medians() []float64 {
	of := make([]float64, len(m.Rounds))
	for i, r := range m.Rounds {
		of[i] = stats.Median(r.TimesS)
	}
	return of
}

// least returns the seconds that a call takes at least by a ceiling; 0 when unknown.
func (m *Measurement) least(by Bound) float64 {
	switch {
	case by == m.unit() && m.CeilingGFLOPS != nil:
		return float64(m.FLOPs) / *m.CeilingGFLOPS / 1e9
	case by == BoundRead && m.CeilingGBS != nil:
		return float64(m.Bytes) / *m.CeilingGBS / 1e9
	case by == BoundLaunch && m.LaunchS != nil:
		return *m.LaunchS
	}
	return 0
}

// unit returns the ceiling of the unit that multiplies.
func (m *Measurement) unit() Bound {
	if m.Plan != nil && m.Plan.Matrices > 0 {
		return BoundMatrix
	}
	return BoundFMA
}

// findBound sets Bound to the ceiling that takes the longest for a call. It stays "" without a peak rate.
func (m *Measurement) findBound() {
	if m.CeilingGFLOPS == nil {
		return
	}
	m.Bound = m.unit()
	for _, by := range []Bound{BoundRead, BoundLaunch} {
		if m.least(by) > m.least(m.Bound) {
			m.Bound = by
		}
	}
}

// findRates computes the rates and percentages that follow from MedianS, the counts, the ceilings and Bound.
func (m *Measurement) findRates() {
	if m.MedianS == nil {
		return
	}
	s := *m.MedianS
	m.GFLOPS, m.GBS = Positive(float64(m.FLOPs)/s/1e9), Figure(float64(m.Bytes)/s/1e9)
	m.PercentOfBound = Positive(100 * m.least(m.Bound) / s)
	if m.StagesS != nil {
		m.SpeedupVsStages = Figure(*m.StagesS / s)
	}
	var ratios []float64 // of times close to each other: load and clock rates cancel
	for _, r := range m.Rounds {
		if r.StagesS != nil {
			ratios = append(ratios, *r.StagesS/stats.Median(r.TimesS))
		}
	}
	if low, high, sure := stats.MedianInterval(ratios); sure >= stats.Confidence {
		m.StagesPercent = Figure(50 * (high - low) / stats.Median(ratios))
	}
}
