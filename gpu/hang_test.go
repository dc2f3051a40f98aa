package gpu

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/meter"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// simulated is a device that computes nothing. Its submissions take as long as a test says,
// on the clock of the test's bubble, and one never ends if the device hangs.
type simulated struct {
	port.Device
	t *testing.T

	mu     sync.Mutex
	took   func() time.Duration        // of the next submission; negative never ends
	ends   []time.Time                 // of the submissions; zero never
	fills  map[port.Buffer]port.Ticket // the last submission that copies to a buffer
	live   port.Live
	limits gputypes.Limits
	closed bool

	full     bool          // whether it refuses more memory
	blocks   bool          // whether Submit blocks while a submission runs
	compile  time.Duration // how long each compilation takes
	compiled []string      // labels
}

type simulatedBuffer struct {
	d        *simulated
	size     uint64
	released bool
}

func (b *simulatedBuffer) Size() uint64 { return b.size }

func (b *simulatedBuffer) Release() {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	if !b.released {
		b.released = true
		b.d.live.Buffers--
		b.d.live.Bytes -= b.size
	}
}

type simulatedPipeline struct{}

func (simulatedPipeline) Release() {}

func (d *simulated) Limits() gputypes.Limits { return d.limits }
func (d *simulated) Lost() error             { return nil }
func (d *simulated) Features() port.Features { return port.Features{} }

func (d *simulated) Live() port.Live {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.live
}

func (d *simulated) CreateBuffer(size uint64, _ gputypes.BufferUsage) (port.Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.full {
		return nil, port.ErrMemory
	}
	d.live.Buffers++
	d.live.Bytes += size
	return &simulatedBuffer{d: d, size: size}, nil
}

func (d *simulated) CreatePipeline(desc port.PipelineDesc) (port.Pipeline, error) {
	time.Sleep(d.compile)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.compiled = append(d.compiled, desc.Label)
	return simulatedPipeline{}, nil
}

func (d *simulated) Write(port.Buffer, uint64, []byte) error { return nil }

func (d *simulated) Submit(commands []port.Command, _ bool) (port.Ticket, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.blocks && !d.ended(port.Ticket(len(d.ends))) {
		d.mu.Unlock()
		time.Sleep(time.Millisecond)
		d.mu.Lock()
	}
	var end time.Time
	if took := d.took(); took >= 0 {
		end = time.Now().Add(took)
	}
	d.ends = append(d.ends, end)
	for _, c := range commands {
		if c.Dst != nil {
			d.fills[c.Dst] = port.Ticket(len(d.ends))
		}
	}
	return port.Ticket(len(d.ends)), nil
}

func (d *simulated) Took(port.Ticket) (time.Duration, bool, error) { return 0, false, nil }

// ended reports whether a submission has ended. Each one has its own time, so later ones may
// end first; a ticket counts when all before it have ended.
func (d *simulated) ended(t port.Ticket) bool {
	for _, end := range d.ends[:t] {
		if end.IsZero() || time.Now().Before(end) {
			return false
		}
	}
	return true
}

// running counts the submissions that have not ended.
func (d *simulated) running() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, end := range d.ends {
		if end.IsZero() || time.Now().Before(end) {
			n++
		}
	}
	return n
}

func (d *simulated) Wait(ctx context.Context, t port.Ticket, _ time.Time) (blocked bool, err error) {
	for ; ; time.Sleep(time.Millisecond) {
		d.mu.Lock()
		ended, closed := d.ended(t), d.closed
		d.mu.Unlock()
		switch {
		case ended:
			return blocked, nil
		case closed:
			return blocked, port.ErrClosed
		case ctx.Err() != nil:
			return blocked, ctx.Err()
		}
		blocked = true
	}
}

// hangTime is the time after which the device counts as hung.
const hangTime = 20 * time.Second

func (d *simulated) Hung() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.hung()
}

