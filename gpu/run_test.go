package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// prepare returns a prepared call.
func prepare(t testing.TB, be backend.Backend, q, k, v backend.Tensor, opt kernels.Options) *kernels.Call {
	t.Helper()
	return must.Get(kernels.NewDevice(be).Prepare(q, k, v, opt))(t)
}

// callOf returns a call without options, with o and lse on the device.
func callOf(t testing.TB, b *Backend, q, k, v backend.Tensor) *backend.Call {
	t.Helper()
	shape, columns := q.Shape(), q.Shape()
	shape[backend.Dim], columns[backend.Dim] = v.Shape()[backend.Dim], 1
	return &backend.Call{Q: q, K: k, V: v, O: alloc(t, b, backend.F32, shape), LSE: alloc(t, b, backend.F32, columns),
		Problem: backend.Problem{Scale: 0.3, Visible: backend.Everything()}}
}

// input uploads wave.
func input(t testing.TB, b *Backend, shape backend.Shape) backend.Tensor {
	t.Helper()
	return upload(t, b, host(t, shape, wave))
}

// plain returns a call of one head without options.
func plain(t testing.TB, b *Backend, sq, sk, d int) *backend.Call {
	t.Helper()
	return callOf(t, b, input(t, b, backend.Shape{1, 1, sq, d}), input(t, b, backend.Shape{1, 1, sk, d}), input(t, b, backend.Shape{1, 1, sk, d}))
}

// submissions returns the number of submissions of a faulty device during f.
func submissions(dev *faultyDevice, f func()) (n int) {
	dev.Watch(func(call string) {
		if call == "Submit" || call == "SubmitTimed" {
			n++
		}
	})
	f()
	dev.Watch(nil)
	return n
}

// backwardOf returns the gradients of the operands of c, which has run.
func backwardOf(t testing.TB, b *Backend, c *backend.Call) *backend.Gradients {
	t.Helper()
	g := &backend.Gradients{Call: *c, DO: input(t, b, c.O.Shape())}
	for to, of := range map[*backend.Tensor]backend.Tensor{&g.DQ: c.Q, &g.DK: c.K, &g.DV: c.V} {
		*to = alloc(t, b, backend.F32, of.Shape())
	}
	return g
}

// TestCancelledWithinTheBudget cancels a call at each of its submissions: it starts no more,
// leaves at most two on the device, and leaves the backend usable.
func TestCancelledWithinTheBudget(t *testing.T) {
	b, dev := faulty(t, Options{MaxWork: 2e5})
	c := plain(t, b, 100, 300, 16)
	t.Run("attention", func(t *testing.T) {
		testCancelled(t, b, dev, c.O, func(ctx context.Context) error { return b.Attention(ctx, c) })
	})
	g := backwardOf(t, b, c)
	t.Run("backward", func(t *testing.T) {
		testCancelled(t, b, dev, g.DQ, func(ctx context.Context) error { return b.Backward(ctx, g) })
	})
}

// testCancelled cancels call, which writes o.
func testCancelled(t *testing.T, b *Backend, dev *faultyDevice, o backend.Tensor, call func(context.Context) error) {
	var want []float32
	total := submissions(dev, func() {
		check(t, call(t.Context()))
		want = floats(t, b, o)
	}) - 1 // the download's
	if total < 5 {
		t.Fatalf("%d submissions, nothing to cancel between", total)
	}
	b.dev.Pool.Drain()
	before := dev.Live()
	for at := range total {
		ctx, cancel := context.WithCancel(t.Context())
		started, ended := 0, 0
		dev.Watch(func(call string) {
			switch call {
			case "Submit":
				if started == at {
					cancel()
				}
				started++
			case "Ended": // a wait that the cancellation ends is repeated
				ended++
			}
		})
		err := call(ctx)
		dev.Watch(nil)
		cancel()
		// The last one may run when the call is cancelled.
		if !errors.Is(err, context.Canceled) && (at < total-1 || err != nil) {
			t.Errorf("cancelled at submission %d: %v", at, err)
		}
		if started != at+1 || started-ended > queue.MaxPending {
			t.Errorf("cancelled at submission %d: %d were started, %d had ended", at, started, ended)
		}
		must.Pass(t, fmt.Sprintf("cancelled at submission %d: wait", at), b.Wait(t.Context()))
		b.dev.Pool.Drain()
		if l := dev.Live(); l.Buffers != before.Buffers || l.Bytes != before.Bytes {
			t.Errorf("cancelled at submission %d: %+v, before %+v", at, l, before)
		}
	}
	if err := call(t.Context()); err != nil || !slices.Equal(floats(t, b, o), want) {
		t.Errorf("after all of that: another result, %v", err)
	}
}

