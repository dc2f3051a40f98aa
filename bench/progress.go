package bench

import "time"

// Progress says where a run stands.
type Progress struct {
	// Backend and Case are what runs, Step what of it.
	Backend string
	Case    Case
	Step    string
	// Cases is how many cases are done, of Of, which is 0 where a sweep finds that out
	// itself.
	Cases, Of int
	// Elapsed is the time since the beginning.
	Elapsed time.Duration
	// Done is the part of the run's time that has passed, 0 to 1, as far as
	// the costs until now predict the rest. It never falls.
	Done float64
	// Remaining is the predicted time until the end; 0 while nothing is known.
	Remaining time.Duration
}

// follow returns what tells the progress of the case that begins now.
func (r *runner) follow(name string, c Case) func(step string) {
	if r.cfg.Progress == nil {
		return func(string) {}
	}
	began := time.Now()
	return func(step string) {
		elapsed := time.Since(r.begin).Seconds()
		rest := r.rest(c.Dims.SeqK, time.Since(began).Seconds(), elapsed)
		if rest > 0 {
			r.done = max(r.done, elapsed/(elapsed+rest))
		}
		r.cfg.Progress(Progress{Backend: name, Case: c, Step: step, Done: r.done, Cases: len(r.report.Cases), Of: r.cases(),
			Elapsed: time.Since(r.begin), Remaining: time.Duration(rest * float64(time.Second))})
	}
}

// cases returns how many cases there are in all; 0 where that is not known.
func (r *runner) cases() int {
	n := 0
	for _, s := range r.cfg.Series {
		if len(s.Seqs) == 0 {
			return 0
		}
		n += len(s.Seqs)
	}
	return n * r.backends
}

// rest predicts the seconds until the end of the run, during the case of length
// seq that has run for so many seconds; 0 when there is nothing to go by.
func (r *runner) rest(seq int, running, elapsed float64) float64 {
	if r.seq == 0 { // the first case of a series: the share done stays as it was
		if r.done == 0 {
			return 0
		}
		return elapsed * (1/r.done - 1)
	}
	rest := max(r.whole(seq)-running, 0)
	for _, later := range r.later(seq) {
		rest += r.whole(later)
	}
	if left := r.left(); left >= 0 {
		rest = min(rest, left.Seconds())
	}
	// The series and the backends to come are taken to be like what was until now.
	series := time.Since(r.entered).Seconds() + rest
	rest += series * float64(len(r.cfg.Series)-r.nth-1)
	rest += (time.Since(r.began).Seconds() + rest) * float64(r.backends-r.index-1)
	if r.cfg.Budget > 0 {
		rest = max(min(rest, r.cfg.Budget.Seconds()-elapsed), 0)
	}
	return rest
}

// whole predicts the seconds of a whole case of length seq.
func (r *runner) whole(seq int) float64 {
	s := leastSeconds(r.predict(seq))
	if n := product(r.series.at(seq).weightsShape()); 4*n <= maxWeights {
		// A warm-up, and repetitions until stagesSeconds have passed.
		if stage := r.stage.predict(int64(n)); stage <= maxStages {
			rounds := leastRounds(r.predict(seq))
			s += stage + min(float64(rounds)*stage, stagesSeconds+stage)
		}
	}
	return s
}

// predict returns the seconds of a call of length seq: it grows with the square,
// or with the length where the number of queries, or what each sees, is fixed.
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

// later returns the lengths that come after seq on one backend, as far as known.
func (r *runner) later(seq int) []int {
	var seqs []int
	if len(r.series.Seqs) > 0 {
		for _, s := range r.series.Seqs {
			if s > seq {
				seqs = append(seqs, s)
			}
		}
		return seqs
	}
	for s := 2 * seq; r.seq > 0 && s <= maxSeq && r.predict(s) <= sweepCall; s *= 2 {
		seqs = append(seqs, s)
	}
	return seqs
}