func (d *simulated) hung() bool {
	last := time.Time{}
	for i, end := range d.ends {
		if end.IsZero() {
			return i == 0 || time.Since(last) > hangTime
		}
		last = end
	}
	return false
}

// Read fails the test when a submission that fills the buffer still runs.
func (d *simulated) Read(b port.Buffer, _ uint64, dst []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if t := d.fills[b]; t > 0 && !d.ended(t) {
		d.t.Errorf("a buffer is read while submission %d fills it", t)
	}
	clear(dst)
	return nil
}

func (d *simulated) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for !d.ended(port.Ticket(len(d.ends))) {
		if d.hung() {
			return fmt.Errorf("hangs: %w", port.ErrLost)
		}
		d.mu.Unlock()
		time.Sleep(time.Millisecond)
		d.mu.Lock()
	}
	return nil
}

// simulate opens a backend on a simulated device.
func simulate(t *testing.T, opt Options, took func() time.Duration, change ...func(l *gputypes.Limits)) (*Backend, *simulated) {
	t.Helper()
	return simulateOn(t, backend.Discrete, opt, took, change...)
}

func simulateOn(t *testing.T, kind backend.DeviceType, opt Options, took func() time.Duration, change ...func(l *gputypes.Limits)) (*Backend, *simulated) {
	t.Helper()
	d := &simulated{t: t, took: took, limits: gputypes.DefaultLimits(), fills: map[port.Buffer]port.Ticket{}}
	for _, f := range change {
		f(&d.limits)
	}
	opt.Tune = TuneOff
	if opt.exp2 == nil { // nothing to measure
		opt.exp2 = func(context.Context, port.Device) (float64, error) { return 0, port.ErrShader }
	}
	b := must.Get(newBackend(d, backend.Info{Name: "gpu:0", Device: "simulated", Type: kind}, opt))(t)
	return b, d
}

// timed calls f with a context that ends at a limit, and returns how long it took.
func timed(t *testing.T, limit time.Duration, f func(ctx context.Context) error) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	began := time.Now()
	err = f(ctx)
	return time.Since(began), err
}

// A device that hangs holds up no call for longer than the grace after its context, and
// Close reports it within a bound.
func TestHang(t *testing.T) {
	for _, memory := range []int64{0, 1 << 20} { // streamed with the bound
		t.Run(fmt.Sprintf("memory %d", memory), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				left := 1 << 30 // submissions before the hang
				b, d := simulate(t, Options{MaxWork: 1e6, MemoryBytes: memory}, func() time.Duration {
					if left--; left < 0 {
						return -1
					}
					return time.Millisecond
				})
				c := plain(t, b, 64, 4096, 64)
				h := host(t, backend.Shape{1, 1, 64, 64}, wave)
				large := host(t, backend.Shape{1, 1, 1 << 16, 64}, wave)
				d.mu.Lock()
				left = 20
				d.mu.Unlock()
				for _, call := range []struct {
					name string
					run  func(ctx context.Context) error
				}{
					{"Attention", func(ctx context.Context) error { return b.Attention(ctx, c) }},
					{"another", func(ctx context.Context) error { return b.Attention(ctx, c) }},
					{"small Upload", func(ctx context.Context) error { return must.Err(b.Upload(ctx, h)) }},
					{"Upload", func(ctx context.Context) error { return must.Err(b.Upload(ctx, large)) }},
					{"Wait", b.Wait},
					{"Download", func(ctx context.Context) error { return b.Download(ctx, h, c.O) }},
				} {
					took, err := timed(t, 3*time.Second, call.run)
					onHost := call.name == "Upload" || call.name == "Download" // with little memory they copy nothing
					if memory > 0 && onHost && err == nil || call.name == "small Upload" && err == nil && took == 0 {
						continue
					}
					if !errors.Is(err, context.DeadlineExceeded) || took > 3*time.Second+1100*time.Millisecond {
						t.Errorf("%s returned after %v: %v", call.name, took, err)
					}
				}
				if _, err := b.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, 8, 8}); err != nil {
					t.Errorf("Alloc: %v", err)
				}
				// A call without a deadline ends with Close.
				ended := make(chan error)
				go func() { ended <- b.Attention(context.Background(), c) }()
				synctest.Wait()
				began := time.Now()
				must.Fail(t, "Close", b.Close(), backend.ErrDeviceLost)
				if took := time.Since(began); took > hangTime+time.Second {
					t.Errorf("Close took %v", took)
				}
				must.Fail(t, "the call that ran", <-ended, backend.ErrClosed)
				must.Fail(t, "Alloc after Close", must.Err(b.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, 8, 8})), backend.ErrClosed)
			})
		})
	}
}

