package cpu

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestWorkersOutliveCalls shows that calls of all backends use the same goroutines once
// these have started, and that the goroutines end with Close or with an unreachable backend.
func TestWorkersOutliveCalls(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	c := plain(t, 4, 256, 64)
	call := func(be *Backend) {
		must.Do(t, be.Attention(t.Context(), c))
	}
	running := runtime.NumGoroutine()
	be, other := New(Options{Threads: 3}), New(Options{Threads: 2})
	call(be)
	call(other)
	for runtime.NumGoroutine() > running+2 { // a call starts an empty one, too
		runtime.Gosched()
	}
	if got := runtime.NumGoroutine(); got != running+2 {
		t.Errorf("%d goroutines more after a call with 3 threads, want 2 workers", got-running)
	}
	// end waits without a deadline: the limit of the whole test binary reports a hang.
	end := func(help func()) {
		for runtime.NumGoroutine() > running {
			help()
			time.Sleep(time.Millisecond)
		}
	}
	be.Close()
	be.Close()
	call(other)
	other.Close()
	end(func() {})
	call(New(Options{Threads: 3}))
	end(runtime.GC)
}

// failingContext calls fail when it is asked for its error for the given time.
type failingContext struct {
	context.Context
	looks atomic.Int64
	at    int64
	fail  func()
}

func (c *failingContext) Err() error {
	if c.looks.Add(1) == c.at {
		c.fail()
	}
	return nil
}

// TestPanicsBecomeErrors injects a panic, and runtime.Goexit, into each place at which a stage looks at its
// context, on the goroutines of its caller and of workers. The call returns an error, of a panic with
// the stack, or its goroutine ends, and the next call of the backend has the bits of one without it.
func TestPanicsBecomeErrors(t *testing.T) { eachTier(t, testPanicsBecomeErrors) }

func testPanicsBecomeErrors(t *testing.T, tier string) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	be := open(t, Options{Tier: tier, Threads: 4})
	for _, s := range stages(t, be) {
		t.Run(s.name, func(t *testing.T) {
			run := func(ctx context.Context) (err error) {
				err = errEnded
				done := make(chan struct{})
				go func() {
					defer close(done)
					for _, out := range s.out {
						tile.Fill(floats(t, out), 7)
					}
					err = s.do(ctx)
				}()
				<-done
				return err
			}
			must.Do(t, run(t.Context()))
			var want [][]float32
			for _, out := range s.out {
				want = append(want, slices.Clone(floats(t, out)))
			}
			injected := 0
			for at := int64(2); ; at++ { // the first look is before the call begins
				exit := injected%2 == 1
				ctx := &failingContext{Context: t.Context(), at: at, fail: func() { panic("injected") }}
				if exit {
					ctx.fail = runtime.Goexit
				}
				err := run(ctx)
				if err == nil && ctx.looks.Load() < at {
					break
				}
				failed := errors.Is(err, backend.ErrInternal) && strings.Contains(fmt.Sprint(err), "injected") && strings.Contains(fmt.Sprint(err), "workers_test.go")
				if exit {
					failed = errors.Is(err, errEnded) || errors.Is(err, backend.ErrCallback)
				}
				if !failed {
					t.Fatalf("at look %d, Goexit %t: error %v", at, exit, err)
				}
				injected++
				must.Do(t, run(t.Context()))
				for i, out := range s.out {
					if !slices.Equal(floats(t, out), want[i]) {
						t.Fatalf("after a failure at look %d, Goexit %t, the next call has other results", at, exit)
					}
				}
				if injected > 40 {
					at += at / 4
				}
			}
			if injected < 2 {
				t.Errorf("%d failures were injected", injected)
			}
		})
	}
}

// errEnded is the error of a call whose goroutine has ended without it.
var errEnded = errors.New("the goroutine ended")

// stage is a call with its outputs.
type stage struct {
	name string
	out  []backend.Tensor
	do   func(ctx context.Context) error
}

