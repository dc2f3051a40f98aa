package tune

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
)

// candidate is one way to compute the calls of a class.
type candidate struct {
	name string
	// reference is set for the plain kernel, which is timed for comparison and chosen
	// only when all others fail.
	reference bool
	// try runs it once and returns an error when it does not run or is wrong.
	try func(ctx context.Context) error
	// time returns how long so many rounds took.
	time func(ctx context.Context, rounds int) (time.Duration, error)
}

const (
	// trialTime is the shortest time that is measured: long compared with a
	// submission, which takes 0.1 to 0.5 ms.
	trialTime = 5 * time.Millisecond
	// maxRounds bounds the rounds of very short calls.
	maxRounds = 128
	// Candidates are timed trialRepeats times in turns, so that changes of the clock
	// rate and other programs affect all of them. When the budget is spent they are
	// timed minTrialRepeats times.
	trialRepeats    = 7
	minTrialRepeats = 3
)

// alwaysTried candidates are tried whatever the budget: the reference, the best known
// variant, and a new one, so that each process makes progress.
const alwaysTried = 3

// notBack is the failure of a trial that has begun. It stays in the file when the
// process does not survive the trial.
const notBack = "the program did not survive its trial"

// trials tries the candidates and times those that are right. The first alwaysTried are
// always tried, and the others until one is right and the budget is spent; a budget of 0
// is no bound. Candidates with a trial in e, such as an earlier failure, are skipped.
// keep is called before each try, and when an error ends the trials.
//
// It sets e.Best to the fastest candidate that is not the reference, to the reference
// when all others failed, and to "" otherwise. It returns the context's error, or that
// of a lost device. A failure for lack of memory leaves no trial.
func trials(ctx context.Context, list []candidate, e *Entry, budget time.Duration, keep func()) (err error) {
	defer func() {
		if err != nil {
			e.Trials = slices.DeleteFunc(e.Trials, func(t Trial) bool { return t.Failed == notBack })
			keep()
		}
	}()
	began := time.Now()
	spent := func() bool { return budget > 0 && time.Since(began) > budget }
	var right []candidate
	tried, variants := 0, 0 // variants are right and not the reference
	for _, c := range list {
		if e.Trial(c.name) != nil || tried >= alwaysTried && variants > 0 && spent() {
			continue
		}
		tried++
		e.Trials = append(e.Trials, Trial{Variant: c.name, Failed: notBack})
		last := len(e.Trials) - 1
		keep()
		err := c.try(ctx)
		switch lost := errors.Is(err, backend.ErrDeviceLost); {
		case err == nil:
			right = append(right, c)
			if !c.reference {
				variants++
			}
		case ctx.Err() != nil:
			return ctx.Err()
		case !lost && errors.Is(err, backend.ErrMemory): // other programs may hold it
			e.Trials = e.Trials[:last]
		default:
			if e.Trials[last].Failed = err.Error(); lost {
				return err
			}
		}
	}
	if err := measure(ctx, right, e, spent); err != nil {
		return err
	}
	untried := slices.ContainsFunc(list, func(c candidate) bool { return e.Trial(c.name) == nil })
	var best, reference *Trial
	for _, c := range right {
		switch t := e.Trial(c.name); {
		case t.Failed != "":
		case c.reference:
			reference = t
		case best == nil || t.Seconds < best.Seconds:
			best = t
		}
	}
	if best == nil && !untried {
		best = reference
	}
	if best != nil {
		e.Best = best.Variant
	}
	return nil
}

// measure times candidates in turns and stores the medians in their trials.
func measure(ctx context.Context, right []candidate, e *Entry, spent func() bool) error {
	rounds := make([]int, len(right)) // -1 for candidates that failed
	times := make([][]float64, len(right))
	for n := range trialRepeats + 1 {
		if n > minTrialRepeats && spent() {
			break
		}
		for i, c := range right {
			if rounds[i] < 0 {
				continue
			}
			took, err := c.time(ctx, max(rounds[i], 1))
			switch {
			case err != nil && ctx.Err() != nil:
				return ctx.Err()
			case err != nil:
				e.Trial(c.name).Failed = err.Error()
				if errors.Is(err, backend.ErrDeviceLost) {
					return err
				}
				rounds[i] = -1
			case n == 0: // a warm-up that finds the number of rounds
				rounds[i] = int(min(max(trialTime/max(took, 1), 1), maxRounds))
			default:
				times[i] = append(times[i], max(took, 1).Seconds()/float64(rounds[i]))
			}
		}
	}
	for i, c := range right {
		if t := e.Trial(c.name); rounds[i] > 0 {
			slices.Sort(times[i])
			t.Seconds, t.Failed = times[i][len(times[i])/2], ""
		}
	}
	return nil
}

