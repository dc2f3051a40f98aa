// Package speed measures attention on the CPU next to the machine's ceilings. It calls exported functions alone, so
// that bench/turns.sh can run the same benchmarks at two revisions.
package speed

import (
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// turn is the least time for which a turn repeats a call.
const turn = 30 * time.Millisecond

// job is a call to measure and the work that it has to do at least.
type job struct {
	run   func() error
	pairs float64          // visible pairs of row and key
	flops float64          // operations of these pairs
	reads []kernels.Tensor // tensors that must be read
}

// medians holds the samples of metrics by their units.
type medians map[string][]float64

func (m medians) add(unit string, x float64) { m[unit] = append(m[unit], x) }

func (m medians) of(unit string) float64 {
	slices.Sort(m[unit])
	return m[unit][len(m[unit])/2]
}

func (m medians) report(b *testing.B) {
	for unit := range m {
		b.ReportMetric(m.of(unit), unit)
	}
}

// must returns x. Benchmarks have nobody to return an error to.
func must[T any](x T, err error) T {
	check(err)
	return x
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// perCall returns the seconds that a call takes.
func perCall(run func() error) float64 {
	calls, start := 0, time.Now()
	for time.Since(start) < turn {
		check(run())
		calls++
	}
	return time.Since(start).Seconds() / float64(calls)
}

// measure reports the medians of turns of j. A turn measures the machine's ceilings, base unless it is nil, and j. The
// ceiling of j is the longer of two times: that of its operations at the FMA peak of the tier, and that of its reads at
// the bandwidth at which the same tensors can be read from where they are.
//
//	ns/op         a call
//	%ofCeiling    the ceiling in percent of the time of a call
//	GFLOP/s, GB/s the rate in the unit of the ceiling that binds
//	ceilingG...   that ceiling in the same unit
//	%ofBase       the speed for each visible pair in percent of that of base
//	xBase         how many times as fast the whole call is as base
//	%wanted       the target, if there is one: of %ofBase where there is a base, else of %ofCeiling
func measure(b *testing.B, be *cpu.Backend, j job, base *job, want float64) {
	b.Helper()
	bytes := 0.0
	for _, t := range j.reads {
		bytes += float64(t.Bytes())
	}
	check(j.run())
	m := medians{}
	for b.Loop() {
		peak, bandwidth := must(be.PeakFLOPS(b.Context())), must(be.ReadBandwidth(b.Context(), j.reads...))
		var before float64
		if base != nil {
			before = perCall(base.run)
		}
		own := perCall(j.run)
		if base != nil {
			m.add("xBase", before/own)
			m.add("%ofBase", 100*before/own*j.pairs/base.pairs)
		}
		m.add("ns/op", own*1e9)
		m.add("fma", j.flops/peak)
		m.add("read", bytes/bandwidth)
		m.add("%ofCeiling", 100*max(j.flops/peak, bytes/bandwidth)/own)
	}
	work, unit, least := j.flops, "GFLOP/s", m.of("fma")
	if m.of("read") > least {
		work, unit, least = bytes, "GB/s", m.of("read")
	}
	b.ReportMetric(work/m.of("ns/op"), unit)
	b.ReportMetric(work/least/1e9, "ceiling"+unit)
	delete(m, "fma")
	delete(m, "read")
	m.report(b)
	if want > 0 {
		b.ReportMetric(want, "%wanted")
	}
}
