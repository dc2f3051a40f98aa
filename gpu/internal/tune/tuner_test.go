package tune

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu/internal/tunefile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// fake runs calls on the CPU, whatever the variant.
type fake struct {
	be    *cpu.Backend
	hosts map[*backend.Memory]backend.Tensor
	last  Variant
	runs  int
	// before is called before each run, unless it is nil.
	before func(v Variant)
	// spoil changes the next results of a variant, unless it is nil.
	spoil func(v Variant, data []float32)
}

func newFake(t *testing.T) *fake {
	be := cpu.New(cpu.Options{})
	t.Cleanup(func() { _ = be.Close() })
	return &fake{be: be, hosts: map[*backend.Memory]backend.Tensor{}}
}

func (f *fake) Lanes() int                            { return 1 }
func (f *fake) Peak(context.Context) (float64, error) { return 1e12, nil }

func (f *fake) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	host, err := backend.AllocHost(dtype, shape)
	if err != nil {
		return host, err
	}
	t, err := f.be.Upload(ctx, host)
	f.hosts[t.Memory()] = host
	return t, err
}

func (f *fake) Upload(_ context.Context, dst, host backend.Tensor) error {
	to, err := backend.HostBytes(f.hosts[dst.Memory()])
	from, failed := backend.HostBytes(host)
	copy(to, from)
	return errors.Join(err, failed)
}

func (f *fake) Download(ctx context.Context, host, src backend.Tensor) error {
	err := f.be.Download(ctx, host, src)
	if data, err := host.Float32s(); err == nil && f.spoil != nil {
		f.spoil(f.last, data)
	}
	return err
}

func (f *fake) Run(ctx context.Context, c *backend.Call, v Variant, rounds int) (time.Duration, error) {
	if f.before != nil {
		f.before(v)
	}
	f.last = v
	f.runs++
	return time.Duration(rounds) * time.Millisecond, f.be.Attention(ctx, c)
}

var (
	info = backend.Info{Device: "GPU", Driver: "driver", Provider: "provider"}
	soft = Shape{
		Tiling: TilingOf(24, 24), ValueDim: 24, Partial: true, Heads: 4, SeqQ: 40, In: backend.F32, KV: backend.F32, Wide: true, Software: true,
		Limits: Limits{Threads: 256, Memory: 32 << 10, Binding: 1 << 27},
	}
)

// The operands of an exercise have the types of the calls that are tuned.
func TestExerciseTypes(t *testing.T) {
	for _, kv := range []backend.DType{backend.F32, backend.F16, backend.BF16, backend.Q8, backend.Q4, backend.F8} {
		s := soft
		s.KV, s.Half, s.Pairs, s.Wide = kv, true, exercised, kv.Quantised()
		if kv == backend.Q4 {
			s.Tiling, s.ValueDim = TilingOf(32, 64), 64
		}
		keys := longKeysCPU
		if s.Software = kv == backend.F32; !s.Software {
			keys = longKeys
		}
		x := must.Get(newExercise(t.Context(), newFake(t), s))(must.In(t, "%v", kv))
		defer x.release()
		if k, v, o := x.long.K.DType(), x.edge.V.DType(), x.long.O.DType(); k != kv || v != kv || o != backend.F16 {
			t.Errorf("%v: keys are %v, values %v, the output %v", kv, k, v, o)
		}
		if s := x.long.Q.Strides()[backend.Seq]; (s%4 == 0) != kv.Quantised() {
			t.Errorf("%v: rows of q are %d elements apart", kv, s)
		}
		if x.edge.Mask.IsZero() || x.long.Bias.IsZero() || x.edge.Softcap == 0 || x.edge.O.Shape()[backend.Seq] >= x.edge.K.Shape()[backend.Seq] {
			t.Errorf("%v: %+v", kv, x.edge)
		}
		if n, edge := x.long.K.Shape()[backend.Seq], x.edge.V.Shape()[backend.Seq]; n != keys || edge <= n+s.Tiling.Split || edge%s.Tiling.Keys == 0 {
			t.Errorf("%v: %d keys are timed and %d compared, in splits of %d and tiles of %d", kv, n, edge, s.Tiling.Split, s.Tiling.Keys)
		}
	}
}