// A device that hangs when it is opened holds that up for a bounded time.
func TestHangWhileOpening(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		b, _ := simulate(t, Options{exp2: meter.Exp2}, func() time.Duration { return -1 })
		if took := time.Since(began); took > exp2Time+time.Second || b.dev.Pipelines.OwnExp2 {
			t.Errorf("opened after %v, with the device's exp2: %v", took, b.dev.Pipelines.OwnExp2)
		}
		must.Fail(t, "Close", b.Close(), backend.ErrDeviceLost)
	})
}

// A request for memory that a running call may still use ends with its context.
func TestFullWhileRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, d := simulate(t, Options{PoolBytes: -1}, func() time.Duration { return 10 * time.Second })
		defer b.Close()
		src := input(t, b, backend.Shape{1, 1, 8, 8})
		dst := alloc(t, b, backend.F32, src.Shape())
		for range 2 { // the first one of a kernel is waited for
			check(t, b.Copy(t.Context(), []backend.Tensor{dst}, []backend.Tensor{src}))
		}
		dst.Release() // the submission still writes to it
		d.mu.Lock()
		d.full = true
		d.mu.Unlock()
		took, err := timed(t, 100*time.Millisecond, func(ctx context.Context) error {
			return must.Err(b.Alloc(ctx, backend.F32, backend.Shape{1, 1, 8, 8}))
		})
		if !errors.Is(err, context.DeadlineExceeded) || took > 200*time.Millisecond {
			t.Errorf("Alloc returned after %v: %v", took, err)
		}
	})
}

// A compiler that takes long holds up no call for longer than its context. What it compiles
// serves the next call, and calls that need the same kernel meanwhile wait for one compilation.
func TestSlowCompiler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, d := simulate(t, Options{}, func() time.Duration { return 0 })
		d.compile = time.Minute
		c := plain(t, b, 64, 64, 64)
		attention := func(ctx context.Context) error { return b.Attention(ctx, c) }
		for i, run := range []func(context.Context) error{
			attention, attention, // one starts the compilation, the other finds it started
			func(ctx context.Context) error { return b.Warmup(ctx, false, c) },
		} {
			if took, err := timed(t, time.Second, run); !errors.Is(err, context.DeadlineExceeded) || took != time.Second {
				t.Errorf("call %d returned after %v: %v", i, took, err)
			}
		}
		began, ended := time.Now(), make(chan error)
		for range 3 {
			go func() { ended <- attention(t.Context()) }()
		}
		for range 3 {
			check(t, <-ended)
		}
		if took := time.Since(began); took != 57*time.Second {
			t.Errorf("the calls waited for %v, the compilation had 57s left", took)
		}
		if len(d.compiled) != 1 {
			t.Errorf("compiled %q, want one kernel once", d.compiled)
		}
		check(t, b.Close())
	})
}