// TestTwoInFlight checks that a call has two submissions on the device at a time.
func TestTwoInFlight(t *testing.T) {
	b, dev := faulty(t, Options{MaxWork: 2e5})
	c := plain(t, b, 100, 300, 16)
	flying, most := 0, 0
	dev.Watch(func(call string) {
		switch call {
		case "Submit":
			flying++
			most = max(most, flying)
		case "Wait":
			flying--
		}
	})
	defer dev.Watch(nil)
	check(t, b.Attention(t.Context(), c))
	if most != queue.MaxPending || flying != 0 { // the first call of a kernel waits for its speed
		t.Errorf("at most %d in flight, %d at the end", most, flying)
	}
	most = 0
	check(t, b.Attention(t.Context(), c))
	if most != queue.MaxPending || flying != queue.MaxPending {
		t.Errorf("the second call: at most %d in flight, %d at the end", most, flying)
	}
}

// TestProgress checks that progress counts the plan's FLOPs, increases with each submission
// and ends at the total, for calls of one chunk and of many, and for the stages.
func TestProgress(t *testing.T) {
	b := open(t, Options{MaxWork: 4e5})
	c := plain(t, b, 100, 300, 16)
	s := alloc(t, b, backend.F32, backend.Shape{1, 1, 100, 300})
	small := plain(t, b, 5, 7, 8)
	plan := func(c *backend.Call) float64 { return float64(backend.NewPlan(c).FLOPs) }
	for _, x := range []struct {
		name  string
		call  func(ctx context.Context) error
		least int
		total float64 // 0: not stated by a plan
	}{
		{"attention", func(ctx context.Context) error { return b.Attention(ctx, c) }, 3, plan(c)},
		{"attention of one chunk", func(ctx context.Context) error { return b.Attention(ctx, small) }, 1, plan(small)},
		{"qk", func(ctx context.Context) error { return b.QK(ctx, s, c.Q, c.K) }, 2, 0},
		{"softmax", func(ctx context.Context) error { return b.Softmax(ctx, s, c.LSE, &c.Problem) }, 2, 0},
		{"pv", func(ctx context.Context) error { return b.PV(ctx, c.O, s, c.V) }, 2, 0},
	} {
		var done []float64
		var total float64
		ctx := backend.WithTrace(t.Context(), &backend.Trace{Progress: func(d, of float64) {
			done = append(done, d)
			if total = of; d > of {
				t.Errorf("%s: %g of %g are done", x.name, d, of)
			}
		}})
		check(t, x.call(ctx))
		if len(done) < x.least || x.least == 1 && len(done) != 1 {
			t.Fatalf("%s: told %d times", x.name, len(done))
		}
		if !slices.IsSorted(done) || slices.Index(done, done[len(done)-1]) != len(done)-1 {
			t.Errorf("%s: does not go up: %g", x.name, done)
		}
		last := done[len(done)-1]
		if last != total || x.total > 0 && math.Abs(total-x.total) > 1e-9*x.total {
			t.Errorf("%s: ends at %g of %g, the plan has %g", x.name, last, total, x.total)
		}
	}
}