// A variant whose results are wrong, by little or in a bit, never wins. A class for
// which no variant is right takes the plain kernel.
func TestWrongResults(t *testing.T) {
	s := soft
	s.Pairs.Mask = true
	f := newFake(t)
	x := must.Get(newExercise(t.Context(), f, s))(t)
	defer x.release()
	right, other := s.Candidates()[0], s.Candidates()[1]
	measured := func() Entry {
		t.Helper()
		x.plain, x.first = nil, nil
		var e Entry
		must.Do(t, trials(t.Context(), x.candidates([]Variant{right, other}), &e, 0, func(string) {}))
		return e
	}
	for _, at := range []int{0, 77} {
		f.spoil = func(v Variant, data []float32) {
			if v == other {
				data[at] = math.Nextafter32(data[at], 9)
			}
		}
		if e := measured(); e.Best != right.Label() || !strings.Contains(e.Trial(other.Label()).Failed, "other variants have") {
			t.Errorf("another bit at %d: %+v", at, e)
		}
	}
	isLSE := func(data []float32) bool { return len(data)%24 != 0 }
	var e Entry
	for _, wrong := range []struct {
		name  string
		spoil func(data []float32)
	}{
		{"an element", func(data []float32) { data[77] += float32(3 * x.offO) }},
		{"the last element", func(data []float32) { data[len(data)-1] -= float32(3 * x.offO) }},
		{"a log-sum-exp", func(data []float32) {
			if isLSE(data) {
				data[3] += float32(3 * x.offLSE)
			}
		}},
		{"NaN", func(data []float32) { data[0] = float32(math.NaN()) }},
	} {
		f.spoil = func(v Variant, data []float32) {
			if v.Name != "" {
				wrong.spoil(data)
			}
		}
		e = measured()
		if e.Best != plainName || !strings.Contains(e.Trial(right.Label()).Failed, errWrong.Error()) {
			t.Errorf("%s: %+v", wrong.name, e)
		}
	}
	tuner := New(Options{Mode: First, Path: filepath.Join(t.TempDir(), "attn", "tuning.json"), Info: info})
	e.Device, e.Class, e.When = tuner.device, s.stored(), time.Now()
	must.Do(t, tuner.learn(s, e))
	if v, why := tuner.Choose(s); v.Name != "" || !strings.Contains(why, "no variant") {
		t.Errorf("%s: %s", v.Label(), why)
	}
}

// What the file holds is used only for this kernel on this device. A file that is of no
// use is mentioned in the plan and changes nothing.
func TestFiles(t *testing.T) {
	s := soft
	path := filepath.Join(t.TempDir(), "attn", "tuning.json")
	must.Do(t, os.MkdirAll(filepath.Dir(path), 0o700))
	stored := func() *Tuner { return New(Options{Mode: Stored, Path: path, Info: info}) }
	list := s.Candidates()
	last := list[len(list)-1]
	code := must.Get(s.code(last))(t)
	good := Entry{
		Device: stored().device, Class: s.stored(), When: time.Now().UTC(), Best: last.Label(), Code: code,
		Trials: []Trial{{Variant: plainName, Seconds: 2e-3}, {Variant: last.Label(), Seconds: 1e-3}},
	}
	change := func(f func(e *Entry)) Entry {
		e := good
		e.Trials = slices.Clone(e.Trials)
		f(&e)
		return e
	}
	unfinished := change(func(e *Entry) { e.Best, e.Code = "", "" })
	rule, _ := s.Rule()
	for _, x := range []struct {
		name  string
		entry Entry
		file  string // instead
		taken string
		why   string
	}{
		{name: "ours", entry: good, taken: last.Label(), why: "fastest of 1 variants, 1ms a call of the class against 2ms of the plain kernel"},
		{name: "the plain kernel", entry: change(func(e *Entry) { e.Best = plainName }), why: "no variant of the register-tiled kernel was right"},
		{name: "another driver", entry: change(func(e *Entry) { e.Device.Driver = "another" }), taken: rule.Label(), why: "not measured"},
		{name: "another kernel", entry: change(func(e *Entry) { e.Class.Source = "00" }), taken: rule.Label(), why: "not measured"},
		{name: "another unroller", entry: change(func(e *Entry) { e.Code = "00" }), taken: rule.Label(), why: "not measured"},
		{name: "an unknown variant", entry: change(func(e *Entry) { e.Best, e.Trials[1].Variant = "XXL", "XXL" }), taken: rule.Label(), why: "not measured"},
		{name: "another process is measuring", entry: unfinished, taken: rule.Label(), why: "another process"},
		{name: "another process was measuring", entry: func() Entry { e := unfinished; e.When = e.When.Add(-time.Hour); return e }(), taken: rule.Label(), why: "not measured"},
		{name: "a process did not survive the rule's", entry: func() Entry {
			e := unfinished
			e.When = e.When.Add(-time.Hour)
			e.Trials = []Trial{{Variant: rule.Label(), Failed: notBack}}
			return e
		}(), taken: list[1].Label(), why: "has failed before"},
		{name: "all were wrong, with no room for the plain kernel", entry: func() Entry {
			e := unfinished
			e.Trials = nil
			for _, v := range list {
				e.Trials = append(e.Trials, Trial{Variant: v.Label(), Failed: "wrong"})
			}
			return e
		}(), why: "every variant"},
		{name: "damaged", file: "{", taken: rule.Label(), why: "ignored"},
		{name: "foreign", file: `{"name": "left-pad"}`, taken: rule.Label(), why: "ignored"},
		{name: "newer", file: `{"format": "attn tuning", "version": 99}`, taken: rule.Label(), why: "another version"},
	} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if x.file != "" {
			must.Do(t, os.WriteFile(path, []byte(x.file), 0o600))
		} else {
			must.Do(t, tunefile.Put(path, x.entry))
		}
		tuner := stored()
		v, why := tuner.Choose(s)
		if taken := v.Name != ""; taken != (x.taken != "") || taken && v.Label() != x.taken || !strings.Contains(why, x.why) {
			t.Errorf("%s: %s, %s", x.name, v.Label(), why)
		}
		if tuner.Claim(s) {
			t.Errorf("%s: to be measured in mode Stored", x.name)
		}
	}
	// A file that cannot be written does not prevent measuring.
	tuner := New(Options{Mode: First, Path: filepath.Join(path, "below", "a file"), Info: info})
	if err := tuner.learn(s, good); err == nil {
		t.Error("written below a file")
	}
	if v, why := tuner.Choose(s); v.Label() != last.Label() || !strings.Contains(why, "not written") {
		t.Errorf("%s, %s", v.Label(), why)
	}
}

