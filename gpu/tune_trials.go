package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/tuned"
)

// candidate is a way to compute calls of a class, as trials see it.
type candidate struct {
	name string
	// reference is one that is only timed beside the others.
	reference bool
	// try runs it once and returns an error when it does not run or is wrong.
	try func(ctx context.Context) error
	// time returns how long so many rounds took.
	time func(ctx context.Context, rounds int) (time.Duration, error)
}

const (
	// trialTime is what the rounds between two looks at a clock take or more: long
	// against the cost of a submission, 0.1 to 0.5 ms.
	trialTime = 5 * time.Millisecond
	// maxRounds bounds them where a round is that short.
	maxRounds = 128
	// Each candidate is timed so often, in turns, so that what changes meanwhile
	// (clocks, other programs) meets all; less often when the budget is spent.
	trialRepeats    = 7
	minTrialRepeats = 3
)

// alwaysTried is how many candidates are tried whatever the budget: the reference,
// the best that is known, and one that is new, so that each process gets further.
const alwaysTried = 3

// notBack is the failure of a trial that has begun: what stays in the file when
// the process does not live to its end.
const notBack = "it was tried and the program did not come back"

// trials tries the candidates, the first three and until one is right always, the
// others until the budget is spent (0 is no bound), and times those that are right.
// It adds to e.Trials, where earlier failures may stand, which are not tried again,
// and sets e.Best to the fastest that is no reference, to the reference when all
// others failed, and leaves it empty without either. keep is called with e as it stands before each try.
//
// An error ends the trials: the context's, or a lost device, whose candidate has
// failed then. Who was not timed by then has no trial.
func trials(ctx context.Context, list []candidate, e *tuned.Entry, budget time.Duration, keep func()) (err error) {
	defer func() {
		if err != nil {
			e.Trials = slices.DeleteFunc(e.Trials, func(t tuned.Trial) bool { return t.Failed == notBack })
			keep()
		}
	}()
	began := time.Now()
	spent := func() bool { return budget > 0 && time.Since(began) > budget }
	var right []candidate
	tried, variants := 0, 0 // of which so many are right and no reference
	for _, c := range list {
		if e.Trial(c.name) != nil || tried >= alwaysTried && variants > 0 && spent() {
			continue
		}
		tried++
		e.Trials = append(e.Trials, tuned.Trial{Variant: c.name, Failed: notBack})
		last := len(e.Trials) - 1
		keep()
		err := c.try(ctx)
		if err != nil && ctx.Err() != nil {
			return ctx.Err() // it is not to blame
		}
		if err != nil {
			e.Trials[last].Failed = err.Error()
			switch {
			case errors.Is(err, backend.ErrDeviceLost):
				return err
			case errors.Is(err, backend.ErrMemory): // nor for what others hold
				e.Trials = e.Trials[:last]
			}
			continue
		}
		right = append(right, c)
		if !c.reference {
			variants++
		}
	}
	if err := measure(ctx, right, e, spent); err != nil {
		return err
	}
	var best *tuned.Trial
	for _, c := range right {
		t := e.Trial(c.name)
		if t.Failed == "" && !c.reference && (best == nil || t.Seconds < best.Seconds) {
			best = t
		}
	}
	untried := slices.ContainsFunc(list, func(c candidate) bool { return e.Trial(c.name) == nil })
	for _, c := range right {
		if best == nil && !untried && c.reference && e.Trial(c.name).Failed == "" {
			best = e.Trial(c.name)
		}
	}
	if best != nil {
		e.Best = best.Variant
	}
	return nil
}

// measure times candidates in turns and fills in their trials.
func measure(ctx context.Context, right []candidate, e *tuned.Entry, spent func() bool) error {
	rounds := make([]int, len(right))
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
			case err != nil && (ctx.Err() != nil || errors.Is(err, backend.ErrDeviceLost)):
				if ctx.Err() == nil {
					e.Trial(c.name).Failed = err.Error()
				}
				return cmp.Or(ctx.Err(), err)
			case err != nil:
				e.Trial(c.name).Failed = err.Error()
				rounds[i] = -1
			case n == 0: // warm, and how many rounds
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

// TuneOptions are those of [Backend.Tune].
type TuneOptions struct {
	// Budget ends the trials early, once it is spent; 0 is no bound.
	Budget time.Duration
	// Probe is asked before a variant is tried that may lose the device, or that did
	// not come back the last time, and tries it elsewhere, in another process with
	// [Backend.Probe]. Its error is why the variant is left out. nil leaves all of
	// them out, and what failed before.
	Probe func(ctx context.Context, variant string) error
	// Progress, unless nil, is told the name of each variant before it is tried.
	Progress func(variant string)
}

// Tune measures the variants for calls like c, whatever was measured before, and
// keeps what it finds in Options.TuneFile and for the calls to come. Each is compared
// with the plain kernel, within twice the error bound that package oracle derives, and
// with the other variants, to the bit, before it counts. c's operands need no memory.
//
// The entry says which is the best. It comes beside the error of a file that could
// not be written. backend.ErrUnsupported when the register-tiled kernel cannot run c,
// backend.ErrOption when tuning is off.
func (b *Backend) Tune(ctx context.Context, c *backend.Call, opt TuneOptions) (tuned.Entry, error) {
	if err := b.enter(ctx); err != nil {
		return tuned.Entry{}, err
	}
	defer b.leave()
	s, err := b.tunable(c)
	if err != nil {
		return tuned.Entry{}, err
	}
	return b.tune(ctx, s, opt, b.peak)
}

// Probe runs one variant for calls like c and compares it with the plain kernel, as
// Tune does, and keeps nothing. The error says what is wrong; a device that is lost
// may take the process with it.
func (b *Backend) Probe(ctx context.Context, c *backend.Call, variant string) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	s, err := b.tunable(c)
	if err != nil {
		return err
	}
	list := slices.DeleteFunc(s.candidates(), func(v flashVariant) bool { return v.label() != variant })
	if len(list) == 0 {
		return fmt.Errorf("tune: no variant %q for this shape on %s: %w", variant, b.info.Name, backend.ErrOption)
	}
	x, err := b.newExercise(ctx, s)
	if err != nil {
		return fmt.Errorf("tune: %w", err)
	}
	defer x.release()
	for _, c := range x.all(list) {
		if err := c.try(ctx); err != nil {
			return fmt.Errorf("tune: variant %s: %w", c.name, err)
		}
	}
	return nil
}

