// Package soak runs work of every kind in many goroutines for a long time: make soak, or
// make soak DURATION=1h. Its second test draws histories of the public API.
package soak

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/internal/machine"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
)

const (
	durationEnv = "ATTN_SOAK" // such as 10m
	duration    = 20 * time.Second
	goroutines  = 16
	// rounds is the least number of times that all work stops to read what the process holds, with a device opened by
	// each goroutine at once. A window is half of them and at least as many opens as level, however long a busy machine
	// takes. Drivers and the Go runtime keep the most memory and threads that they ever used, so the first windows may
	// grow; what leaks grows in every one of windows.
	rounds, level, windows = 8, 128, 6
	// Within a window memory may grow by byChance, what the garbage collector and the C allocator keep at times, and by
	// perOpen for each closed device: 2 KiB were measured with Mesa's driver.
	byChance, perOpen = 16 << 20, 16 << 10
)

// TestMain runs the tests in a process whose C allocator has one arena. With the several that
// glibc makes, threads leave free memory behind in all of them, which grows for minutes.
func TestMain(m *testing.M) {
	const arenas = "MALLOC_ARENA_MAX"
	if os.Getenv(arenas) != "" {
		os.Exit(m.Run())
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), arenas+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// TestSoak runs calls, caches, opens, cancelled calls and refused memory at once. Results have the bits of a first run
// alone, and memory, threads, goroutines and file descriptors become level.
func TestSoak(t *testing.T) {
	total := duration
	switch text := os.Getenv(durationEnv); {
	case text != "":
		var err error
		if total, err = time.ParseDuration(text); err != nil {
			t.Fatalf("%s: %v", durationEnv, err)
		}
	case testing.Short():
		t.Skip("-short")
	}
	s := &soak{t: t, want: map[string][]float32{}, done: map[string]*atomic.Int64{}}
	for _, job := range jobs {
		s.done[job.name] = new(atomic.Int64)
	}
	s.open("cpu", func() (backend.Backend, error) { return cpu.Open(cpu.Options{}) })
	s.open("gpu", func() (backend.Backend, error) { return gpu.Open("", gpu.Options{}) })
	s.open("gpu, streamed", func() (backend.Backend, error) { return gpu.Open("", gpu.Options{MemoryBytes: 540 << 10}) })

	var begin held
	for round, first, window := 0, 0, 1; ; round++ {
		s.round(round, total/rounds)
		now := hold()
		now.opens = s.done["open"].Load()
		t.Logf("round %d: %v", round, now)
		if t.Failed() {
			return
		}
		if round == 0 {
			begin = now
		}
		if round-first < rounds/2 || now.opens-begin.opens < level {
			continue
		}
		grown := now.over(begin)
		if grown == "" && round+1 >= rounds {
			break
		}
		if window == windows {
			t.Errorf("grows in each of %d windows; in the last one, of %d opens, by %s", windows, now.opens-begin.opens, grown)
			break
		}
		t.Logf("window %d: grew by %s", window, cmp.Or(grown, "nothing"))
		begin, first, window = now, round, window+1
	}
	for name, n := range s.done {
		t.Logf("%s: %d times", name, n.Load())
		if n.Load() == 0 {
			t.Errorf("%s: never done", name)
		}
	}
	t.Logf("refused memory ended %d jobs, contexts %d", s.refused.Load(), s.cancelled.Load())
}

// soak is the state of a run.
type soak struct {
	t                  *testing.T
	devices            []device
	want               map[string][]float32 // results alone, by device and problem
	done               map[string]*atomic.Int64
	refused, cancelled atomic.Int64
}

// device is a device that goroutines share.
type device struct {
	name string
	dev  *kernels.Device
	open func() (backend.Backend, error)
}

// open opens a shared device and computes each problem alone.
func (s *soak) open(name string, open func() (backend.Backend, error)) {
	be, err := open()
	if errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true" {
		s.t.Logf("%s: %v (CI=true makes that a failure)", name, err)
		return
	}
	if err != nil {
		s.t.Fatal(err)
	}
	d := device{name, kernels.NewDevice(be), open}
	s.t.Cleanup(func() { d.dev.Close() })
	s.devices = append(s.devices, d)
	for i := range problems {
		for _, j := range jobs[:2] {
			out, err := j.run(s.t.Context(), d, i, nil)
			if err != nil {
				s.t.Fatalf("%s: %v", j.result(d, i), err)
			}
			s.want[j.result(d, i)] = out
		}
	}
}