// TestWarmup checks that after Warmup the first call compiles nothing, fused or in stages,
// at any length, that Warmup runs nothing, and that its operands need no memory.
func TestWarmup(t *testing.T) {
	b, dev := faulty(t, Options{})
	var compiled []string
	ctx := backend.WithTrace(t.Context(), &backend.Trace{Compile: func(kernel string, took time.Duration) {
		if took <= 0 {
			t.Errorf("%s compiled in %v", kernel, took)
		}
		compiled = append(compiled, kernel)
	}})
	for _, opt := range []kernels.Options{{Causal: true}, {Weights: true}, {Dropout: kernels.Dropout{P: 0.5}}} {
		meta := func(s int) backend.Tensor { return metaOf(t, backend.F32, backend.Shape{1, 2, s, 24}) }
		compiled = nil
		before := dev.Live()
		if n := submissions(dev, func() {
			check(t, prepare(t, b, meta(50), meta(72), meta(72), opt).Warmup(ctx))
		}); n != 0 {
			t.Errorf("%+v: %d submissions", opt, n)
		}
		if len(compiled) == 0 || dev.Live().Bytes != before.Bytes {
			t.Errorf("%+v: compiled %q, %d bytes more on the device", opt, compiled, dev.Live().Bytes-before.Bytes)
		}
		compiled = nil
		for _, s := range []int{72, 200} { // multiples of 4 both, see Warmup
			x := input(t, b, backend.Shape{1, 2, s, 24})
			r := must.Get(kernels.NewDevice(b).Attention(ctx, x, x, x, opt))(t)
			r.Release()
		}
		if len(compiled) > 0 {
			t.Errorf("%+v: calls after Warmup compiled %q", opt, compiled)
		}
	}
	// Backward has a warmup of its own, of the gradients that it names.
	for _, opt := range []kernels.Options{{Causal: true, LSE: true}, {LSE: true, ALiBi: []float32{1, 2}, Sinks: []float32{0, 1}}} {
		x := input(t, b, backend.Shape{1, 2, 72, 24})
		call := prepare(t, b, x, x, x, opt)
		r := must.Get(call.Run(ctx))(t)
		grads := must.Get(call.AllocGradients(ctx, call.Gradients()))(t)
		compiled = nil
		if n := submissions(dev, func() {
			check(t, call.WarmupBackward(ctx, call.Gradients()))
		}); n != 0 || len(compiled) == 0 {
			t.Errorf("%+v: %d submissions, compiled %q for Backward", opt, n, compiled)
		}
		compiled = nil
		check(t, call.Backward(ctx, grads, r, r))
		if len(compiled) > 0 {
			t.Errorf("%+v: Backward after WarmupBackward compiled %q", opt, compiled)
		}
		grads.Release()
		r.Release()
	}
	// Cancelled or refused, it returns the error.
	done, cancel := context.WithCancel(ctx)
	cancel()
	x := metaOf(t, backend.F16, backend.Shape{1, 1, 40, 24})
	must.Fail(t, "cancelled", prepare(t, b, x, x, x, kernels.Options{}).Warmup(done), context.Canceled)
	dev.Fail(0, port.ErrShader)
	must.Fail(t, "a shader that does not compile", prepare(t, b, x, x, x, kernels.Options{}).Warmup(ctx), backend.ErrUnsupported)
	must.Pass(t, "afterwards", prepare(t, b, x, x, x, kernels.Options{}).Warmup(ctx))
}

// TestSubmissionsFollowTheBudget checks that speeds determine the number of submissions and change no result.
func TestSubmissionsFollowTheBudget(t *testing.T) {
	b, dev := faulty(t, Options{Budget: 40 * time.Millisecond})
	c := plain(t, b, 512, 512, 64)
	run := func(speed float64) (submitted int, o []float32) {
		for _, p := range b.dev.Pipelines.All() {
			p.Pace.Set(speed)
		}
		submitted = submissions(dev, func() {
			check(t, b.Attention(t.Context(), c))
		})
		return submitted, floats(t, b, c.O)
	}
	run(2e9)
	n, want := run(1e15)
	if n != 1 {
		t.Errorf("%d submissions at a speed that needs one", n)
	}
	n, got := run(1e7)
	if n < 4 {
		t.Errorf("%d submissions at the lowest speed", n)
	}
	if !slices.Equal(got, want) {
		t.Error("another result")
	}
}

// TestOperationOnce: an error names the operation once, with an operand that is not in the GPU's memory.
func TestOperationOnce(t *testing.T) {
	b := open(t, Options{})
	x := input(t, b, backend.Shape{1, 1, 3, 4})
	mask := must.Get(backend.NewTensor(backend.NewMemory(new(int), "another device", 9, nil, nil), backend.Bool, backend.Shape{1, 1, 3, 3}))(t)
	_, err := kernels.NewDevice(b).Attention(t.Context(), x, x, x, kernels.Options{Mask: mask})
	if !errors.Is(err, backend.ErrDevice) || !strings.HasPrefix(err.Error(), "attention: mask is in another device") {
		t.Errorf("a mask of another device: %v", err)
	}
}

// TestTooLong refuses lengths beyond the 32-bit positions of kernels.
func TestTooLong(t *testing.T) {
	b := open(t, Options{})
	q, k := metaOf(t, backend.F32, backend.Shape{1, 1, 1, 1}), metaOf(t, backend.F32, backend.Shape{1, 1, 1 << 30, 1})
	c := &backend.Call{Q: q, K: k, V: k, O: q, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
	must.Fail(t, "2^30 keys", must.Err(b.Plan(t.Context(), c)), backend.ErrUnsupported, "k has shape")
}