// tunable returns the shape of c.
func (b *Backend) tunable(c *backend.Call) (flashShape, error) {
	if b.tuner.mode == TuneOff {
		return flashShape{}, fmt.Errorf("tune: tuning of %s is off: %w", b.info.Name, backend.ErrOption)
	}
	a, err := b.newAttention(c)
	if err != nil {
		return flashShape{}, fmt.Errorf("tune: %w", err)
	}
	if s := a.shape(); len(s.candidates()) > 0 {
		return s, nil
	}
	return flashShape{}, fmt.Errorf("tune: no variant of the register-tiled kernel fits (%s): %w", a.why, backend.ErrUnsupported)
}

// tune measures the variants for calls of shape s. peak, unless nil, measures the
// ceiling that stands beside them.
func (b *Backend) tune(ctx context.Context, s flashShape, opt TuneOptions, peak func(context.Context) (float64, error)) (tuned.Entry, error) {
	all := s.candidates()
	class := s.tuneClass().stored(s, all)
	e := tuned.Entry{Device: b.tuner.device, Class: class}
	if peak != nil {
		var err error
		if e.Peak, err = peak(ctx); err != nil {
			return e, fmt.Errorf("tune: %w", err)
		}
	}
	before := b.tuner.before(class)
	if peak == nil {
		e.Peak = before.Peak
	}
	var list, again []flashVariant
	for _, v := range all {
		known := before.Trial(v.label())
		failed := known != nil && known.Failed != ""
		switch {
		case failed && opt.Probe == nil:
			e.Trials = append(e.Trials, *known)
		case !failed && (known != nil || !v.risky()):
			switch {
			case v.label() == before.Best:
				list = slices.Insert(list, 0, v)
			case known == nil:
				list = append(list, v)
			default:
				again = append(again, v)
			}
		case opt.Probe != nil:
			if opt.Progress != nil {
				opt.Progress(v.label())
			}
			if err := opt.Probe(ctx, v.label()); err != nil {
				if ctx.Err() != nil {
					return e, ctx.Err()
				}
				e.Trials = append(e.Trials, tuned.Trial{Variant: v.label(), Failed: err.Error()})
				continue
			}
			list = append(list, v)
		}
	}
	list = append(list, again...)
	x, err := b.newExercise(ctx, s)
	if err != nil {
		return e, fmt.Errorf("tune: %w", err)
	}
	defer x.release()
	e.FLOPs = float64(backend.NewPlan(&x.long).FLOPs)
	var lost error
	keep := func() {
		e.When = time.Now().UTC().Round(time.Second)
		lost = b.tuner.learn(s, e, all)
		if n := len(e.Trials); opt.Progress != nil && n > 0 && e.Trials[n-1].Failed == notBack {
			opt.Progress(e.Trials[n-1].Variant)
		}
	}
	if err := trials(ctx, x.all(list), &e, opt.Budget, keep); err != nil {
		return e, fmt.Errorf("tune: %w", err)
	}
	for _, t := range before.Trials { // what there was no time to repeat
		if e.Trial(t.Variant) == nil && t.Failed != notBack {
			e.Trials = append(e.Trials, t)
		}
	}
	for _, v := range all {
		if v.label() == e.Best {
			if e.Code, err = s.code(v, class.ValueDim); err != nil {
				return e, fmt.Errorf("tune: %w", err)
			}
		}
	}
	keep()
	if e.Best == "" {
		return e, fmt.Errorf("tune: there was no room to try the variants, or neither they nor the plain kernel run: %w", backend.ErrUnsupported)
	}
	if lost != nil {
		return e, fmt.Errorf("tune: %w", lost)
	}
	return e, nil
}
