package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/tuned"
)

// TestMain keeps what was tuned on this machine away from the tests.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "attn")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	tuningPath = func() (string, error) { return filepath.Join(dir, "tuning.json"), nil }
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// compiling returns a context that collects the names of kernels as they compile.
func compiling(ctx context.Context, names *[]string) context.Context {
	return backend.WithTrace(ctx, &backend.Trace{Compile: func(kernel string, _ time.Duration) {
		*names = append(*names, strings.Fields(kernel)[0])
	}})
}

func entries(t *testing.T, path string) []tuned.Entry {
	t.Helper()
	list, err := tuned.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// The first call of a class measures its variants and keeps what it finds; no bit
// changes; the next call, another length and another process measure nothing.
func TestTuneOnFirstUse(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles all variants; TestTuneConcurrently measures too")
	}
	path := filepath.Join(t.TempDir(), "tuning.json")
	off, _ := faulty(t, Options{Tune: TuneOff, TuneFile: path})
	c := plain(t, off, 100, 70, 24)
	if err := off.Attention(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	want, wantLSE := floats(t, off, c.O), floats(t, off, c.LSE)
	if p, err := off.Plan(t.Context(), c); err != nil || !strings.Contains(p.Why, "tuning is off") {
		t.Errorf("%s, %v", p.Why, err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("with tuning off there is a file, %v", err)
	}

	on, dev := faulty(t, Options{Tune: TuneFirst, TuneFile: path, TuneBudget: time.Hour})
	c = plain(t, on, 100, 70, 24)
	if p, err := on.Plan(t.Context(), c); err != nil || !strings.Contains(p.Why, "was not measured") {
		t.Errorf("before: %s, %v", p.Why, err)
	}
	var compiled []string
	ctx := compiling(t.Context(), &compiled)
	if err := on.Attention(ctx, c); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(floats(t, on, c.O), want) || !slices.Equal(floats(t, on, c.LSE), wantLSE) {
		t.Error("another result than with tuning off")
	}
	list := entries(t, path)
	if len(list) != 1 || list[0].Device.Adapter != on.info.Device || list[0].Class.Dim != 32 || list[0].Class.Rows != 512 {
		t.Fatalf("the file holds %+v", list)
	}
	e := list[0]
	t.Logf("%+v", e.Trials)
	best, reference := e.Trial(e.Best), e.Trial(plainName)
	if best == nil || reference == nil || len(e.Trials) < 3 || len(compiled) != len(e.Trials) {
		t.Fatalf("compiled %q, %+v", compiled, e)
	}
	for _, x := range e.Trials {
		if x.Failed != "" || x.Seconds <= 0 || x.Seconds < best.Seconds && x.Variant != plainName {
			t.Errorf("%+v, the best is %+v", x, best)
		}
	}
	if best.Seconds > reference.Seconds {
		t.Errorf("the best takes %v s, the plain kernel %v", best.Seconds, reference.Seconds)
	}
	if p, err := on.Plan(t.Context(), c); err != nil || !strings.Contains(p.Why, "measured on") || !strings.Contains(p.Path, "variant "+strings.Split(e.Best, "/")[0]) {
		t.Errorf("after: %s: %s, %v", p.Path, p.Why, err)
	}
	compiled = nil
	longer := plain(t, on, 120, 90, 24)
	if n := submissions(dev, func() {
		if err := on.Attention(ctx, longer); err != nil {
			t.Fatal(err)
		}
	}); n != 1 || len(compiled) > 0 {
		t.Errorf("the next call: %d submissions, compiled %q", n, compiled)
	}

	again, dev := faulty(t, Options{Tune: TuneFirst, TuneFile: path})
	c = plain(t, again, 100, 70, 24)
	if n := submissions(dev, func() {
		if err := again.Attention(compiling(t.Context(), &compiled), c); err != nil {
			t.Fatal(err)
		}
	}); n != 1 || !slices.Equal(compiled, []string{"flash"}) {
		t.Errorf("another process: %d submissions, compiled %q", n, compiled)
	}
	if !slices.Equal(floats(t, again, c.O), want) {
		t.Error("another result in another process")
	}
	if now := entries(t, path); !slices.EqualFunc(now, list, func(a, b tuned.Entry) bool { return a.When.Equal(b.When) }) {
		t.Errorf("the file has become %+v", now)
	}
}

// What there was no time for in one process is measured in the next, and what was
// measured before stays in the choice, also what only a probe let in.
func TestTuneGoesOn(t *testing.T) {
	if testing.Short() {
		t.Skip("measures three times")
	}
	path := filepath.Join(t.TempDir(), "tuning.json")
	opt := Options{Tune: TuneFirst, TuneFile: path, TuneBudget: 1}
	var probed string
	for process, want := range []int{alwaysTried, alwaysTried + 1, alwaysTried + 2, alwaysTried + 2} {
		b, dev := faulty(t, opt)
		if b.info.Type != backend.CPU {
			t.Skip("a GPU has another number of variants")
		}
		c := plain(t, b, 40, 70, 24)
		n := submissions(dev, func() {
			if err := b.Attention(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		})
		e := entries(t, path)[0]
		if len(e.Trials) != want || e.Best == "" || (n > 1) != (process < 2) {
			t.Errorf("process %d: %d submissions, best %s of %+v", process, n, e.Best, e.Trials)
		}
		if process != 1 {
			continue
		}
		// As attn tune would have it: a variant that is not tried unasked is the best.
		a, err := b.newAttention(c)
		if err != nil {
			t.Fatal(err)
		}
		s := a.shape()
		for _, v := range s.candidates() {
			if v.risky() {
				probed = v.label()
				e.Trials = append(e.Trials, tuned.Trial{Variant: probed, Seconds: 1e-9})
				e.Best = probed
				if e.Code, err = s.code(v, e.Class.ValueDim); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := tuned.Put(path, e); err != nil {
			t.Fatal(err)
		}
	}
	if probed == "" {
		t.Skip("this device has no variant that is not tried unasked")
	}
	// When one of the others is new again, the process that measures it has the
	// probed one in its trials.
	e := entries(t, path)[0]
	e.Trials = slices.DeleteFunc(e.Trials, func(x tuned.Trial) bool { return strings.HasPrefix(x.Variant, "M") })
	if err := tuned.Put(path, e); err != nil {
		t.Fatal(err)
	}
	b, _ := faulty(t, opt)
	if err := b.Attention(t.Context(), plain(t, b, 40, 70, 24)); err != nil {
		t.Fatal(err)
	}
	if e := entries(t, path)[0]; e.Trial(probed) == nil || e.Trial(probed).Seconds <= 1e-9 || e.Trial("M/registers") == nil {
		t.Errorf("%+v", e)
	}
}

// What the file holds is taken only where it is about this kernel on this device,
// and a file that is of no use is said in the plan and changes nothing.
func TestTuneFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tuning.json")
	b := open(t, Options{Tune: TuneStored, TuneFile: path})
	defer b.Close()
	c := plain(t, b, 100, 70, 24)
	a, err := b.newAttention(c)
	if err != nil {
		t.Fatal(err)
	}
	s := a.shape()
	list := s.candidates()
	last := list[len(list)-1]
	code, err := s.code(last, 32)
	if err != nil {
		t.Fatal(err)
	}
	good := tuned.Entry{
		Device: b.tuner.device, Class: s.tuneClass().stored(s, list), When: time.Now().UTC(), Best: last.label(), Code: code,
		Trials: []tuned.Trial{{Variant: plainName, Seconds: 2e-3}, {Variant: last.label(), Seconds: 1e-3}},
	}
	unfinished := good
	unfinished.Best, unfinished.Code = "", ""
	change := func(f func(e *tuned.Entry)) tuned.Entry {
		e := good
		e.Trials = slices.Clone(e.Trials)
		f(&e)
		return e
	}
	rule, _ := chooseVariant(s)
	for _, x := range []struct {
		name  string
		entry tuned.Entry
		file  string // instead
		taken string
		why   string
	}{
		{name: "ours", entry: good, taken: last.label(), why: "fastest of 1 variants, 1ms a call of the class against 2ms of the plain kernel"},
		{name: "the plain kernel", entry: change(func(e *tuned.Entry) { e.Best = plainName }), why: "no variant of the register-tiled kernel was right"},
		{name: "another driver", entry: change(func(e *tuned.Entry) { e.Device.Driver = "another" }), taken: rule.label(), why: "not measured"},
		{name: "another kernel", entry: change(func(e *tuned.Entry) { e.Class.Source = "00" }), taken: rule.label(), why: "not measured"},
		{name: "another unroller", entry: change(func(e *tuned.Entry) { e.Code = "00" }), taken: rule.label(), why: "not measured"},
		{name: "a variant that there is not", entry: change(func(e *tuned.Entry) { e.Best, e.Trials[1].Variant = "XXL", "XXL" }), taken: rule.label(), why: "not measured"},
		{name: "another process is at it", entry: unfinished, taken: rule.label(), why: "another process"},
		{name: "another process was at it", entry: func() tuned.Entry { e := unfinished; e.When = e.When.Add(-time.Hour); return e }(), taken: rule.label(), why: "not measured"},
		{name: "the rule's was tried and nobody came back", entry: func() tuned.Entry {
			e := unfinished
			e.When = e.When.Add(-time.Hour)
			e.Trials = []tuned.Trial{{Variant: rule.label(), Failed: notBack}}
			return e
		}(), taken: list[1].label(), why: "has failed before"},
		{name: "all were wrong, with no room for the plain kernel", entry: func() tuned.Entry {
			e := unfinished
			e.Trials = nil
			for _, v := range list {
				e.Trials = append(e.Trials, tuned.Trial{Variant: v.label(), Failed: "wrong"})
			}
			return e
		}(), why: "every variant"},
		{name: "damaged", file: "{", taken: rule.label(), why: "left aside"},
		{name: "foreign", file: `{"name": "left-pad"}`, taken: rule.label(), why: "left aside"},
		{name: "newer", file: `{"format": "attn tuning", "version": 99}`, taken: rule.label(), why: "newer version"},
	} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if x.file != "" {
			err = os.WriteFile(path, []byte(x.file), 0o600)
		} else {
			err = tuned.Put(path, x.entry)
		}
		if err != nil {
			t.Fatal(err)
		}
		// As in another process, on the same device.
		b.tuner = newTuner(Options{Tune: TuneStored, TuneFile: path}, b.info)
		v, why := b.tuner.choose(s)
		if taken := v.name != ""; taken != (x.taken != "") || taken && v.label() != x.taken || !strings.Contains(why, x.why) {
			t.Errorf("%s: %s, %s", x.name, v.label(), why)
		}
		if b.tuner.claim(s) {
			t.Errorf("%s: to be measured, though only what is stored counts", x.name)
		}
	}
	// A file that cannot be written is no reason not to measure.
	b.tuner = newTuner(Options{Tune: TuneFirst, TuneFile: filepath.Join(path, "below", "a file")}, b.info)
	if err := b.tuner.learn(s, good, list); err == nil {
		t.Error("written below a file")
	}
	if v, why := b.tuner.choose(s); v.label() != last.label() || !strings.Contains(why, "not written") {
		t.Errorf("%s, %s", v.label(), why)
	}
}

// Calls that share a class share its measurement, and no others.
func TestTuneClasses(t *testing.T) {
	b := open(t, Options{})
	defer b.Close()
	base := flashShape{class: classOf(64, 64), valueDim: 64, heads: 8, seqQ: 1024, in: backend.F32, wide: true, software: true, limits: b.limits}
	for _, x := range []struct {
		name   string
		change func(s *flashShape)
		same   bool
	}{
		{"a bit longer", func(s *flashShape) { s.seqQ = 3000 }, true},
		{"other heads", func(s *flashShape) { s.heads = 5 }, true},
		{"a few columns less", func(s *flashShape) { s.valueDim = 40 }, true},
		{"much longer", func(s *flashShape) { s.seqQ = 1 << 20 }, false},
		{"as many rows in many heads", func(s *flashShape) { s.heads, s.seqQ = 512, 16 }, false},
		{"half the columns", func(s *flashShape) { s.valueDim = 32 }, false},
		{"another type", func(s *flashShape) { s.in = backend.BF16 }, false},
		{"another type of keys", func(s *flashShape) { s.kv = backend.F16 }, false},
		{"a mask", func(s *flashShape) { s.paired = true }, false},
		{"odd strides", func(s *flashShape) { s.wide = false }, false},
		{"a 16 bit output", func(s *flashShape) { s.half = true }, false},
		{"a larger head", func(s *flashShape) { s.class = classOf(80, 64) }, false},
	} {
		s := base
		x.change(&s)
		stored := s.tuneClass().stored(s, s.candidates())
		if same := stored == base.tuneClass().stored(base, base.candidates()); same != x.same || same != s.tuneClass().like(stored) && x.same {
			t.Errorf("%s: the same class: %v, %+v", x.name, same, stored)
		}
		if len(s.candidates()) == 0 {
			t.Errorf("%s: no candidates", x.name)
		}
		if first, _ := chooseVariant(s); s.candidates()[0].label() != first.label() {
			t.Errorf("%s: %s is tried first, the rule says %s", x.name, s.candidates()[0].label(), first.label())
		}
	}
	// On a GPU there are variants of more than the safe memory, which only a probe
	// lets in.
	s := base
	s.software, s.limits.MaxComputeWorkgroupStorageSize = false, 48<<10
	risky := 0
	for _, v := range s.candidates() {
		if v.risky() {
			risky++
			if v.memory() <= safeMemory {
				t.Errorf("%s takes %d bytes", v.label(), v.memory())
			}
		}
	}
	if risky == 0 || risky == len(s.candidates()) {
		t.Errorf("%d of %d candidates are risky", risky, len(s.candidates()))
	}
}

// A variant that is wrong, by little or in a bit, never wins, and the classes that
// nothing is right for take the plain kernel.
func TestTuneRefusesWrongResults(t *testing.T) {
	b := open(t, Options{Tune: TuneFirst, TuneFile: filepath.Join(t.TempDir(), "tuning.json")})
	defer b.Close()
	c := plain(t, b, 40, 70, 24) // a class of short rows
	c.Softcap = 10
	a, err := b.newAttention(c)
	if err != nil {
		t.Fatal(err)
	}
	s := a.shape()
	right := s.candidates()[0]
	other := right
	// Splits at other places: as good a result, of other bits.
	other.name, other.split = "other bits", right.split/2
	x, err := b.newExercise(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer x.release()
	all := x.all([]flashVariant{right, other})
	var e tuned.Entry
	if err := trials(t.Context(), all, &e, 0, func() {}); err != nil {
		t.Fatal(err)
	}
	if e.Best != right.label() || !strings.Contains(e.Trial(other.label()).Failed, "other variants have") {
		t.Errorf("%+v", e)
	}
	for _, wrong := range []struct {
		name  string
		spoil func()
	}{
		{"an element", func() { x.plain[0].o[77] += float32(3 * x.offO) }},
		{"the last one with hidden keys", func() { x.plain[1].o[len(x.plain[1].o)-1] -= float32(3 * x.offO) }},
		{"a log-sum-exp", func() { x.plain[1].lse[3] += float32(3 * x.offLSE) }},
		{"NaN", func() { x.plain[0].lse[0] = float32(math.NaN()) }},
	} {
		x.plain, x.first = nil, nil
		first := all[0]
		first.try = func(ctx context.Context) error {
			err := all[0].try(ctx)
			wrong.spoil() // as good as if the variant's result were off
			return err
		}
		var e tuned.Entry
		if err := trials(t.Context(), []candidate{first, all[1]}, &e, 0, func() {}); err != nil {
			t.Fatal(err)
		}
		if e.Best != plainName || !strings.Contains(e.Trial(right.label()).Failed, errWrong.Error()) {
			t.Errorf("%s: %+v", wrong.name, e)
		}
	}
	e.Device, e.Class, e.Best, e.When = b.tuner.device, s.tuneClass().stored(s, s.candidates()), plainName, time.Now()
	if err := b.tuner.learn(s, e, s.candidates()); err != nil {
		t.Fatal(err)
	}
	if p, err := b.Plan(t.Context(), c); err != nil || p.Path != "plain WGSL" || !strings.Contains(p.Why, "no variant") {
		t.Errorf("%s: %s, %v", p.Path, p.Why, err)
	}
}

// A variant that loses the device is in the file, and is not tried again.
func TestTuneAfterALoss(t *testing.T) {
	if testing.Short() {
		t.Skip("measures three times")
	}
	path := filepath.Join(t.TempDir(), "tuning.json")
	opt := Options{Tune: TuneFirst, TuneFile: path}
	b, dev := faulty(t, opt)
	c := plain(t, b, 40, 70, 24)
	compiled := 0
	dev.Watch(func(call string) {
		if call == "CreatePipeline" {
			if compiled++; compiled == 3 { // plain, the rule's, and then
				dev.Lose(0)
			}
		}
	})
	err := b.Attention(t.Context(), c)
	dev.Watch(nil)
	if !errors.Is(err, backend.ErrDeviceLost) {
		t.Fatalf("the device is lost, %v", err)
	}
	list := entries(t, path)
	if len(list) != 1 || list[0].Best != "" {
		t.Fatalf("the file holds %+v", list)
	}
	var failed []string
	for _, x := range list[0].Trials {
		failed = append(failed, x.Variant)
	}
	if len(failed) != 1 || list[0].Trials[0].Failed == notBack {
		t.Fatalf("failed: %+v", list[0].Trials)
	}
	// A minute later, in another process. Until then the other one may be at it.
	list[0].When = list[0].When.Add(-time.Hour)
	if err := tuned.Put(path, list[0]); err != nil {
		t.Fatal(err)
	}
	b, _ = faulty(t, opt)
	c = plain(t, b, 40, 70, 24)
	var names []string
	if err := b.Attention(compiling(t.Context(), &names), c); err != nil {
		t.Fatal(err)
	}
	e := entries(t, path)[0]
	if e.Best == "" || e.Best == failed[0] || e.Trial(failed[0]).Failed == "" || len(names) != len(e.Trials)-1 {
		t.Errorf("compiled %q, %+v", names, e)
	}
	// Tune tries it where it can do no harm first, and what a probe refuses is out.
	var asked []string
	e, err = b.Tune(t.Context(), c, TuneOptions{Probe: func(_ context.Context, variant string) error {
		if asked = append(asked, variant); variant == failed[0] {
			return nil
		}
		return errors.New("lost over there")
	}})
	if err != nil || len(asked) == 0 || e.Trial(failed[0]).Failed != "" || e.Peak <= 0 || e.FLOPs <= 0 {
		t.Errorf("asked for %q, %+v, %v", asked, e, err)
	}
	for _, name := range asked {
		if name != failed[0] && e.Trial(name).Failed != "lost over there" {
			t.Errorf("%s: %+v", name, e.Trial(name))
		}
	}
	if err := b.Probe(t.Context(), c, failed[0]); err != nil {
		t.Errorf("probe: %v", err)
	}
	if err := b.Probe(t.Context(), c, "XXL"); !errors.Is(err, backend.ErrOption) {
		t.Errorf("a variant that there is not: %v", err)
	}
}

// Whoever cancels the call that measures gets the context's error, and the next one
// a result.
func TestTuneCancelled(t *testing.T) {
	b, dev := faulty(t, Options{Tune: TuneFirst, TuneFile: filepath.Join(t.TempDir(), "tuning.json")})
	c := plain(t, b, 40, 70, 24)
	before := dev.Live()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	compiled := 0
	dev.Watch(func(call string) {
		if call == "CreatePipeline" {
			if compiled++; compiled == 2 {
				cancel()
			}
		}
	})
	err := b.Attention(ctx, c)
	dev.Watch(nil)
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
	b.pool.drain()
	if l := dev.Live(); l.Buffers != before.Buffers || l.Bytes != before.Bytes {
		t.Errorf("%+v are left, %+v before", l, before)
	}
	if err := b.Attention(t.Context(), c); err != nil {
		t.Error(err)
	}
	if p, err := b.Plan(t.Context(), c); err != nil || !strings.Contains(p.Why, "cancelled") {
		t.Errorf("%s, %v", p.Why, err)
	}
}

// Calls that come while another one measures take what the rule says, and all give
// the same bits.
func TestTuneConcurrently(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tuning.json")
	b := open(t, Options{Tune: TuneFirst, TuneFile: path})
	defer b.Close()
	var wg sync.WaitGroup
	results := make([][]float32, 4)
	for i := range results {
		c := plain(t, b, 40, 70, 24)
		wg.Go(func() {
			for range 3 {
				if err := b.Attention(t.Context(), c); err != nil {
					t.Error(err)
				}
			}
			results[i] = floats(t, b, c.O)
		})
	}
	wg.Wait()
	for i, r := range results {
		if !slices.Equal(r, results[0]) {
			t.Errorf("call %d has another result", i)
		}
	}
	if list := entries(t, path); len(list) != 1 || list[0].Best == "" {
		t.Errorf("the file holds %+v", list)
	}
}

// Whatever fails while variants are measured, the call has a result, or an error
// that says what failed, and nothing is left on the device.
func TestTuneFailures(t *testing.T) {
	if testing.Short() {
		t.Skip("measures some times")
	}
	b, dev := faulty(t, Options{Tune: TuneFirst})
	c := plain(t, b, 40, 70, 24)
	b.pool.drain()
	before := dev.Live()
	tune := func(file string) error {
		b.tuner = newTuner(Options{Tune: TuneFirst, TuneFile: filepath.Join(t.TempDir(), file), TuneBudget: time.Millisecond}, b.info)
		b.choose = b.tuner.choose
		return b.Attention(t.Context(), c)
	}
	failed := map[string]bool{}
	for n := 0; n < 60; n += 1 + n/8 {
		dev.Fail(n, port.ErrMemory)
		err := tune(fmt.Sprintf("tuning%d.json", n))
		if failed[dev.Failed()] = true; err != nil && !errors.Is(err, backend.ErrMemory) {
			t.Errorf("%s failed: %v", dev.Failed(), err)
		}
		b.pool.drain()
		if l := dev.Live(); l.Buffers != before.Buffers || l.Bytes != before.Bytes {
			t.Errorf("after a failure of %s %+v are left, %+v before", dev.Failed(), l, before)
		}
	}
	dev.Fail(-1, nil)
	for _, call := range []string{"CreateBuffer", "Write", "Submit", "Wait"} {
		if !failed[call] {
			t.Errorf("%s has not failed, %v", call, failed)
		}
	}
	if err := tune("tuning.json"); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// Options and the environment say where choices come from; on a software driver
// nothing is measured unasked.
func TestTuneModes(t *testing.T) {
	for _, c := range []struct {
		asked   Tuning
		env     string
		adapter backend.DeviceType
		want    Tuning
		err     error
	}{
		{TuneDefault, "", backend.Discrete, TuneFirst, nil},
		{TuneDefault, "", backend.CPU, TuneStored, nil},
		{TuneDefault, "off", backend.Discrete, TuneOff, nil},
		{TuneDefault, "stored", backend.Discrete, TuneStored, nil},
		{TuneDefault, "first", backend.CPU, TuneFirst, nil},
		{TuneStored, "first", backend.Discrete, TuneStored, nil},
		{TuneOff, "always", backend.Discrete, TuneOff, nil},
		{TuneDefault, "always", backend.Discrete, 0, backend.ErrOption},
		{TuneFirst + 1, "", backend.Discrete, 0, backend.ErrOption},
	} {
		t.Setenv(tuneEnv, c.env)
		got, err := c.asked.or(c.adapter)
		if !errors.Is(err, c.err) || err == nil && got != c.want {
			t.Errorf("%v with %q on %s: %v, %v", c.asked, c.env, c.adapter, got, err)
		}
	}
}
