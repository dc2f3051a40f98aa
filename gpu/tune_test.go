package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/gpu/internal/tunefile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestMain replaces this machine's tuning file by an empty one.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "attn")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Getenv("ATTN_GPU_TUNE") == "" { // tests that count submissions or faults expect no trials, which a GPU runs by default
		os.Setenv("ATTN_GPU_TUNE", "stored")
	}
	tuningPath = func() (string, error) { return filepath.Join(dir, "tuning.json"), nil }
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// compiling returns a context that collects the names of compiled kernels.
func compiling(ctx context.Context, names *[]string) context.Context {
	return backend.WithTrace(ctx, &backend.Trace{Compile: func(kernel string, _ time.Duration) {
		*names = append(*names, strings.Fields(kernel)[0])
	}})
}

func entries(t *testing.T, path string) []tune.Entry {
	t.Helper()
	return must.Get(tunefile.Read(path))(t)
}

// The first call of a class measures its variants and stores its choice, and no bit of the result changes. Later calls,
// also of other lengths and in other processes, measure nothing.
func TestTuneOnFirstUse(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles all variants; TestTuneConcurrently measures too")
	}
	path := filepath.Join(t.TempDir(), "tuning.json")
	off, _ := faulty(t, Options{Tune: TuneOff, TuneFile: path})
	c := plain(t, off, 100, 70, 24)
	check(t, off.Attention(t.Context(), c))
	want, wantLSE := floats(t, off, c.O), floats(t, off, c.LSE)
	if p, err := off.Plan(t.Context(), c); err != nil || !strings.Contains(p.Why, "tuning is off") {
		t.Errorf("%s, %v", p.Why, err)
	}
	must.Fail(t, "the file with tuning off", must.Err(os.Stat(path)), os.ErrNotExist)

	on, dev := faulty(t, Options{Tune: TuneFirst, TuneFile: path, TuneBudget: time.Hour})
	c = plain(t, on, 100, 70, 24)
	if p, err := on.Plan(t.Context(), c); err != nil || !strings.Contains(p.Why, "was not measured") {
		t.Errorf("before: %s, %v", p.Why, err)
	}
	var compiled []string
	ctx := compiling(t.Context(), &compiled)
	check(t, on.Attention(ctx, c))
	if !slices.Equal(floats(t, on, c.O), want) || !slices.Equal(floats(t, on, c.LSE), wantLSE) {
		t.Error("another result than with tuning off")
	}
	list := entries(t, path)
	if len(list) != 1 || list[0].Device.Adapter != on.info.Device || list[0].Class.Dim != 32 || list[0].Class.Rows != 512 {
		t.Fatalf("the file holds %+v", list)
	}
	e := list[0]
	t.Logf("%+v", e.Trials)
	best, reference := e.Trial(e.Best), e.Trial("plain")
	if best == nil || reference == nil || len(e.Trials) < 3 || len(compiled) != len(e.Trials) {
		t.Fatalf("compiled %q, %+v", compiled, e)
	}
	for _, x := range e.Trials {
		if x.Failed != "" || x.Seconds <= 0 || x.Seconds < best.Seconds && x.Variant != "plain" {
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
		check(t, on.Attention(ctx, longer))
	}); n != 1 || len(compiled) > 0 {
		t.Errorf("the next call: %d submissions, compiled %q", n, compiled)
	}

	again, dev := faulty(t, Options{Tune: TuneFirst, TuneFile: path})
	c = plain(t, again, 100, 70, 24)
	if n := submissions(dev, func() {
		check(t, again.Attention(compiling(t.Context(), &compiled), c))
	}); n != 1 || !slices.Equal(compiled, []string{"flash"}) {
		t.Errorf("another process: %d submissions, compiled %q", n, compiled)
	}
	if !slices.Equal(floats(t, again, c.O), want) {
		t.Error("another result in another process")
	}
	if now := entries(t, path); !slices.EqualFunc(now, list, func(a, b tune.Entry) bool { return a.When.Equal(b.When) }) {
		t.Errorf("the file has become %+v", now)
	}
}

// A call that is cancelled while it measures returns the context's error, and the next call a result.
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
	b.dev.Pool.Drain()
	if l := dev.Live(); l.Buffers != before.Buffers || l.Bytes != before.Bytes {
		t.Errorf("%+v are left, %+v before", l, before)
	}
	check(t, b.Attention(t.Context(), c))
	if p, err := b.Plan(t.Context(), c); err != nil || !strings.Contains(p.Why, "cancelled") {
		t.Errorf("%s, %v", p.Why, err)
	}
}

// Calls that run while another one measures use the rule, and all compute the same bits.
func TestTuneConcurrently(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tuning.json")
	b := open(t, Options{Tune: TuneFirst, TuneFile: path})
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

// After any failure during a measurement, the call returns a result or the error, and nothing stays on the device.
func TestTuneFailures(t *testing.T) {
	if testing.Short() {
		t.Skip("measures some times")
	}
	b, dev := faulty(t, Options{Tune: TuneFirst})
	c := plain(t, b, 40, 70, 24)
	b.dev.Pool.Drain()
	before := dev.Live()
	attempt := func(file string) error {
		b.tuner = tune.New(tune.Options{Mode: TuneFirst, Path: filepath.Join(t.TempDir(), file), Budget: time.Millisecond, Info: b.info})
		b.choose = b.tuner.Choose
		return b.Attention(t.Context(), c)
	}
	failed := map[string]bool{}
	for n := 0; n < 60; n += 1 + n/8 {
		dev.Fail(n, port.ErrMemory)
		err := attempt(fmt.Sprintf("tuning%d.json", n))
		if failed[dev.Failed()] = true; err != nil && !errors.Is(err, backend.ErrMemory) {
			t.Errorf("%s failed: %v", dev.Failed(), err)
		}
		b.dev.Pool.Drain()
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
	must.Pass(t, "afterwards", attempt("tuning.json"))
}
