package soak

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
)

const (
	historiesEnv = "ATTN_HISTORIES" // how long to run histories, such as 60m
	historyEnv   = "ATTN_HISTORY"   // the seed of one history to run 100 times
	// A history takes milliseconds on the CPU. One that takes so long is stuck.
	stuck = 5 * time.Minute
)

// TestHistories runs random histories of the public API, in up to four goroutines on the same
// devices, tensors and caches: ATTN_HISTORIES=1h draws them for that long. Every call returns the bits of
// the same call alone on a new device, or an error that the history explains. No call writes
// outside its outputs or after it has returned, and closing the devices ends all goroutines.
func TestHistories(t *testing.T) {
	first, n, repeats, end := uint64(0), uint64(300), 1, time.Time{}
	if testing.Short() {
		n = 60
	}
	if text := os.Getenv(historiesEnv); text != "" {
		long, err := time.ParseDuration(text)
		if err != nil {
			t.Fatalf("%s: %v", historiesEnv, err)
		}
		first, n, end = uint64(time.Now().Unix())<<20, math.MaxInt64, time.Now().Add(long)
	}
	if text := os.Getenv(historyEnv); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", historyEnv, err)
		}
		first, n, repeats = seed, 1, 100
	}
	hasGPU := !testing.Short()
	if hasGPU {
		be, err := gpu.Open("", gpu.Options{})
		if err == nil {
			be.Close()
		} else if hasGPU = false; !errors.Is(err, kernels.ErrNoDevice) || os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
	}
	var begin held
	counts, logged, done := map[string]int{}, time.Now(), uint64(0)
	for ; done < n && (end.IsZero() || time.Now().Before(end)); done++ {
		seed := first + done
		if !end.IsZero() && time.Since(logged) > time.Second { // a crash is in one of the next second
			t.Logf("history %d, seed %d", done, seed)
			logged = time.Now()
		}
		for range repeats {
			h := newHistory(seed, hasGPU && seed%64 == 63)
			h.run()
			for what, n := range h.counts {
				counts[what] += n
			}
			if len(h.faults) > 0 {
				t.Fatalf("history %d:\n%s\nsteps:\n%s\nrepeat it with %s=%d", seed, strings.Join(h.faults, "\n"), strings.Join(h.steps, "\n"), historyEnv, seed)
			}
		}
		if done == 4*level {
			begin = hold()
		}
	}
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		t.Logf("%6d %s", counts[what], what)
	}
	t.Logf("%d histories from seed %d", done, first)
	if now := hold(); begin.files > 0 {
		t.Logf("after %d histories %v, then %v", 4*level, begin, now)
		begin.bytes = now.bytes // TestSoak compares memory: that of the race detector grows
		if now.over(begin) != "" {
			t.Errorf("%d histories left %s", done, now.over(begin))
		}
	}
}

// history is one random history: the devices and cases its goroutines share, and a log of their steps.
type history struct {
	seed    uint64
	gpu     bool
	cases   []kernelstest.Case
	slots   []atomic.Pointer[opened]
	refuses bool // memory is refused at times

	mu      sync.Mutex
	opened  []*opened
	steps   []string
	faults  []string
	counts  map[string]int // of steps, and of their outcomes
	results []result
	frames  []*frame
}

// result is what a step returned, and how to compute it alone.
type result struct {
	step  string
	on    *opened
	out   [][]float32
	alone func(dev *kernels.Device, got [][]float32) [][]float32
}

// life is the end of an object, which takes a time in which calls may or may not see it.
type life struct{ began, ended atomic.Bool }

func (l *life) end(f func()) {
	l.began.Store(true)
	f()
	l.ended.Store(true)
}

// opened is a device of a history.
type opened struct {
	life
	name        string
	open, fresh func() (backend.Backend, error) // like it, and for a call alone
	dev         *kernels.Device

	mu    sync.Mutex
	sets  map[[2]int]*set
	cache *cached
}

