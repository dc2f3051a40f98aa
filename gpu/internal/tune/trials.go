package tune

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/tunefile"
)

// candidate is one way to compute the calls of a class. The plain kernel is the reference: it
// is timed for comparison and chosen only when all others fail.
type candidate struct {
	name string
	// try runs it once and returns an error when it does not run or is wrong.
	try func(ctx context.Context) error
	// time returns how long so many rounds took.
	time func(ctx context.Context, rounds int) (time.Duration, error)
}

const (
	// trialTime is the shortest time that is measured: long compared with a submission, which takes 0.1 to 0.5 ms.
	trialTime = 5 * time.Millisecond
	// wakeTime is the computing time before the turns.
	wakeTime = 300 * time.Millisecond
	// maxRounds bounds the rounds of very short calls.
	maxRounds = 128
	// Candidates are timed trialRepeats times in turns, so that changes of the clock rate and other programs affect all
	// of them. When the budget is spent they are timed minTrialRepeats times.
	trialRepeats    = 7
	minTrialRepeats = 3
)

// alwaysTried candidates are tried whatever the budget: the reference, the best known
// variant, and a new one, so that each process makes progress.
const alwaysTried = 3

// Failures of a variant during whose trial the process ended. Another process may have been
// killed for any reason, so the variant is tried once more.
const (
	notBack      = "the program did not survive its trial"
	notBackTwice = "the program did not survive its trial, twice"
)

// trials tries the candidates and times those that are right. The first alwaysTried are always tried, and the others
// until one is right and the budget is spent; a budget of 0 is no bound. Candidates with a trial in e, such as an
// earlier failure, are skipped. keep is called with the name of a candidate before it runs for the first time, and with
// "" when all have.
//
// It sets e.Best to the fastest candidate that is not the reference, to the reference when all others failed, and to ""
// otherwise. It returns the context's error, or that of a lost device. A failure for lack of memory leaves no trial.
func trials(ctx context.Context, list []candidate, e *Entry, budget time.Duration, keep func(running string)) (err error) {
	defer func() {
		if err != nil {
			keep("")
		}
	}()
	began := time.Now()
	spent := func() bool { return budget > 0 && time.Since(began) > budget }
	type timed struct {
		candidate
		rounds int
		times  []float64 // nil when it has failed
	}
	run := func(c *timed) error {
		took, err := c.time(ctx, c.rounds)
		c.times = append(c.times, max(took, 1).Seconds()/float64(c.rounds))
		return err
	}
	begin := func(c *timed) error {
		if err := c.try(ctx); err != nil {
			return err
		}
		took, err := c.time(ctx, 1) // a warm-up that finds the number of rounds
		if err != nil {
			return err
		}
		c.rounds = int(min(max(trialTime/max(took, 1), 1), maxRounds))
		return run(c)
	}
	// fatal notes the failure of a candidate, unless err is nil. It returns the errors that end all trials.
	fatal := func(c *timed, err error) error {
		if err == nil {
			return nil
		}
		c.times = nil
		lost := errors.Is(err, backend.ErrDeviceLost)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if lost || !errors.Is(err, backend.ErrMemory) { // other programs may hold the memory
			e.Trials = append(e.Trials, tunefile.Failure(c.name, err))
		}
		if lost {
			return err
		}
		return nil
	}
	var tried []*timed
	right := 0 // variants that are, without the reference
	for _, c := range list {
		if e.Trial(c.name) != nil || len(tried) >= alwaysTried && right > 0 && spent() {
			continue
		}
		x := &timed{candidate: c}
		tried = append(tried, x)
		keep(c.name)
		if err := fatal(x, begin(x)); err != nil {
			return err
		}
		if x.times != nil && c.name != plainName {
			right++
		}
	}
	keep("")
	// The clock rate of a GPU falls while the host compiles and compares, and takes some tenths of a second to rise.
	for began := time.Now(); right > 0 && time.Since(began) < wakeTime; {
		c := tried[slices.IndexFunc(tried, func(c *timed) bool { return c.times != nil })]
		if _, err := c.time(ctx, c.rounds); err != nil {
			if err := fatal(c, err); err != nil {
				return err
			}
			break
		}
	}
	for n := 1; n < trialRepeats && (n < minTrialRepeats || !spent()); n++ {
		for _, c := range tried {
			if c.times == nil {
				continue
			}
			if err := fatal(c, run(c)); err != nil {
				return err
			}
		}
	}
	var best, reference Trial
	for _, c := range tried {
		if c.times == nil {
			continue
		}
		slices.Sort(c.times)
		t := Trial{Variant: c.name, Seconds: c.times[len(c.times)/2]}
		if e.Trials = append(e.Trials, t); c.name == plainName {
			reference = t
		} else if best.Variant == "" || t.Seconds < best.Seconds {
			best = t
		}
	}
	if best.Variant == "" && !slices.ContainsFunc(list, func(c candidate) bool { return e.Trial(c.name) == nil }) {
		best = reference
	}
	e.Best = best.Variant
	return nil
}