// Submissions that end late, and not in their order, are waited for before what they write
// is read, before Close, and by calls that are cancelled meanwhile. Nothing leaks.
func TestLateCompletions(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			b, d := simulate(t, Options{MaxWork: 1e6, MemoryBytes: 1 << 20 * int64(seed%2)}, func() time.Duration {
				return time.Duration(rng.IntN(300)) * time.Millisecond
			})
			c := plain(t, b, 64, 4096, 64)
			before := d.Live().Buffers
			out := host(t, backend.Shape{1, 1, 64, 64}, wave)
			check(t, b.Attention(t.Context(), c))
			if err := b.Download(t.Context(), out, c.O); err != nil {
				t.Error(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+rng.IntN(500))*time.Millisecond)
			defer cancel()
			err := b.Attention(ctx, c)
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("seed %d: %v", seed, err)
			}
			var part *backend.Interrupted
			if errors.As(err, &part) { // a call continues from what the cancelled one finished
				again := *c
				again.Resume = part.Partial
				must.Pass(t, fmt.Sprintf("seed %d: resumed", seed), b.Attention(t.Context(), &again))
			} else if err != nil && seed%2 == 1 {
				t.Errorf("seed %d: a streamed call was not interrupted: %v", seed, err)
			}
			b.dev.Pool.Drain()
			if n := d.Live().Buffers; n != before {
				t.Errorf("seed %d: %d buffers, %d before", seed, n, before)
			}
			must.Pass(t, fmt.Sprintf("seed %d: close", seed), b.Close())
		})
	}
}

// Tensors that a program forgets are freed when they are collected.
func TestForgottenTensors(t *testing.T) {
	b, d := simulate(t, Options{PoolBytes: -1}, func() time.Duration { return 0 })
	defer b.Close()
	before := d.Live().Bytes
	kept := alloc(t, b, backend.F32, backend.Shape{1, 1, 64, 64})
	for range 10 {
		must.Get(b.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, 256, 256}))(t)
	}
	for b.dev.Memory().Used != kept.Bytes() { // until the test's deadline
		runtime.GC()
		runtime.Gosched()
	}
	kept.Release()
	if n := d.Live().Bytes; n != before {
		t.Errorf("%d bytes are left, %d before", n, before)
	}
	runtime.KeepAlive(kept)
}

// A device that reports a limit of 0 is refused by the limit's name.
func TestLimitsOfZero(t *testing.T) {
	for name, clear := range map[string]func(l *gputypes.Limits){
		"MaxBufferSize":                    func(l *gputypes.Limits) { l.MaxBufferSize = 0 },
		"MaxStorageBufferBindingSize":      func(l *gputypes.Limits) { l.MaxStorageBufferBindingSize = 0 },
		"MaxComputeWorkgroupsPerDimension": func(l *gputypes.Limits) { l.MaxComputeWorkgroupsPerDimension = 0 },
	} {
		d := &simulated{t: t, limits: gputypes.DefaultLimits(), fills: map[port.Buffer]port.Ticket{}}
		clear(&d.limits)
		must.Fail(t, name, must.Err(newBackend(d, backend.Info{Name: "gpu:0"}, Options{Tune: TuneOff})), backend.ErrUnsupported, name+" is 0")
	}
	// Limits of 0 that concern single kernels are errors of the calls that need them.
	for name, clear := range map[string]func(l *gputypes.Limits){
		"threads":   func(l *gputypes.Limits) { l.MaxComputeInvocationsPerWorkgroup = 0 },
		"memory":    func(l *gputypes.Limits) { l.MaxComputeWorkgroupStorageSize = 0 },
		"buffers":   func(l *gputypes.Limits) { l.MaxStorageBuffersPerShaderStage = 0 },
		"alignment": func(l *gputypes.Limits) { l.MinStorageBufferOffsetAlignment, l.MinUniformBufferOffsetAlignment = 0, 0 },
	} {
		b, _ := simulate(t, Options{}, func() time.Duration { return 0 }, clear)
		err := b.Attention(t.Context(), plain(t, b, 8, 8, 8))
		if want := name != "alignment"; errors.Is(err, backend.ErrUnsupported) != want || (err != nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
}
