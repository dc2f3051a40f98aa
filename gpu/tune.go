package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/tuned"
)

// Tuning says where a device's choice among the variants of a kernel comes from. It
// changes how fast calls are, never a bit of their results.
type Tuning uint8

const (
	// TuneDefault is what the environment variable ATTN_GPU_TUNE says (off, stored,
	// first), else TuneFirst on a GPU and TuneStored on a software driver, where to
	// compile a variant takes seconds.
	TuneDefault Tuning = iota
	// TuneOff takes what a rule says, from the shape and the device's limits, and
	// looks at no file.
	TuneOff
	// TuneStored takes what was measured earlier, by attn tune or by TuneFirst,
	// and the rule where nothing was.
	TuneStored
	// TuneFirst also measures: the first call of a class of shapes (and Warmup for
	// it) takes longer by about Options.TuneBudget. What it finds is kept in
	// Options.TuneFile.
	TuneFirst
)

// String returns off, stored, first or default.
func (t Tuning) String() string {
	return [...]string{"default", "off", "stored", "first"}[min(t, TuneFirst)]
}

// defaultTuneBudget is for a class on a GPU: its drivers take some tenths of a
// second to compile a variant, and there are five or six.
const defaultTuneBudget = 3 * time.Second

// tuner holds what is known of the variants of a device.
type tuner struct {
	mode   Tuning
	budget time.Duration
	path   string // of the file, "" where there can be none
	device tuned.Device

	mu      sync.Mutex
	read    bool
	entries []tuned.Entry // of the file
	word    string        // why the file is of no use, "" when it is
	known   map[tuneClass]*decision
}

// decision is what calls of a class take.
type decision struct {
	// v was measured, unless rule is set; then chooseVariant says. The zero variant
	// is the plain kernel.
	v    flashVariant
	rule bool
	why  string
	// bad are the variants that failed where there is no choice yet.
	bad []string
	// open: something was not measured and nobody is at it.
	open bool
}

// tuningPath is where the file is unless Options say; tests have another place.
var tuningPath = tuned.Path

func newTuner(opt Options, info backend.Info) *tuner {
	t := &tuner{
		mode: opt.Tune, budget: opt.TuneBudget, path: opt.TuneFile,
		device: tuned.NewDevice(info.Device, info.Driver, info.Provider, limitsText(info.Limits)),
		known:  map[tuneClass]*decision{},
	}
	if t.budget <= 0 {
		t.budget = defaultTuneBudget
	}
	if t.path == "" && t.mode != TuneOff {
		var err error
		if t.path, err = tuningPath(); err != nil {
			t.word = fmt.Sprintf("no tuning file: %v", err)
		}
	}
	return t
}

const tuneEnv = "ATTN_GPU_TUNE"

// or returns t, what the environment says where t is the default, and where that
// says nothing what suits a type of adapter. backend.ErrOption when the environment
// says something else.
func (t Tuning) or(adapter backend.DeviceType) (Tuning, error) {
	said := os.Getenv(tuneEnv)
	switch {
	case t > TuneFirst:
		return t, fmt.Errorf("gpu: Options.Tune is %d, it goes up to %d: %w", t, TuneFirst, backend.ErrOption)
	case t != TuneDefault:
		return t, nil
	case said == "" && adapter == backend.CPU:
		return TuneStored, nil
	case said == "":
		return TuneFirst, nil
	}
	for _, t := range []Tuning{TuneOff, TuneStored, TuneFirst} {
		if t.String() == said {
			return t, nil
		}
	}
	return t, fmt.Errorf("gpu: %s is %q, it must be off, stored or first: %w", tuneEnv, said, backend.ErrOption)
}

func limitsText(limits []backend.Limit) string {
	texts := make([]string, len(limits))
	for i, l := range limits {
		texts[i] = fmt.Sprintf("%s %d", l.Name, l.Value)
	}
	return strings.Join(texts, ", ")
}

// choose picks the variant for a call: the measured one, else by rule. The zero
// variant stands for the plain kernel.
func (t *tuner) choose(s flashShape) (v flashVariant, why string) {
	if t.mode == TuneOff {
		v, why = chooseVariant(s)
		return v, why + ", by rule as tuning is off"
	}
	t.mu.Lock()
	d := *t.decide(s)
	t.mu.Unlock()
	if !d.rule {
		return d.v, d.why
	}
	v, why = chooseVariant(s)
	if why += ", by rule: " + d.why; !slices.Contains(d.bad, v.label()) {
		return v, why
	}
	for _, v := range s.candidates() {
		if !v.risky() && !slices.Contains(d.bad, v.label()) {
			return v, "what the rule says has failed before; " + d.why
		}
	}
	return flashVariant{}, "every variant of the register-tiled kernel has failed before; " + d.why
}

