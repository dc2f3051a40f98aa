package bench

import "time"

// Progress says where a run stands.
type Progress struct {
	// Backend and Case are what runs, Step what of it.
	Backend string
	Case    Case
	Step    string
	// Done is the part of the run's time that has passed, 0 to 1, as far as
	// the costs until now predict the rest. It never falls.
	Done float64
	// Remaining is the predicted time until the end.
	Remaining time.Duration
}

// follow returns what tells the progress of a case whose call is predicted to
// take that many seconds.
func (r *runner) follow(name string, c Case, predicted float64) func(string) {
	if r.cfg.Progress == nil {
		return func(string) {}
	}
	began := time.Now()
	return func(step string) {
		rest := max(caseSeconds(predicted)-time.Since(began).Seconds(), 0)
		for _, seq := range r.later(c.Dims.SeqK) {
			rest += caseSeconds(r.predict(seq))
		}
		if left := r.left(); left >= 0 {
			rest = min(rest, left.Seconds())
		}
		// The backends to come are taken to be like this one.
		rest += (time.Since(r.began).Seconds() + rest) * float64(r.backends-r.index-1)
		elapsed := time.Since(r.begin).Seconds()
		if r.cfg.Budget > 0 {
			rest = max(min(rest, r.cfg.Budget.Seconds()-elapsed), 0)
		}
		if elapsed+rest > 0 {
			r.done = max(r.done, elapsed/(elapsed+rest))
		}
		r.cfg.Progress(Progress{Backend: name, Case: c, Step: step, Done: r.done,
			Remaining: time.Duration(rest * float64(time.Second))})
	}
}

// predict returns the seconds of a call of length seq, whose time grows with its
// square.
func (r *runner) predict(seq int) float64 {
	if r.seq == 0 {
		return 0
	}
	growth := float64(seq) / float64(r.seq)
	return r.call.seconds * growth * growth
}

// later returns the lengths that come after seq on one backend, as far as known.
func (r *runner) later(seq int) []int {
	var seqs []int
	if len(r.cfg.Seqs) > 0 {
		for _, s := range r.cfg.Seqs {
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