// A process measures what earlier ones had no time for. Earlier measurements stay in the
// choice, also those of variants that are measured on request only.
func TestProcessesGoOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "attn", "tuning.json")
	f := newFake(t)
	process := func() (e Entry, ran bool) {
		t.Helper()
		tuner := New(Options{Mode: First, Path: path, Info: info, Budget: 1})
		f.runs = 0
		if tuner.Claim(soft) {
			must.Do(t, tuner.FirstUse(t.Context(), f, soft))
		}
		if tuner.Claim(soft) {
			t.Error("claimed twice in a process")
		}
		return only(t, path), f.runs > 0
	}
	var risky string
	for n, want := range []int{alwaysTried, alwaysTried + 1, alwaysTried + 3, alwaysTried + 3} {
		e, ran := process()
		if len(e.Trials) != want || e.Best == "" || ran != (n < 3) {
			t.Errorf("process %d: ran %v, best %s of %+v", n, ran, e.Best, e.Trials)
		}
		if n != 1 {
			continue
		}
		// A risky variant was measured on request, and it is the best.
		for _, v := range soft.Candidates() {
			if soft.risky(v) {
				risky = v.Label()
				e.Trials = append(e.Trials, Trial{Variant: risky, Seconds: 1e-9})
				e.Best = risky
				e.Code = must.Get(soft.code(v))(t)
			}
		}
		must.Do(t, tunefile.Put(path, e))
	}
	if risky == "" {
		t.Fatal("the shape has no risky variant")
	}
	// When a variant is new, the process that measures it tries that one too.
	e, _ := process()
	e.Trials = slices.DeleteFunc(e.Trials, func(x Trial) bool { return strings.HasPrefix(x.Variant, "M") })
	must.Do(t, tunefile.Put(path, e))
	if e, _ := process(); e.Trial(risky) == nil || e.Trial(risky).Seconds <= 1e-9 || e.Trial("M/registers") == nil {
		t.Errorf("%+v", e)
	}
}

// A process that is killed while it measures makes only the variant suspect that ran. The
// next process tries that one once more.
func TestKilledWhileMeasuring(t *testing.T) {
	path := filepath.Join(t.TempDir(), "attn", "tuning.json")
	suspect := soft.Candidates()[1].Label()
	f := newFake(t)
	// process measures, and goes on from the file as it was at the first run of the suspect.
	process := func() (survived, killed Entry, tried bool) {
		t.Helper()
		f.before = func(v Variant) {
			if v.Label() != suspect || tried {
				return
			}
			tried = true
			killed = only(t, path)
		}
		tuner := New(Options{Mode: First, Path: path, Info: info})
		if !tuner.Claim(soft) {
			t.Fatal("nothing to measure")
		}
		must.Do(t, tuner.FirstUse(t.Context(), f, soft))
		return only(t, path), killed, tried
	}
	for n, want := range []string{notBack, notBackTwice} {
		survived, killed, _ := process()
		if failed := killed.Failed(); len(failed) != 1 || failed[0] != suspect || killed.Trial(suspect).Failed != want || killed.Best != "" {
			t.Fatalf("killed %d times: %+v", n+1, killed.Trials)
		}
		if survived.Best == "" || survived.Trial(suspect).Seconds == 0 {
			t.Errorf("not killed after all: %+v", survived)
		}
		killed.When = killed.When.Add(-time.Hour) // no other process that still measures
		must.Do(t, tunefile.Put(path, killed))
	}
	e, _, tried := process()
	if tried || e.Best == "" || e.Trial(suspect).Failed != notBackTwice || len(e.Failed()) != 1 {
		t.Errorf("tried for the third time: %t, %+v", tried, e)
	}
}

