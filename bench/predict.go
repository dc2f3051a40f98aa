package bench

import (
	"fmt"
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
	// sweepBytes is the most memory of a sweep: with few queries, drawing the inputs takes
	// longer than the call.
	sweepBytes = 4 << 30
	// maxSeq keeps positions within the int32 of devices.
	maxSeq = 1 << 30
	// probeSeconds is how long a call must take to predict far longer ones: the overhead of
	// shorter calls is not negligible.
	probeSeconds = 0.05
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
	seq   int  // length of the last timed call
}

// learn remembers what the case of a row cost; warm is the time of a call in its warm-up.
func (c *costs) learn(m *report.Measurement, warm float64) {
	if m.MedianS != nil {
		warm = *m.MedianS
	}
	if warm > 0 {
		c.call, c.seq = cost{warm, m.Weight()}, m.SeqK
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

// approach times shorter cases, doubling the length, until a call takes long enough to
// predict c, which may be thousands of times longer than the case before it. It adds the
// kernels that they compiled, which c shares, to trace.
func (r *runner) approach(c Case, trace *recorder) {
	for r.stop() == "" && r.call.seconds < probeSeconds {
		short := r.series.at(max(sweepStart, 2*r.seq))
		if short.SeqK >= c.SeqK {
			break
		}
		m, err := planned(r.work, r.dev, short)
		if err != nil || admit(r.call.predict(m.Weight()), 0, r.left()) != "" {
			break
		}
		b := &bencher{runner: r, c: short, row: m, step: r.follow(short)}
		if b.probe() != nil {
			break
		}
		trace.compile.Add(b.trace.compile.Load())
		trace.compiled.Add(b.trace.compiled.Load())
	}
}

// patience returns how many seconds a case may run rounds that only make its median more
// precise. In a sweep and without a budget that is caseSeconds. Otherwise the longer lengths
// that fit the budget come first, and the case gets an even share of the rest.
func (r *runner) patience(seq int) float64 {
	left := r.left()
	if left < 0 || len(r.series.Seqs) == 0 {
		return caseSeconds
	}
	later, spare := r.later(seq), left.Seconds()
	for _, s := range later {
		need := 0.0
		if r.seq > 0 {
			need = leastSeconds(r.predict(s))
		}
		if need > spare {
			break
		}
		spare -= need
	}
	return spare / float64(len(later)+2)
}

// predict returns the seconds of a call of a length: proportional to its square, or to the
// length if the number of queries or of keys that each sees is fixed.
func (r *runner) predict(seq int) float64 {
	if r.seq == 0 {
		return 0
	}
	growth := float64(seq) / float64(r.seq)
	if r.series.SeqQ == 0 && r.series.Window == nil {
		growth *= growth
	}
	return r.call.seconds * growth
}

// later returns the lengths after seq on one device, as far as known.
func (r *runner) later(seq int) []int {
	var seqs []int
	for _, s := range r.series.Seqs {
		if s > seq {
			seqs = append(seqs, s)
		}
	}
	if len(r.series.Seqs) > 0 {
		return seqs
	}
	for s := 2 * seq; r.seq > 0 && s <= maxSeq && r.predict(s) <= sweepCall; s *= 2 {
		seqs = append(seqs, s)
	}
	return seqs
}

// Progress is the state of a run.
type Progress struct {
	// Backend and Case are what runs, Step is the part of it.
	Backend string
	Case    Case
	Step    string
	// Cases is the number of completed cases of Of, which is 0 in a sweep.
	Cases, Of int
	// Elapsed is the time since the beginning.
	Elapsed time.Duration
	// Done is the fraction of the run's time that has passed, as predicted from the costs
	// so far. It never decreases.
	Done float64
	// Remaining is the predicted time until the end; 0 when unknown.
	Remaining time.Duration
}

// follow returns a function that reports the steps of the case that begins now.
func (r *runner) follow(c Case) func(step string) {
	began := time.Now()
	return func(step string) {
		if r.cfg.Progress == nil {
			return
		}
		elapsed := time.Since(r.runBegan)
		rest := r.rest(c.SeqK, time.Since(began).Seconds(), elapsed.Seconds())
		if rest > 0 {
			r.done = max(r.done, elapsed.Seconds()/(elapsed.Seconds()+rest))
		}
		r.cfg.Progress(Progress{Backend: r.dev.Info().Name, Case: c, Step: step, Done: r.done, Cases: len(r.report.Cases), Of: r.cases(),
			Elapsed: elapsed, Remaining: time.Duration(rest * float64(time.Second))})
	}
}

// cases returns the number of cases; 0 when unknown.
func (r *runner) cases() int {
	n := 0
	for _, s := range r.cfg.Series {
		if len(s.Seqs) == 0 {
			return 0
		}
		n += len(s.Seqs)
	}
	return n * r.devices
}

// rest predicts the seconds until the end of the run from the middle of a case of length
// seq; 0 when unknown.
func (r *runner) rest(seq int, running, elapsed float64) float64 {
	if r.seq == 0 { // first case of a series: assume that the fraction done is unchanged
		if r.done == 0 {
			return 0
		}
		return elapsed * (1/r.done - 1)
	}
	rest := max(r.predictCase(seq)-running, 0)
	for _, later := range r.later(seq) {
		rest += r.predictCase(later)
	}
	if left := r.left(); left >= 0 {
		rest = min(rest, left.Seconds())
	}
	// Later series and devices are assumed to take as long as the current ones.
	rest += (time.Since(r.seriesBegan).Seconds() + rest) * float64(len(r.cfg.Series)-r.seriesIndex-1)
	rest += (time.Since(r.devBegan).Seconds() + rest) * float64(r.devices-r.devIndex-1)
	if r.cfg.Budget > 0 {
		rest = max(min(rest, r.cfg.Budget.Seconds()-elapsed), 0)
	}
	return rest
}

// predictCase predicts the seconds of a case of length seq.
func (r *runner) predictCase(seq int) float64 {
	call := r.predict(seq)
	total := leastSeconds(call)
	if n := r.series.at(seq).weights(); 4*n <= maxWeights {
		if stage := r.stage.predict(int64(n)); stage <= maxStages {
			total += stage + min(float64(leastRounds(call))*stage, stagesSeconds+stage)
		}
	}
	return total
}