// decide returns what is known of s's class. t.mu is held.
func (t *tuner) decide(s flashShape) *decision {
	k := s.tuneClass()
	if d := t.known[k]; d != nil {
		return d
	}
	if !t.read && t.path != "" {
		t.read = true
		var err error
		if t.entries, err = tuned.Read(t.path); err != nil {
			t.word = fmt.Sprintf("the tuning file was left aside (%v)", err)
		}
	}
	d := &decision{rule: true, open: true, why: "this shape was not measured"}
	if t.word != "" {
		d.why += "; " + t.word
	}
	t.known[k] = d
	if !slices.ContainsFunc(t.entries, func(e tuned.Entry) bool { return k.like(e.Class) }) {
		return d
	}
	list := s.candidates()
	if e := tuned.Find(t.entries, t.device, k.stored(s, list)); e != nil {
		t.settle(d, s, e, list, time.Now())
	}
	return d
}

// underWay is how long a file's entry without a choice is taken for one that
// another process is measuring right now.
const underWay = time.Minute

// settle turns what the file says of a class into a decision.
func (t *tuner) settle(d *decision, s flashShape, e *tuned.Entry, list []flashVariant, now time.Time) {
	if e.Best == "" {
		d.bad = failed(e)
		if age := now.Sub(e.When); age >= 0 && age < underWay {
			d.open, d.why = false, "another process is measuring this shape"
		}
		return
	}
	best := e.Trial(e.Best)
	if e.Best == plainName {
		*d = decision{why: "no variant of the register-tiled kernel was right on this device when it was measured (attn tune --show)"}
		return
	}
	for _, v := range list {
		if v.label() != e.Best {
			continue
		}
		if code, err := s.code(v, e.Class.ValueDim); err != nil || code != e.Code {
			return // it is another one by now
		}
		others := 0
		for _, o := range e.Trials {
			if o.Failed == "" && o.Variant != plainName && o.Variant != e.Best {
				others++
			}
		}
		*d = decision{v: v, why: fmt.Sprintf("measured on %s as the fastest of %d variants, %v a call of the class",
			e.When.Format(time.DateOnly), others+1, seconds(best.Seconds))}
		d.open = slices.ContainsFunc(list, func(v flashVariant) bool { return !v.risky() && e.Trial(v.label()) == nil })
		if plain := e.Trial(plainName); plain != nil && plain.Failed == "" {
			d.why += fmt.Sprintf(" against %v of the plain kernel", seconds(plain.Seconds))
		}
		return
	}
}

// failed returns the variants whose trials failed.
func failed(e *tuned.Entry) (names []string) {
	for _, t := range e.Trials {
		if t.Failed != "" {
			names = append(names, t.Variant)
		}
	}
	return names
}

// seconds rounds a time for reading.
func seconds(s float64) time.Duration {
	d := time.Duration(s * float64(time.Second))
	digits := max(math.Floor(math.Log10(max(float64(d), 1)))-2, 0)
	return d.Round(time.Duration(math.Pow(10, digits)))
}

// claim reports whether the caller is the one to measure s's class now: once in a
// process, for a class that was not measured or for which the time was too short.
func (t *tuner) claim(s flashShape) bool {
	if t.mode != TuneFirst {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.decide(s)
	if !d.open {
		return false
	}
	if d.open = false; d.rule {
		d.why = "this shape is being measured"
	}
	return true
}

// learn keeps what was measured of a class, in memory and in the file. An entry
// without a best is one that is under way.
func (t *tuner) learn(s flashShape, e tuned.Entry, list []flashVariant) (err error) {
	if t.path != "" {
		err = tuned.Put(t.path, e)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.decide(s)
	e.Trials = slices.Clone(e.Trials) // the caller goes on with its own
	t.entries = slices.DeleteFunc(t.entries, func(old tuned.Entry) bool { return old.Device == e.Device && old.Class == e.Class })
	t.entries = append(t.entries, e)
	if err != nil {
		t.word = fmt.Sprintf("the tuning file was not written (%v)", err)
	}
	if d.rule {
		d.bad = failed(&e)
	}
	if e.Best != "" {
		t.settle(d, s, &e, list, e.When)
		d.open = false // what this process had no time for, the next one has
		if err != nil {
			d.why += "; " + t.word
		}
	}
	return err
}

// leave ends a claim without a result.
func (t *tuner) leave(s flashShape, why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if d := t.decide(s); d.rule {
		d.why = why
	}
}

// before returns what was measured of a class, a blank entry where nothing was.
func (t *tuner) before(class tuned.Class) tuned.Entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := tuned.Find(t.entries, t.device, class); e != nil {
		return *e
	}
	return tuned.Entry{}
}

// tuneFirst measures the variants for calls of shape s, whose class nobody has
// measured. Only what ends the call that asked is an error: its context, a lost
// device.
func (b *Backend) tuneFirst(ctx context.Context, s flashShape) error {
	_, err := b.tune(ctx, s, TuneOptions{Budget: b.tuner.budget}, nil)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		b.tuner.leave(s, "measuring was cancelled")
		return ctx.Err()
	case errors.Is(err, backend.ErrDeviceLost):
		return err
	}
	b.tuner.leave(s, fmt.Sprintf("measuring failed: %v", err))
	return nil
}