// The variant that was the fastest on a GPU of NVIDIA is measured on first use there, and on no other device.
func TestFirstUseOnNVIDIA(t *testing.T) {
	s := soft
	s.Tiling, s.ValueDim, s.Software, s.Limits.Memory = TilingOf(128, 128), 128, false, 48<<10
	for device, want := range map[string]bool{"NVIDIA H200": true, "GPU": false} {
		tuner := New(Options{Mode: First, Info: backend.Info{Device: device}, Budget: time.Hour})
		if !tuner.Claim(s) {
			t.Fatalf("%s: nothing to measure", device)
		}
		must.Do(t, tuner.FirstUse(t.Context(), newFake(t), s))
		if e := tuner.stored(s); (e.Trial("L48") != nil) != want || e.Trial("L") == nil || e.Trial("L32") != nil {
			t.Errorf("%s: %+v", device, e.Trials)
		}
		if tuner.Claim(s) {
			t.Errorf("%s: claimed twice", device)
		}
	}
}

// Variants that may lose the device, or have failed, are measured on request only.
func TestMeasureAll(t *testing.T) {
	tuner := New(Options{Mode: First, Path: filepath.Join(t.TempDir(), "attn", "tuning.json"), Info: info})
	var risky []string
	f := newFake(t)
	f.spoil = func(v Variant, data []float32) {
		if v.Name != "" && soft.risky(v) {
			data[0] = float32(math.NaN())
			risky = append(risky, v.Label())
		}
	}
	measured := func(all bool) Entry {
		t.Helper()
		risky = nil
		e, err := tuner.Measure(t.Context(), f, soft, MeasureOptions{All: all})
		if err != nil || e.Best == "" || all && e.Peak != 1e12 || e.FLOPs <= 0 {
			t.Fatalf("%+v, %v", e, err)
		}
		return e
	}
	if measured(false); len(risky) > 0 {
		t.Errorf("measured without a request: %q", risky)
	}
	e := measured(true)
	if len(risky) == 0 || !strings.Contains(e.Trial(risky[0]).Failed, errWrong.Error()) {
		t.Fatalf("%q: %+v", risky, e)
	}
	name := risky[0]
	if e = measured(false); len(risky) > 0 || e.Trial(name).Failed == "" {
		t.Errorf("%q was measured again: %+v", risky, e)
	}
	f.spoil = nil
	if e = measured(true); e.Trial(name).Seconds <= 0 {
		t.Errorf("%+v", e)
	}
	e.Trial(name).Seconds, e.Trial(name).Failed = 0, notBackTwice
	must.Do(t, tuner.learn(soft, e))
	if e = measured(true); e.Trial(name).Failed != notBackTwice {
		t.Errorf("tried for the third time: %+v", e)
	}
	// One that has failed for good is not measured again, whatever the reason.
	failed := soft.Candidates()[1].Label()
	e.Trial(failed).Seconds, e.Trial(failed).Failed = 0, "lost the device"
	must.Do(t, tuner.learn(soft, e))
	f.before = func(v Variant) {
		if v.Label() == failed {
			t.Errorf("%s was measured again", failed)
		}
	}
	if e = measured(false); e.Trial(failed).Failed == "" {
		t.Errorf("%+v", e)
	}
}

// Options and the environment select a mode. On a software driver nothing is measured unless a caller asks.
func TestModes(t *testing.T) {
	for _, c := range []struct {
		asked   Mode
		env     string
		adapter backend.DeviceType
		want    Mode
		err     error
	}{
		{Default, "", backend.Discrete, First, nil},
		{Default, "", backend.CPU, Stored, nil},
		{Default, "off", backend.Discrete, Off, nil},
		{Default, "stored", backend.Discrete, Stored, nil},
		{Default, "first", backend.CPU, First, nil},
		{Default, "plain", backend.Discrete, Plain, nil},
		{Stored, "first", backend.Discrete, Stored, nil},
		{Off, "always", backend.Discrete, Off, nil},
		{Default, "always", backend.Discrete, 0, backend.ErrOption},
		{Plain + 1, "", backend.Discrete, 0, backend.ErrOption},
	} {
		t.Setenv(env, c.env)
		got, err := c.asked.Or(c.adapter)
		if !errors.Is(err, c.err) || err == nil && got != c.want {
			t.Errorf("%v with %q on %s: %v, %v", c.asked, c.env, c.adapter, got, err)
		}
	}
}

// only returns the entry of a file that has one.
func only(t *testing.T, path string) Entry {
	t.Helper()
	entries, err := tunefile.Read(path)
	if err != nil || len(entries) != 1 {
		t.Fatalf("%+v, %v", entries, err)
	}
	return entries[0]
}