// MeasureOptions are the options of [Tuner.Measure].
type MeasureOptions struct {
	// Budget ends the trials early; 0 is no bound.
	Budget time.Duration
	// Probe is called before a trial of a variant that may lose the device, or that the
	// last process did not survive. It tries the variant elsewhere, for example in
	// another process with [Probe]; its error excludes the variant. Without Probe
	// these variants, and variants that failed before, are not tried.
	Probe func(ctx context.Context, variant string) error
	// Progress, unless nil, is called with the name of each variant before its trial.
	Progress func(variant string)
}

// Measure measures the variants for calls of shape s, even if that was done before, and
// keeps the choice in the file and for later calls. A variant counts if its results
// agree with those of the plain kernel within twice the error bound of package oracle,
// and with those of the other variants in every bit.
//
// It returns the entry also with the error of a file that could not be written. It
// returns backend.ErrUnsupported when no variant runs.
func (t *Tuner) Measure(ctx context.Context, r Runner, s Shape, opt MeasureOptions) (Entry, error) {
	peak, err := r.Peak(ctx)
	if err != nil {
		return Entry{}, fmt.Errorf("tune: %w", err)
	}
	return t.measure(ctx, r, s, opt, peak)
}

// measure is Measure with a known peak; 0 stands for that of earlier measurements.
func (t *Tuner) measure(ctx context.Context, r Runner, s Shape, opt MeasureOptions, peak float64) (Entry, error) {
	before := t.stored(s)
	e := Entry{Device: t.device, Class: s.stored(), Peak: cmp.Or(peak, before.Peak)}
	list, err := selection(ctx, s.Candidates(), &before, &e, opt)
	if err != nil {
		return e, err
	}
	x, err := newExercise(ctx, r, s)
	if err != nil {
		return e, fmt.Errorf("tune: %w", err)
	}
	defer x.release()
	e.FLOPs = float64(backend.NewPlan(&x.long).FLOPs)
	var unwritten error
	keep := func() {
		e.When = time.Now().UTC().Round(time.Second)
		unwritten = t.learn(s, e)
		if n := len(e.Trials); opt.Progress != nil && n > 0 && e.Trials[n-1].Failed == notBack {
			opt.Progress(e.Trials[n-1].Variant)
		}
	}
	if err := trials(ctx, x.candidates(list), &e, opt.Budget, keep); err != nil {
		return e, fmt.Errorf("tune: %w", err)
	}
	for _, old := range before.Trials { // those that the budget excluded
		if e.Trial(old.Variant) == nil && old.Failed != notBack {
			e.Trials = append(e.Trials, old)
		}
	}
	for _, v := range list {
		if v.Label() == e.Best {
			if e.Code, err = s.code(v); err != nil {
				return e, fmt.Errorf("tune: %w", err)
			}
		}
	}
	keep()
	if e.Best == "" {
		return e, fmt.Errorf("tune: there was no room to try the variants, or neither they nor the plain kernel run: %w", backend.ErrUnsupported)
	}
	if unwritten != nil {
		return e, fmt.Errorf("tune: %w", unwritten)
	}
	return e, nil
}

// selection returns the variants to try: the best of the last time, then new ones, then
// the others. Variants that are not tried again keep their earlier trial, in e.
func selection(ctx context.Context, all []Variant, before, e *Entry, opt MeasureOptions) ([]Variant, error) {
	var list, again []Variant
	for _, v := range all {
		known := before.Trial(v.Label())
		failed := known != nil && known.Failed != ""
		switch {
		case failed && opt.Probe == nil:
			e.Trials = append(e.Trials, *known)
		case failed || known == nil && v.risky():
			if opt.Probe == nil {
				continue
			}
			if opt.Progress != nil {
				opt.Progress(v.Label())
			}
			if err := opt.Probe(ctx, v.Label()); err == nil {
				list = append(list, v)
			} else if ctx.Err() != nil {
				return nil, ctx.Err()
			} else {
				e.Trials = append(e.Trials, Trial{Variant: v.Label(), Failed: err.Error()})
			}
		case v.Label() == before.Best:
			list = slices.Insert(list, 0, v)
		case known == nil:
			list = append(list, v)
		default:
			again = append(again, v)
		}
	}
	return append(list, again...), nil
}

// Probe runs one variant for calls of shape s and compares it with the plain kernel, as
// [Tuner.Measure] does, and keeps nothing. A lost device may end the process.
func Probe(ctx context.Context, r Runner, s Shape, variant string) error {
	list := slices.DeleteFunc(s.Candidates(), func(v Variant) bool { return v.Label() != variant })
	if len(list) == 0 {
		return fmt.Errorf("tune: no variant %q for this shape: %w", variant, backend.ErrOption)
	}
	x, err := newExercise(ctx, r, s)
	if err != nil {
		return fmt.Errorf("tune: %w", err)
	}
	defer x.release()
	for _, c := range x.candidates(list) {
		if err := c.try(ctx); err != nil {
			return fmt.Errorf("tune: variant %s: %w", c.name, err)
		}
	}
	return nil
}