// MeasureOptions are the options of [Tuner.Measure].
type MeasureOptions struct {
	// Budget ends the trials early; 0 is no bound.
	Budget time.Duration
	// All also measures the device's peak, variants that may lose the device, and those that
	// failed before, unless the process did not survive them twice.
	All bool
	// Progress, unless nil, is called with the name of each variant before its trial.
	Progress func(variant string)
}

// Measure measures the variants for calls of shape s, even if that was done before, and keeps the choice in the file
// and for later calls. A variant counts if its results agree with those of the plain kernel within twice the error
// bound of package oracle, and with those of the other variants in every bit.
//
// It returns the entry also with the error of a file that could not be written. It
// returns backend.ErrUnsupported when no variant runs.
func (t *Tuner) Measure(ctx context.Context, r Runner, s Shape, opt MeasureOptions) (e Entry, err error) {
	s = t.here(s)
	before := t.stored(s)
	e = Entry{Device: t.device, Class: s.stored(), Peak: before.Peak}
	list := s.selection(&before, &e, opt.All)
	x, err := newExercise(ctx, r, s)
	if err != nil {
		return e, err
	}
	defer x.release()
	e.FLOPs = float64(backend.NewPlan(&x.long).FLOPs)
	var unwritten error
	keep := func(running string) {
		e.When = time.Now().UTC().Round(time.Second)
		now := e
		now.Trials = slices.Clone(e.Trials)
		if running != "" {
			if opt.Progress != nil {
				opt.Progress(running)
			}
			t := Trial{Variant: running, Failed: notBack}
			if old := before.Trial(running); old != nil && old.Failed == notBack {
				t.Failed = notBackTwice
			}
			now.Trials = append(now.Trials, t)
		}
		now.Keep(before.Trials)
		unwritten = t.learn(s, now)
	}
	if err := trials(ctx, x.candidates(list), &e, opt.Budget, keep); err != nil {
		return e, err
	}
	if opt.All { // now the clock rate is high
		if e.Peak, err = r.Peak(ctx); err != nil {
			return e, err
		}
	}
	e.Keep(before.Trials)
	for _, v := range list {
		if v.Label() == e.Best {
			if e.Code, err = s.code(v); err != nil {
				return e, err
			}
		}
	}
	keep("")
	if e.Best == "" {
		return e, fmt.Errorf("there was no room to try the variants, or neither they nor the plain kernel run: %w", backend.ErrUnsupported)
	}
	return e, unwritten
}

// selection returns the variants to try: the best of the last time, then new ones, then
// the others. Variants that are not tried again keep their earlier trial, in e.
func (s Shape) selection(before, e *Entry, all bool) []Variant {
	var list, again []Variant
	for _, v := range s.Candidates() {
		known := before.Trial(v.Label())
		bad := known != nil && known.Failed != ""
		switch {
		case bad && (known.Failed == notBackTwice || !all && (known.Failed != notBack || s.risky(v))):
			e.Trials = append(e.Trials, *known)
		case known == nil && s.risky(v) && !all:
		case v.Label() == before.Best:
			list = slices.Insert(list, 0, v)
		case known == nil || bad:
			list = append(list, v)
		default:
			again = append(again, v)
		}
	}
	return append(list, again...)
}