func newHistory(seed uint64, onGPU bool) *history {
	rng := rand.New(rand.NewPCG(seed, 0))
	h := &history{seed: seed, gpu: onGPU, refuses: rng.IntN(5) == 0, counts: map[string]int{}}
	h.slots = make([]atomic.Pointer[opened], 1+rng.IntN(2))
	for range 4 {
		h.cases = append(h.cases, drawCase(rng, onGPU))
	}
	return h
}

// open opens a device into a slot. Of one seed it is always of the same kind.
func (h *history) open(slot int) {
	rng := rand.New(rand.NewPCG(h.seed, uint64(100+slot)))
	d := &opened{sets: map[[2]int]*set{}}
	if h.gpu {
		opt := gpu.Options{MemoryBytes: []int64{0, 540 << 10}[rng.IntN(2)]}
		d.name = fmt.Sprintf("gpu of %d bytes", opt.MemoryBytes)
		d.open = func() (backend.Backend, error) { return gpu.Open("", opt) }
		d.fresh = d.open
	} else {
		opt := cpu.Options{Tier: cpu.Tiers()[rng.IntN(len(cpu.Tiers()))], Threads: []int{0, 1, 2, 3, 8}[rng.IntN(5)]}
		d.name = fmt.Sprintf("%s of %d threads", opt.Tier, opt.Threads)
		d.open = func() (backend.Backend, error) { return cpu.Open(opt) }
		d.fresh = func() (backend.Backend, error) { return cpu.Open(cpu.Options{Tier: opt.Tier, Threads: 1}) }
	}
	be, err := d.open()
	if err != nil {
		if !h.refuses || !errors.Is(err, kernels.ErrMemory) {
			h.fault("open %s: %v", d.name, err)
		}
		return
	}
	d.dev = kernels.NewDevice(be)
	if !h.gpu && rng.IntN(4) == 0 {
		d.dev.SetVerify(2)
	}
	h.mu.Lock()
	h.opened = append(h.opened, d)
	h.counts["open"]++
	h.mu.Unlock()
	h.slots[slot].Store(d)
}

func (h *history) fault(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults = append(h.faults, fmt.Sprintf(format, args...))
}

// run runs the history, and then the calls that succeeded alone.
func (h *history) run() {
	goroutines := runtime.NumGoroutine()
	watch := time.AfterFunc(stuck, func() {
		debug.SetTraceback("all")
		panic(fmt.Sprintf("history %d is stuck; steps:\n%s", h.seed, strings.Join(h.steps, "\n")))
	})
	for slot := range h.slots {
		h.open(slot)
		if h.slots[slot].Load() == nil {
			return
		}
	}
	rng := rand.New(rand.NewPCG(h.seed, 1))
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1 + rng.IntN(8)))
	actors, steps := 1+rng.IntN(4), 5+rng.IntN(25)
	if h.gpu {
		steps = 8
	}
	var wg sync.WaitGroup
	for id := range actors {
		wg.Go(func() {
			a := &actor{h: h, id: id}
			for i := range steps {
				if h.refuses { // one request of this step, or of the next ones
					backend.FailMemory(1 + (7*i+id)%23)
				}
				if _, err := try(func() [][]float32 { a.step(i); return nil }); err != nil {
					h.fault("goroutine %d, step %d: %v", id, i, err)
				}
			}
		})
	}
	wg.Wait()
	backend.FailMemory(0)()
	for _, d := range h.opened {
		for range 2 {
			if err := d.dev.Close(); err != nil {
				h.fault("close %s: %v", d.name, err)
			}
		}
	}
	h.verify()
	for _, f := range h.frames {
		if !sameBits(f.data, f.after) {
			h.fault("an output of shape %v changed after its call had returned", f.t.Shape())
		}
	}
	for _, d := range h.opened {
		for at, s := range d.sets {
			if err := s.Unchanged(); err != nil {
				h.fault("%s: operands %v: %v", d.name, at, err)
			}
		}
	}
	watch.Stop()
	for wait := time.Millisecond; runtime.NumGoroutine() > goroutines; wait *= 2 {
		if time.Sleep(wait); wait > time.Minute {
			stacks := make([]byte, 1<<20)
			h.fault("%d goroutines are left of %d:\n%s", runtime.NumGoroutine(), goroutines, stacks[:runtime.Stack(stacks, true)])
			break
		}
	}
}

