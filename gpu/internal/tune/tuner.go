package tune

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/tunefile"
)

// Mode selects how a device chooses among the variants of a kernel. It changes the speed of
// calls and not the bits of their results, except that Plain has bits of its own.
type Mode uint8

const (
	Default Mode = iota // resolved by Mode.Or
	Off                 // by rule, without a file
	Stored              // as measured earlier, else by rule
	First               // as Stored, and measure on first use
	Plain               // the plain kernel
)

var modeNames = [...]string{"default", "off", "stored", "first", plainName}

// String returns off, stored, first, plain or default.
func (m Mode) String() string { return modeNames[min(m, Plain)] }

// env is the environment variable that Default reads.
const env = "ATTN_GPU_TUNE"

// Or resolves Default for a type of adapter. It returns backend.ErrOption for other values of the environment variable.
func (m Mode) Or(adapter backend.DeviceType) (Mode, error) {
	value := os.Getenv(env)
	switch {
	case m > Plain:
		return m, fmt.Errorf("gpu: Options.Tune is %d, it goes up to %d: %w", m, Plain, backend.ErrOption)
	case m != Default:
		return m, nil
	case value == "" && adapter == backend.CPU:
		return Stored, nil
	case value == "":
		return First, nil
	}
	if i := slices.Index(modeNames[:], value); i > int(Default) {
		return Mode(i), nil
	}
	return m, fmt.Errorf("gpu: %s is %q, it must be off, stored, first or plain: %w", env, value, backend.ErrOption)
}

// defaultBudget suits a class on a GPU, whose drivers compile a variant in 0.3 to 2.6 s (an NVIDIA H200).
const defaultBudget = 3 * time.Second

// Options configure a Tuner.
type Options struct {
	Mode   Mode          // not Default
	Budget time.Duration // of a class measured on first use; 0 means 3 s
	Path   string        // of the file; "" keeps no file
	Info   backend.Info
}

// Tuner holds the choices for a device. Its methods are safe for concurrent use.
type Tuner struct {
	Options
	device tunefile.Device

	mu       sync.Mutex
	read     bool
	entries  []Entry // of the file
	unusable string  // why the file is of no use, or ""
	known    map[Class]*decision
}

// decision is the choice for a class.
type decision struct {
	// v was measured, unless rule is set; then Shape.Rule applies. The zero variant is the plain kernel.
	v    Variant
	rule bool
	why  string
	bad  []string // variants that failed, while rule is set
	open bool     // some variants were not measured, and no call is measuring them
}

// New returns a tuner.
func New(o Options) *Tuner {
	t := &Tuner{Options: o, device: tunefile.DeviceOf(o.Info), known: map[Class]*decision{}}
	t.Budget = cmp.Or(max(t.Budget, 0), defaultBudget)
	if t.Path == "" {
		t.unusable = "the system names no folder for a tuning file"
	}
	return t
}

// here returns s with what depends on the device's name.
func (t *Tuner) here(s Shape) Shape {
	device := strings.ToLower(t.Info.Device + t.Info.Driver)
	s.Direct = s.Software && strings.Contains(device, "swiftshader")
	s.NVIDIA = !s.Software && strings.Contains(device, "nvidia")
	return s
}

// Choose returns the variant for calls of shape s and the reason, as in a plan: the
// measured variant, else that of the rule. The zero Variant stands for the plain kernel.
func (t *Tuner) Choose(s Shape) (v Variant, why string) {
	s = t.here(s)
	switch t.Mode {
	case Off:
		v, why = s.Rule()
		return v, why + ", by rule as tuning is off"
	case Plain:
		return v, "tuning is plain"
	}
	t.mu.Lock()
	d := *t.decide(s)
	t.mu.Unlock()
	if !d.rule {
		return d.v, d.why
	}
	v, why = s.Rule()
	if !slices.Contains(d.bad, v.Label()) {
		return v, why + ", by rule: " + d.why
	}
	for _, v := range s.Candidates() {
		if !s.risky(v) && !slices.Contains(d.bad, v.Label()) {
			return v, "the rule's choice has failed before; " + d.why
		}
	}
	return Variant{}, "every variant of the register-tiled kernel has failed before; " + d.why
}

