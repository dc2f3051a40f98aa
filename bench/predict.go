package bench

import (
	"fmt"
	"math"
	"time"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/report"
)

const (
	// sweepStart is the first length of a sweep; shorter calls are mostly overhead.
	sweepStart = 256
	// sweepCall is the longest call, in seconds, of a sweep: the call at its last length
	// then takes half a second to two.
	sweepCall = 1.5
	// sweepBytes is the most memory of a sweep: with few queries, drawing the inputs takes longer than the call.
	sweepBytes = 4 << 30
	// maxSeq keeps positions within the int32 of devices.
	maxSeq = 1 << 30
)

// cost is the last timed call of a series on a device. The time of other calls is assumed
// to be proportional to their weight, see [report.Measurement.Weight]. Longer calls have
// relatively less overhead: their predictions err on the long side.
type cost struct {
	seconds float64
	weight  int64
}

// costs are those of a series so far.
type costs struct {
	call  cost
	stage cost // its weight is in weights, because the stages compute every pair
}

// learn remembers what the case of a row cost; warm is the time of a call in its warm-up.
func (c *costs) learn(m *report.Measurement, warm float64) {
	if m.MedianS != nil {
		warm = *m.MedianS
	}
	if warm > 0 {
		c.call = cost{warm, m.Weight()}
	}
	if m.StagesS != nil {
		c.stage = cost{*m.StagesS, int64(m.Batch) * int64(m.Heads) * int64(m.SeqQ) * int64(m.SeqK)}
	}
}

// predict returns the seconds of a call of some weight; 0 when unknown.
func (c cost) predict(weight int64) float64 {
	if c.weight == 0 {
		return 0
	}
	return c.seconds * float64(weight) / float64(c.weight)
}

// admit returns why a case with calls of that many seconds does not run; "" when it does.
// limit is the longest call in seconds (0: none), left the time left (negative: no budget).
func admit(seconds, limit float64, left time.Duration) string {
	switch {
	case limit > 0 && seconds > limit:
		return fmt.Sprintf("predicted %s each, a sweep ends at %s (give --seq for more)", format.Duration(seconds), format.Duration(limit))
	case left >= 0 && seconds*float64(1+min(leastRounds(seconds), minRounds)) > left.Seconds():
		return fmt.Sprintf("predicted %s each, %s of the budget is left", format.Duration(seconds), format.Duration(left.Seconds()))
	}
	return ""
}

// share returns an even share of the time left for one of several that have not run yet.
func share(left time.Duration, of int) time.Duration {
	return max(left, 0) / time.Duration(max(of, 1))
}

// patience returns how many seconds a case may run rounds that only make its median more
// precise: in a sweep caseSeconds, with a budget an even share of the time left, which leaves
// most of it to the longer lengths, else any number.
func (r *runner) patience(seq int) float64 {
	left := r.left()
	switch {
	case len(r.series.Seqs) == 0:
		return caseSeconds
	case left < 0:
		return math.Inf(1)
	}
	later := 0
	for _, s := range r.series.Seqs {
		if s > seq {
			later++
		}
	}
	return left.Seconds() / float64(later+2)
}

// Progress is the state of a run.
type Progress struct {
	// Backend and Case are what runs, Step is the part of it.
	Backend string
	Case    report.Case
	Step    string
	// Cases is the number of completed cases of Of, which is 0 in a sweep.
	Cases, Of int
}

// follow returns a function that reports the steps of a case.
func (r *runner) follow(c call) func(step string) {
	of := 0
	for _, s := range r.cfg.Series {
		if len(s.Seqs) == 0 {
			of = 0
			break
		}
		of += len(s.Seqs) * r.devices
	}
	return func(step string) {
		if r.cfg.Progress != nil {
			r.cfg.Progress(Progress{Backend: r.dev.Info().Name, Case: c.Case, Step: step, Cases: len(r.report.Cases), Of: of})
		}
	}
}
