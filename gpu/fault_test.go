package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/adapter"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// faulty opens a backend on a device whose calls can be made to fail.
func faulty(t *testing.T, opt Options) (*Backend, *faultyDevice) {
	t.Helper()
	adapters, err := libraries.Adapters("")
	if errors.Is(err, port.ErrNoAdapter) && os.Getenv("CI") != "true" {
		t.Skipf("needs a WebGPU adapter (CI=true makes that a failure): %v", err)
	}
	check(t, err)
	for _, a := range adapters {
		t.Cleanup(a.Release)
	}
	dev := must.Get(adapters[0].Open(opt.lower(adapters[0].Limits())))(t)
	f := injectFaults(dev)
	b := must.Get(newBackend(f, adapter.Describe("gpu:0", adapters[0].Info(), dev.Limits()), opt))(t)
	t.Cleanup(func() { _ = b.Close() })
	return b, f
}

// session makes every kind of call: upload, alloc, attention in chunks with a trace, gradients, the
// stages, a merge, a rotation, a layer, download. It releases its tensors.
func session(b *Backend) (out []float32, err error) {
	ctx := context.Background()
	traced := backend.WithTrace(ctx, &backend.Trace{Kernel: func(time.Duration) {}, Progress: func(_, _ float64) {}})
	u := uploads{b: b, ctx: ctx}
	defer u.release()
	up := u.up
	q, k, o := up(backend.Shape{1, 2, 40, 8}), up(backend.Shape{1, 1, 200, 8}), up(backend.Shape{1, 2, 40, 8})
	po, lse, plse := up(backend.Shape{1, 2, 40, 8}), up(backend.Shape{1, 2, 40, 1}), up(backend.Shape{1, 2, 40, 1})
	s, w := up(backend.Shape{1, 2, 40, 200}), up(backend.Shape{1, 1, 8, 8})
	dq, dk := up(backend.Shape{1, 2, 40, 8}), up(backend.Shape{1, 1, 200, 8})
	if u.err != nil {
		return nil, u.err
	}
	w, err = w.Broadcast(backend.Shape{1, 2, 8, 8})
	if err != nil {
		return nil, err
	}
	c := &backend.Call{Q: q, K: k, V: k, O: o, LSE: lse, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
	out = make([]float32, 2*40*2*8)
	h, err := backend.Host(out[:40*2*8], backend.F32, backend.Shape{1, 2, 40, 8})
	if err != nil {
		return nil, err
	}
	hdq, err := backend.Host(out[40*2*8:], backend.F32, backend.Shape{1, 2, 40, 8})
	if err != nil {
		return nil, err
	}
	for _, f := range []func() error{
		func() error { return b.Attention(traced, c) },
		func() error { return b.Backward(ctx, &backend.Gradients{Call: *c, DO: q, DQ: dq, DK: dk}) },
		func() error { return b.QK(ctx, s, q, k) },
		func() error { return b.Softmax(ctx, s, plse, &c.Problem) },
		func() error { return b.PV(ctx, po, s, k) },
		func() error { return b.Merge(ctx, o, lse, po, plse) },
		func() error { return b.Rotate(ctx, o, o, lse, plse, backend.Rotation{}) },
		func() error { return b.Project(ctx, po, o, w, backend.Tensor{}) },
		func() error { return b.Download(ctx, h, po) },
		func() error { return b.Download(ctx, hdq, dq) },
		func() error { return b.Wait(ctx) },
	} {
		if err := f(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// uploads uploads waves until one fails.
type uploads struct {
	b    *Backend
	ctx  context.Context
	have []backend.Tensor
	err  error
}

func (u *uploads) up(shape backend.Shape) (d backend.Tensor) {
	if u.err != nil {
		return d
	}
	data := make([]float32, shape.Elements())
	for i := range data {
		data[i] = wave(i)
	}
	h, err := backend.Host(data, backend.F32, shape)
	if err == nil {
		d, err = u.b.Upload(u.ctx, h)
	}
	if u.err = err; err == nil {
		u.have = append(u.have, d)
	}
	return d
}

func (u *uploads) release() {
	for _, t := range u.have {
		t.Release()
	}
}

// compiled counts the compiled pipelines.
func (b *Backend) compiled() (n int) {
	for _, p := range b.dev.Pipelines.All() {
		if b.dev.Pipelines.Compiled(p) {
			n++
		}
	}
	return n
}

// portCalls are the calls of the port in a session. The first is made until its kernels are compiled.
var portCalls = []string{"CreatePipeline", "CreateBuffer", "Write", "Submit", "SubmitTimed", "Wait", "Took", "Read"}

// eachCall calls f for each call of the port in a session, until f reports that there are no more of its
// name. With -short that is the first of a name and every fifth, of which those of turn alone: turns share them. Each
// compilation is one of them.
func eachCall(t *testing.T, dev *faultyDevice, turn, turns int, f func(i int, name string) (made bool)) {
	made, least := 0, 0
	for _, name := range portCalls {
		dev.of = name
		i, step := 0, 1
		for f(i, name) {
			made++
			if short := testing.Short() && name != "CreatePipeline"; short && i == 0 {
				step = 5 * (turn + 1)
			} else if short {
				step = 5 * turns
			}
			i += step
		}
		if least += i - step + 1; i == 0 {
			t.Errorf("%s was never made to fail", name)
		}
	}
	t.Logf("%d of at least %d calls", made, least)
	dev.of = ""
}

// TestEveryCallMayFail makes each call of the port fail in turn, in each way: the error is
// typed, nothing leaks, and the next session succeeds.
func TestEveryCallMayFail(t *testing.T) {
	kinds := []struct {
		name         string
		inject, want error
	}{
		{"no memory", port.ErrMemory, backend.ErrMemory},
		{"device lost", port.ErrLost, backend.ErrDeviceLost},
		{"validation", port.ErrInvalid, backend.ErrUnsupported},
		{"a shader that does not compile", port.ErrShader, backend.ErrUnsupported},
	}
	for turn, c := range kinds {
		t.Run(c.name, func(t *testing.T) {
			b, dev := faulty(t, Options{MaxWork: 4e5})
			blank := dev.Live().Buffers
			var want []float32
			eachCall(t, dev, turn, len(kinds), func(i int, call string) bool {
				dev.Fail(i, c.inject)
				_, err := session(b)
				failed := dev.Failed() != ""
				dev.Fail(-1, nil)
				if !failed {
					if err != nil {
						t.Fatalf("nothing was made to fail: %v", err)
					}
					b.dev.Pool.Drain()
					return false
				}
				// Without memory the pool releases its buffers and tries again.
				retried := err == nil && call == "CreateBuffer" && c.inject == port.ErrMemory
				if !retried && !errors.Is(err, c.want) {
					t.Errorf("%s %d: error %v does not wrap %v", call, i, err, c.want)
				}
				b.dev.Pool.Drain()
				if l := dev.Live(); l.Buffers != blank || l.Pipelines != b.compiled() {
					t.Fatalf("%s %d: left %+v, %d buffers and %d pipelines belong there", call, i, l, blank, b.compiled())
				}
				if i%5 != 0 { // a healthy session between all of them would take long
					return true
				}
				got := must.Get(session(b))(must.In(t, "after %s %d failed", call, i))
				if want == nil {
					want = got
				}
				if !slices.Equal(got, want) {
					t.Fatalf("after %s %d failed: another result", call, i)
				}
				b.dev.Pool.Drain()
				return true
			})
		})
	}
}

// TestLostDevice loses the device at each call of the port: that call and all later ones return backend.ErrDeviceLost,
// only the backend's own objects remain, Close releases them, and other devices work.
func TestLostDevice(t *testing.T) {
	healthy, _ := faulty(t, Options{MaxWork: 2e5})
	want := must.Get(session(healthy))(t)
	another := func(call string) {
		next, _ := faulty(t, Options{MaxWork: 2e5})
		if got, err := session(next); err != nil || !slices.Equal(got, want) {
			t.Errorf("lost at %s: the next device gives another result, %v", call, err)
		}
	}
	b, dev := faulty(t, Options{MaxWork: 2e5})
	blank := dev.Live().Buffers
	eachCall(t, dev, 0, 1, func(i int, call string) bool {
		dev.Lose(i)
		_, err := session(b)
		if dev.Failed() == "" {
			if err != nil {
				t.Fatalf("nothing was lost: %v", err)
			}
			dev.Fail(-1, nil)
			b.dev.Pool.Drain()
			return false
		}
		must.Fail(t, fmt.Sprintf("lost at %s %d", call, i), err, backend.ErrDeviceLost)
		b.dev.Pool.Drain()
		if l := dev.Live(); l.Buffers != blank || l.Groups != 0 {
			t.Fatalf("lost at %s %d: left %+v, %d buffers belong there", call, i, l, blank)
		}
		if i == 0 { // the rest asks for a device each
			loseFor(t, call)
			if call == "CreatePipeline" || !testing.Short() {
				another(call)
			}
		}
		dev.Fail(-1, nil)                                                                     // back again
		if err := b.Wait(t.Context()); err != nil && !errors.Is(err, backend.ErrDeviceLost) { // of calls that had returned
			t.Errorf("lost at %s %d: wait: %v", call, i, err)
		}
		return true
	})
}

// loseFor loses a device permanently at the first call of a name, with tensors allocated.
func loseFor(t *testing.T, call string) {
	t.Helper()
	b, dev := faulty(t, Options{MaxWork: 2e5})
	c := plain(t, b, 3, 40, 8)
	s := alloc(t, b, backend.F32, backend.Shape{1, 1, 3, 40})
	dev.of = call
	dev.Lose(0)
	_, err := session(b)
	if !errors.Is(err, backend.ErrDeviceLost) || dev.Failed() != call {
		t.Fatalf("%s: lost at %q, %v", call, dev.Failed(), err)
	}
	ctx := t.Context()
	h := host(t, backend.Shape{1, 1, 3, 8}, wave)
	for name, f := range map[string]func() error{
		"Alloc":     func() error { _, err := b.Alloc(ctx, backend.F32, backend.Shape{1, 1, 3, 8}); return err },
		"Upload":    func() error { _, err := b.Upload(ctx, h); return err },
		"Download":  func() error { return b.Download(ctx, h, c.O) },
		"Attention": func() error { return b.Attention(ctx, c) },
		"QK":        func() error { return b.QK(ctx, s, c.Q, c.K) },
		"Softmax":   func() error { return b.Softmax(ctx, s, c.LSE, &c.Problem) },
		"PV":        func() error { return b.PV(ctx, c.O, s, c.V) },
		"Project":   func() error { return b.Project(ctx, c.O, s, c.V, backend.Tensor{}) },
		"Merge":     func() error { return b.Merge(ctx, c.O, c.LSE, c.Q, s) },
		"Warmup":    func() error { return b.Warmup(ctx, false, c) },
		"Backward":  func() error { return b.Backward(ctx, &backend.Gradients{Call: *c, DO: c.Q, DQ: s}) },
		"Plan":      func() error { _, err := b.Plan(t.Context(), c); return err },
		"PeakFLOPS": func() error { _, err := b.PeakFLOPS(ctx); return err },
	} {
		must.Fail(t, fmt.Sprintf("lost at %s: %s afterwards", call, name), f(), backend.ErrDeviceLost)
	}
	c.O.Release()
	must.Pass(t, fmt.Sprintf("lost at %s: close", call), b.Close())
	if l := dev.Live(); l != (port.Live{}) {
		t.Errorf("lost at %s: Close left %+v", call, l)
	}
	c.Q.Release() // later than Close
	must.Fail(t, fmt.Sprintf("lost at %s", call), b.Attention(ctx, c), backend.ErrClosed)
}

// TestNothingGrows runs many concurrent sessions twice: the device holds no more after the
// second round than after the first.
func TestNothingGrows(t *testing.T) {
	b, dev := faulty(t, Options{})
	rounds := func(n int) port.Live {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range n {
					if _, err := session(b); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		b.dev.Pool.Drain()
		return dev.Live()
	}
	first, last := rounds(1), rounds(10)
	if first != last {
		t.Errorf("%+v after the first, %+v after the last", first, last)
	}
	check(t, b.Close())
	if l := dev.Live(); l != (port.Live{}) {
		t.Errorf("Close left %+v", l)
	}
}

// TestOutOfMemory makes each request for memory fail: those of the host, also while tensors
// stream, and the buffers of the device.
func TestOutOfMemory(t *testing.T) {
	for _, c := range []struct {
		name   string
		opt    Options
		full   bool
		device bool
	}{
		{name: "host"},
		{name: "host, streamed", opt: Options{MemoryBytes: 540 << 10}, full: true},
		{name: "device", device: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if testing.Short() && c.name == "host" {
				t.Skip("-short: the same requests fail while tensors stream")
			}
			b, dev := faulty(t, c.opt)
			if c.full {
				fill(b)
			}
			// Tensors move to the host, whose memory is then requested.
			m := kernelstest.Memory{Fail: backend.FailMemory, Elsewhere: true, Held: func() int {
				b.dev.Pool.Drain()
				return dev.Live().Buffers
			}}
			if c.device {
				m.Fail = func(nth int) func() int { // and all later ones: the pool drains itself and tries again
					b.dev.Pool.Drain()
					made := 0
					dev.Watch(func(call string) {
						if call == "CreateBuffer" {
							if made++; made >= nth {
								dev.Fail(0, port.ErrMemory)
							}
						}
					})
					return func() int {
						dev.Watch(nil)
						dev.Fail(-1, nil)
						return made
					}
				}
			}
			kernelstest.RunOutOfMemory(t, b, m)
		})
	}
}