// stages returns a call of each kind.
func stages(t *testing.T, be *Backend) []stage {
	x := func(seed uint64, shape ...int) backend.Tensor { return random(t, seed, backend.Shape(shape)) }
	zeros := func(shape ...int) backend.Tensor { return alloc(t, backend.Shape(shape)) }
	var all []stage
	add := func(name string, out []backend.Tensor, do func(ctx context.Context) error) {
		all = append(all, stage{name, out, do})
	}
	for _, s := range []struct {
		name         string
		batch, heads int
		sq, sk       int
		left         int
	}{
		{"tiles", 1, 2, 300, 300, backend.Unbounded},
		{"shared keys", 1, 1, 1, 5000, backend.Unbounded},
		{"small", 200, 2, 2, 40, backend.Unbounded},
		{"one key", 200, 2, 1, 1, backend.Unbounded},
		{"window", 1, 2, 300, 300, 20},
	} {
		c := &backend.Call{Q: x(1, s.batch, s.heads, s.sq, 16), K: x(2, s.batch, s.heads, s.sk, 16), V: x(3, s.batch, s.heads, s.sk, 16),
			O: zeros(s.batch, s.heads, s.sq, 16), Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
		if s.left != backend.Unbounded {
			c.Visible = backend.Visibility{Left: s.left, Right: 0}
		}
		add("attention of "+s.name, []backend.Tensor{c.O}, func(ctx context.Context) error { return be.Attention(ctx, c) })
	}
	a, b := plain(t, 1, 200, 16), plain(t, 3, 40, 16)
	add("two calls", []backend.Tensor{a.O, b.O}, func(ctx context.Context) error { return be.Attention(ctx, a, b) })

	const rows, keys, dim = 200, 300, 16
	q, k, v := x(4, 1, 2, rows, dim), x(5, 1, 2, keys, dim), x(6, 1, 2, keys, dim)
	s, o, lse := zeros(1, 2, rows, keys), zeros(1, 2, rows, dim), zeros(1, 2, rows, 1)
	p := backend.Problem{Scale: 0.5, Visible: backend.Everything()}
	add("qk", []backend.Tensor{s}, func(ctx context.Context) error { return be.QK(ctx, s, q, k) })
	add("scores", []backend.Tensor{s}, func(ctx context.Context) error { return be.Scores(ctx, s, &p, backend.Biased) })
	add("softmax", []backend.Tensor{s}, func(ctx context.Context) error { return be.Softmax(ctx, s, backend.Tensor{}, &p) })
	w := x(7, 1, 2, rows, keys)
	add("pv", []backend.Tensor{o}, func(ctx context.Context) error { return be.PV(ctx, o, w, v) })
	copied := zeros(1, 2, rows, keys)
	add("copy", []backend.Tensor{copied}, func(ctx context.Context) error {
		return be.Copy(ctx, []backend.Tensor{copied}, []backend.Tensor{w})
	})
	part, partLSE := x(8, 1, 2, rows, dim), x(9, 1, 2, rows, 1)
	add("merge", []backend.Tensor{o, lse}, func(ctx context.Context) error { return be.Merge(ctx, o, lse, part, partLSE) })
	y, cos, sin := zeros(1, 2, rows, dim), x(10, 1, 2, rows, dim/2), x(11, 1, 2, rows, dim/2)
	add("rotate", []backend.Tensor{y}, func(ctx context.Context) error {
		return be.Rotate(ctx, y, q, cos, sin, backend.Rotation{Interleaved: true})
	})
	normed, dw := zeros(1, 2, rows, dim), zeros(1, 2, rows, dim)
	add("normalise backward", []backend.Tensor{normed, dw}, func(ctx context.Context) error {
		return be.NormaliseBackward(ctx, normed, dw, q, part, backend.Tensor{}, backend.Norm{Epsilon: 1e-6})
	})
	gated, dgate := zeros(1, 2, rows, dim), zeros(1, 2, rows, dim)
	add("gate backward", []backend.Tensor{gated, dgate}, func(ctx context.Context) error {
		return be.GateBackward(ctx, gated, dgate, q, part, q, backend.SiLU)
	})
	projected, matrix := zeros(1, 1, rows, 48), x(12, 1, 1, dim, 48)
	add("project", []backend.Tensor{projected}, func(ctx context.Context) error {
		return be.Project(ctx, projected, x(13, 1, 1, rows, dim), matrix, backend.Tensor{})
	})
	c := &backend.Call{Q: q, K: k, V: v, O: zeros(1, 2, rows, dim), LSE: zeros(1, 2, rows, 1), Problem: p}
	must.Do(t, be.Attention(t.Context(), c))
	g := &backend.Gradients{Call: *c, DO: x(14, 1, 2, rows, dim), DQ: zeros(1, 2, rows, dim), DK: zeros(1, 2, keys, dim), DV: zeros(1, 2, keys, dim)}
	add("backward", []backend.Tensor{g.DQ, g.DK, g.DV}, func(ctx context.Context) error { return be.Backward(ctx, g) })
	return all
}