// verify compares the results with those of the calls alone.
func (h *history) verify() {
	var shared *kernels.Device // on a GPU, where a device takes long to open
	for _, r := range h.results {
		dev := shared
		if dev == nil {
			be, err := r.on.fresh()
			if err != nil {
				h.fault("open a device like %s: %v", r.on.name, err)
				return
			}
			dev = kernels.NewDevice(be)
			if h.gpu && len(h.slots) == 1 {
				shared = dev
			}
		}
		want, err := try(func() [][]float32 { return r.alone(dev, r.out) })
		switch {
		case err != nil:
			h.fault("%s: alone: %v", r.step, err)
		case !slices.EqualFunc(r.out, want, sameBits):
			h.fault("%s: other bits than alone: %s", r.step, firstDifference(r.out, want))
		}
		if dev != shared {
			dev.Close()
		}
	}
	if shared != nil {
		shared.Close()
	}
}

// sameBits reports whether a and b have the same bits; all NaN are the same.
func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y })
}

func firstDifference(got, want [][]float32) string {
	for i := range min(len(got), len(want)) {
		for j := range min(len(got[i]), len(want[i])) {
			if x, y := got[i][j], want[i][j]; !sameBits([]float32{x}, []float32{y}) {
				return fmt.Sprintf("element %d of output %d is %v (%#x), alone %v (%#x)", j, i, x, math.Float32bits(x), y, math.Float32bits(y))
			}
		}
	}
	return "other lengths"
}

// frame is an output inside memory whose other elements no call may change.
type frame struct {
	data, after []float32
	all, t      kernels.Tensor
}

// outside is what the elements around an output hold.
var outside = math.Float32frombits(0x7fc0beef)

// errDamage is never the error of a call.
var errDamage = errors.New("wrong result")

// into runs f with outputs of the shapes, with gaps before, after and between their rows. It
// reads them whether f fails or not, and fails if anything around them changed.
func (h *history) into(ctx context.Context, dev *kernels.Device, shapes []kernels.Shape, f func(t []kernels.Tensor) [][]float32) (out [][]float32) {
	var frames []*frame
	var t []kernels.Tensor
	for _, shape := range shapes {
		row := shape[3] + 3
		head := shape[2]*row + 4
		strides := kernels.Strides{shape[1]*head + 4, head, row, 1}
		f := &frame{data: slices.Repeat([]float32{outside}, shape[0]*strides[0]+32)}
		f.all = must(dev.Upload(ctx, must(kernels.HostF32(f.data, kernels.Shape{1, 1, 1, len(f.data)}))))
		defer f.all.Release()
		f.t = must(f.all.View(shape, strides, 16))
		frames, t = append(frames, f), append(t, f.t)
	}
	more, err := try(func() [][]float32 { return f(t) })
	for i, f := range frames {
		if data := f.data; f.all.OnHost() || err == nil {
			if f.all.OnHost() {
				f.after = slices.Clone(data)
				h.mu.Lock()
				h.frames = append(h.frames, f)
				h.mu.Unlock()
			} else {
				data = must(dev.ToFloat32(ctx, f.all))
			}
			out = append(out, f.inside(i, data))
		}
	}
	ok(err)
	return append(out, more...)
}

// inside returns the elements of output i of data, and fails if others have changed.
func (f *frame) inside(i int, data []float32) (inside []float32) {
	rest, shape, by := slices.Clone(data), f.t.Shape(), f.t.Strides()
	for n := range shape[0] * shape[1] * shape[2] {
		at := f.t.Offset() + n/(shape[1]*shape[2])*by[0] + n/shape[2]%shape[1]*by[1] + n%shape[2]*by[2]
		inside = append(inside, data[at:at+shape[3]]...)
		for j := range shape[3] {
			rest[at+j] = outside
		}
	}
	for at, x := range rest {
		if math.Float32bits(x) != math.Float32bits(outside) {
			ok(fmt.Errorf("%w: element %d around output %d, %v, is %v", errDamage, at, i, shape, x))
		}
	}
	return inside
}

// countdown is a context that ends when it is looked at for the nth time.
type countdown struct {
	context.Context
	stop func()
	left atomic.Int64
}