// round runs random jobs in all goroutines for a time, an open first in each.
func (s *soak) round(round int, long time.Duration) {
	seed := uint64(round)
	ctx, stop := context.WithTimeout(s.t.Context(), long)
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() { // one goroutine refuses memory of all others
		rng := rand.New(rand.NewPCG(seed, goroutines))
		for ctx.Err() == nil && !s.t.Failed() {
			end := backend.FailMemory(1 + rng.IntN(200))
			time.Sleep(20 * time.Millisecond)
			end()
		}
	})
	for g := range goroutines {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(g)))
			for i := 0; ctx.Err() == nil && !s.t.Failed(); i++ {
				d, problem := s.devices[rng.IntN(len(s.devices))], rng.IntN(len(problems))
				n := rng.IntN(weights)
				job := jobs[slices.IndexFunc(jobs, func(j job) bool { n -= j.weight; return n < 0 })]
				if i == 0 {
					d, job = s.devices[g%len(s.devices)], jobs[len(jobs)-1]
				}
				out, err := job.run(s.t.Context(), d, problem, rng)
				s.done[job.name].Add(1)
				switch {
				case errors.Is(err, kernels.ErrMemory):
					s.refused.Add(1)
				case job.cancels && errors.Is(err, context.DeadlineExceeded):
					s.cancelled.Add(1)
				case err != nil:
					s.t.Errorf("%s: %s: %v", job.name, job.result(d, problem), err)
				case !slices.EqualFunc(out, s.want[job.result(d, problem)], func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }):
					s.t.Errorf("%s: %s: other bits than alone", job.name, job.result(d, problem))
				}
			}
		})
	}
	wg.Wait()
}

// job is a kind of work, of which each is as frequent as its weight.
type job struct {
	name      string
	weight    int
	cancels   bool
	generates bool // from a cache
	do        func(ctx context.Context, d device, problem int, rng *rand.Rand) []float32
}

// run returns what the job computes.
func (j job) run(ctx context.Context, d device, problem int, rng *rand.Rand) ([]float32, error) {
	out, err := try(func() [][]float32 { return [][]float32{j.do(ctx, d, problem, rng)} })
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// result names what the job computes.
func (j job) result(d device, problem int) string {
	return fmt.Sprintf("%s, %s, from a cache %t", d.name, problems[problem].name, j.generates)
}

var jobs = []job{
	{"call", 20, false, false, func(ctx context.Context, d device, problem int, _ *rand.Rand) []float32 {
		return attend(ctx, d.dev, problem)
	}},
	{"cache", 10, false, true, func(ctx context.Context, d device, problem int, _ *rand.Rand) []float32 {
		return generate(ctx, d.dev, problem)
	}},
	{"cancel", 6, true, false, func(ctx context.Context, d device, problem int, rng *rand.Rand) []float32 {
		ctx, stop := context.WithTimeout(ctx, time.Duration(rng.IntN(2000))*time.Microsecond)
		defer stop()
		return attend(ctx, d.dev, problem)
	}},
	{"open", 1, false, false, func(ctx context.Context, d device, problem int, _ *rand.Rand) []float32 {
		dev := kernels.NewDevice(must(d.open()))
		defer func() { ok(dev.Close()) }()
		return attend(ctx, dev, problem)
	}},
}

var weights = func() (n int) {
	for _, j := range jobs {
		n += j.weight
	}
	return n
}()

// problem is a call of attention.
type problem struct {
	name string
	dims kernels.Dims
	opt  kernels.Options
}

var problems = []problem{
	{"plain", kernels.Dims{Heads: 2, SeqQ: 96, Dim: 32}, kernels.Options{}},
	{"causal, grouped", kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 70, Dim: 16}, kernels.Options{Causal: true}},
	{"one query", kernels.Dims{Heads: 2, SeqQ: 1, SeqK: 1000, Dim: 32}, kernels.Options{}},
	{"window, softcap", kernels.Dims{Heads: 1, SeqQ: 200, Dim: 64}, kernels.Options{Window: &kernels.Window{Left: 30, Right: 2}, Softcap: 5}},
}