// decide returns the decision for s's class. The caller holds t.mu.
func (t *Tuner) decide(s Shape) *decision {
	k := s.class()
	if d := t.known[k]; d != nil {
		return d
	}
	if !t.read && t.Path != "" {
		t.read = true
		var err error
		if t.entries, err = tunefile.Read(t.Path); err != nil {
			t.unusable = fmt.Sprintf("the tuning file was ignored (%v)", err)
		}
	}
	d := &decision{rule: true, open: true, why: "this shape was not measured"}
	if t.unusable != "" {
		d.why += "; " + t.unusable
	}
	t.known[k] = d
	// Hashing the candidates takes a while and is not done for other classes.
	if slices.ContainsFunc(t.entries, func(e Entry) bool { e.Class.Source = ""; return e.Class == k }) {
		if e := tunefile.Find(t.entries, t.device, s.stored()); e != nil {
			d.settle(s, e, time.Now())
		}
	}
	return d
}

// underWay is the age up to which an entry without a choice is taken for a measurement that runs in another process.
const underWay = time.Minute

// settle turns an entry into a decision, if it still applies.
func (d *decision) settle(s Shape, e *Entry, now time.Time) {
	switch e.Best {
	case "":
		d.bad = e.Failed()
		if age := now.Sub(e.When); age >= 0 && age < underWay {
			d.open, d.why = false, "another process is measuring this shape"
		}
		return
	case plainName:
		*d = decision{why: "no variant of the register-tiled kernel was right on this device when it was measured (attn tune --show)"}
		return
	}
	list := s.Candidates()
	i := slices.IndexFunc(list, func(v Variant) bool { return v.Label() == e.Best })
	if i < 0 {
		return
	}
	if code, err := s.code(list[i]); err != nil || code != e.Code {
		return // the kernel has changed since
	}
	against, right := "", len(e.Trials)-len(e.Failed()) // right without the plain kernel
	if plain := e.Trial(plainName); plain != nil && plain.Failed == "" {
		against, right = fmt.Sprintf(" against %v of the plain kernel", seconds(plain.Seconds)), right-1
	}
	*d = decision{
		v: list[i],
		why: fmt.Sprintf("measured on %s as the fastest of %d variants, %v a call of the class%s",
			e.When.Format(time.DateOnly), right, seconds(e.Trial(e.Best).Seconds), against),
		open: slices.ContainsFunc(list, func(v Variant) bool {
			t := e.Trial(v.Label())
			return !s.risky(v) && (t == nil || t.Failed == notBack)
		}),
	}
}

// seconds returns a time to the microsecond.
func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Microsecond)
}

// Claim reports whether the caller must measure s's class with [Tuner.FirstUse]: in mode
// First, once in a process, for a class with variants that were not measured.
func (t *Tuner) Claim(s Shape) bool {
	if t.Mode != First {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.decide(t.here(s))
	if !d.open {
		return false
	}
	if d.open = false; d.rule {
		d.why = "this shape is being measured"
	}
	return true
}

// FirstUse measures the variants for calls of shape s within the budget. It returns only
// errors that end the call that asked: its context's, and a lost device.
func (t *Tuner) FirstUse(ctx context.Context, r Runner, s Shape) error {
	_, err := t.Measure(ctx, r, s, MeasureOptions{Budget: t.Budget})
	why := fmt.Sprintf("measuring failed: %v", err)
	switch {
	case err == nil || errors.Is(err, backend.ErrDeviceLost) && ctx.Err() == nil:
		return err
	case ctx.Err() != nil:
		err, why = ctx.Err(), "measuring was cancelled"
	default:
		err = nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if d := t.decide(s); d.rule {
		d.why = why
	}
	return err
}

// learn keeps an entry for s's class, in memory and in the file. An entry without a choice is a measurement under way.
func (t *Tuner) learn(s Shape, e Entry) (err error) {
	if t.Path != "" {
		err = tunefile.Put(t.Path, e)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.decide(s)
	t.entries = tunefile.With(t.entries, e)
	if err != nil {
		t.unusable = fmt.Sprintf("the tuning file was not written (%v)", err)
	}
	if d.rule {
		d.bad = e.Failed()
	}
	if e.Best != "" {
		d.settle(s, &e, e.When)
		d.open = false // the next process measures what the budget excluded
		if err != nil {
			d.why += "; " + t.unusable
		}
	}
	return err
}

// stored returns what was measured of s's class, a zero entry if nothing was.
func (t *Tuner) stored(s Shape) Entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.decide(s) // reads the file
	if e := tunefile.Find(t.entries, t.device, s.stored()); e != nil {
		return *e
	}
	return Entry{}
}