func (c *countdown) Err() error {
	if c.left.Add(-1) < 0 {
		c.stop()
	}
	return c.Context.Err()
}

// drawContext returns a context that ends before, in or after a call, or never.
func drawContext(rng *rand.Rand) (ctx context.Context, name string, stop func()) {
	kind, after, looks := rng.IntN(16), time.Duration(rng.IntN(400))*time.Microsecond, 1+rng.Int64N(1<<rng.IntN(7))
	switch kind {
	case 1:
		ctx, stop = context.WithDeadline(context.Background(), time.Unix(0, 0))
		return ctx, ", past deadline", stop
	case 2, 3:
		ctx, stop = context.WithTimeout(context.Background(), after)
		return ctx, fmt.Sprintf(", deadline in %v", after), stop
	}
	ctx, stop = context.WithCancel(context.Background())
	switch kind {
	case 0:
		stop()
		return ctx, ", cancelled", stop
	case 4, 5:
		c := &countdown{Context: ctx, stop: stop}
		c.left.Store(looks)
		return c, fmt.Sprintf(", cancelled at look %d", looks), stop
	}
	return ctx, "", stop
}

// endedError returns the error of a context without looking at a countdown.
func endedError(ctx context.Context) error {
	if c, ok := ctx.(*countdown); ok {
		ctx = c.Context
	}
	return ctx.Err()
}

// refusals are the errors of calls that are wrong.
var refusals = []error{kernels.ErrShape, kernels.ErrDType, kernels.ErrOption, kernels.ErrDevice, kernels.ErrOverlap, kernels.ErrUnsupported, kernels.ErrReleased}

// do runs a step, f, on d. lives are the objects whose end makes it fail, wrong means that it
// must be refused. A result is compared with that of alone, unless that is nil.
func (a *actor) do(rng *rand.Rand, what string, d *opened, lives []*life, wrong bool, f func(ctx context.Context) [][]float32, alone func(dev *kernels.Device, got [][]float32) [][]float32) bool {
	ctx, name, stop := drawContext(rng)
	defer stop()
	step := fmt.Sprintf("goroutine %d, step %d: %s on %s%s", a.id, a.at, what, d.name, name)
	var must error // why the step has to fail
	switch {
	case wrong:
		must = errors.New("it is wrong")
	case d.ended.Load():
		must = kernels.ErrClosed
	case slices.ContainsFunc(lives, func(l *life) bool { return l.ended.Load() }):
		must = kernels.ErrReleased
	default:
		must = endedError(ctx)
	}
	out, err := func() (out [][]float32, err error) {
		defer func() {
			if r := recover(); r != nil {
				err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
			}
		}()
		return try(func() [][]float32 { return f(ctx) })
	}()
	explained := err == nil && must == nil
	switch {
	case err == nil:
	case errors.Is(err, errDamage):
	case errors.Is(err, kernels.ErrClosed):
		explained = d.began.Load()
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		explained = endedError(ctx) != nil && errors.Is(err, endedError(ctx))
	case errors.Is(err, kernels.ErrMemory):
		explained = a.h.refuses
	case errors.Is(err, kernels.ErrCapacity):
		explained = strings.HasPrefix(what, "append")
	case wrong && slices.ContainsFunc(refusals, func(e error) bool { return errors.Is(err, e) }):
		explained = true
	case errors.Is(err, kernels.ErrReleased):
		explained = slices.ContainsFunc(lives, func(l *life) bool { return l.began.Load() })
	}
	verdict, _, _ := strings.Cut(what, " ")
	outcome := "ok"
	if err != nil {
		outcome = err.Error()
		verdict += ", failed"
	}
	a.h.mu.Lock()
	defer a.h.mu.Unlock()
	a.h.steps = append(a.h.steps, step+": "+outcome)
	a.h.counts[verdict]++
	if !explained {
		a.h.faults = append(a.h.faults, fmt.Sprintf("%s: error is %v; it should fail: %v", step, err, must))
	}
	if err == nil && alone != nil {
		a.h.results = append(a.h.results, result{step, d, out, alone})
	}
	return err == nil
}