// numbers returns the same numbers for the same seed.
func numbers(seed uint64, n int) []float32 {
	rng := rand.New(rand.NewPCG(seed, 0))
	data := make([]float32, n)
	for i := range data {
		data[i] = float32(rng.NormFloat64())
	}
	return data
}

// attend computes a problem.
func attend(ctx context.Context, dev *kernels.Device, n int) []float32 {
	p := problems[n]
	batch, keys := max(p.dims.Batch, 1), cmp.Or(p.dims.SeqK, p.dims.SeqQ)
	kv := batch * cmp.Or(p.dims.KVHeads, p.dims.Heads) * keys * p.dims.Dim
	return must(dev.AttentionFloat32(ctx, p.dims, kernels.BHSD, numbers(1, batch*p.dims.Heads*p.dims.SeqQ*p.dims.Dim), numbers(2, kv), numbers(3, kv), p.opt))
}

// generate appends a few tokens to a paged cache of two sequences, one of them a fork, and attends from them.
func generate(ctx context.Context, dev *kernels.Device, n int) (all []float32) {
	heads, dim := problems[n].dims.Heads, problems[n].dims.Dim
	c := must(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: heads, Dim: dim, PageSize: 4, Pages: 12}))
	defer c.Release()
	seqs := []*kvcache.Sequence{must(c.NewSequence())}
	for step, tokens := range []int{6, 1, 3} {
		shape := kernels.Shape{len(seqs), heads, tokens, dim}
		var x [3]kernels.Tensor
		for i := range x {
			x[i] = must(dev.FromFloat32(ctx, kernels.F32, numbers(uint64(10*step+i), shape.Elements()), shape))
			defer x[i].Release()
		}
		b := c.Batch(seqs...)
		ok(b.Append(ctx, x[0], x[1], nil))
		r := must(b.Attention(ctx, x[2], kvcache.CallOptions{}))
		defer r.Release()
		all = append(all, must(dev.ToFloat32(ctx, r.O))...)
		if step == 0 {
			seqs = append(seqs, must(seqs[0].Fork()))
		}
	}
	return all
}

// held is what the process holds while no work runs.
type held struct {
	bytes, opens               int64 // opens until then
	threads, goroutines, files int
}

// over returns what h holds beyond what a window may add to begin, "" for nothing.
func (h held) over(begin held) string {
	var over []string
	more := func(n, limit int64, unit string) {
		if n > limit {
			over = append(over, fmt.Sprintf("%d %s", n, unit))
		}
	}
	more((h.bytes-begin.bytes)>>10, (byChance+perOpen*(h.opens-begin.opens))>>10, "KiB")
	more(int64(h.threads-begin.threads), goroutines, "threads")
	more(int64(h.goroutines-begin.goroutines), 0, "goroutines")
	more(int64(h.files-begin.files), 0, "file descriptors")
	return strings.Join(over, ", ")
}

func (h held) String() string {
	return fmt.Sprintf("%d MiB, %d opens, %d threads, %d goroutines, %d files", h.bytes>>20, h.opens, h.threads, h.goroutines, h.files)
}

// hold reads what the process holds; memory, threads and files are 0 where the system does not report them.
func hold() held {
	runtime.GC() // forgotten tensors are freed after the collection that finds them
	threads, _ := os.ReadDir("/proc/self/task")
	files, _ := os.ReadDir("/proc/self/fd")
	return held{bytes: machine.Resident(), threads: len(threads), goroutines: runtime.NumGoroutine(), files: len(files)}
}
