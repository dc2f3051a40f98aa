package cpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// backwardOf returns a request for gradients of c, with random DO and DLSE, after a forward
// call on be.
func backwardOf(t testing.TB, be *Backend, c backend.Call) *backend.Gradients {
	t.Helper()
	d := c.Dims()
	c.O, c.LSE = alloc(t, c.O.Shape()), alloc(t, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1})
	must.Do(t, be.Attention(t.Context(), &c))
	return &backend.Gradients{Call: c, DO: random(t, 20, c.O.Shape()), DLSE: random(t, 21, c.LSE.Shape()),
		DQ: random(t, 22, c.Q.Shape()), DK: random(t, 23, c.K.Shape()), DV: random(t, 24, c.V.Shape())}
}

// withO returns c with an unset output.
func withO(t testing.TB, c backend.Call) backend.Call {
	d := c.Dims()
	c.O = alloc(t, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim})
	return c
}

// everyGradient returns a request for all gradients of a call with most options, over more
// than one chunk of keys.
func everyGradient(t testing.TB, be *Backend) *backend.Gradients {
	t.Helper()
	const b, h, hkv, sq, sk, d, dv = 2, 4, 2, 70, 1100, 24, 21
	g := backwardOf(t, be, withO(t, backend.Call{Q: random(t, 1, backend.Shape{b, h, sq, d}), K: random(t, 2, backend.Shape{b, hkv, sk, d}), V: random(t, 3, backend.Shape{b, hkv, sk, dv}),
		Problem: everyOption(t, b, h, sq, sk, backend.Visibility{Offset: 600, Left: 900, Right: 70, KLen: []int{sk, 650}})}))
	g.DBias, g.DRelative = alloc(t, backend.Shape{b, h, 1, sk}), alloc(t, backend.Shape{b, 1, 1, sq + sk - 1})
	g.DSlopes, g.DSinks = alloc(t, backend.Shape{b, h, 1, 1}), alloc(t, backend.Shape{1, h, 1, 1})
	return g
}

// TestBackwardBiases shows that gradients of biases of every shape have the same bits on any
// number of threads, where tasks that run at the same time add to one element, with and without
// those of operands.
func TestBackwardBiases(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		if tier == tierGonum {
			skipWithRace(t)
		}
		g := everyGradient(t, open(t, Options{Tier: tier}))
		d := g.Dims()
		for shape := range 16 {
			if tier == tierGonum && shape%3 > 0 {
				continue // the order is that of the other tiers
			}
			of := backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK}
			for axis := range of {
				if shape>>axis&1 > 0 {
					of[axis] = 1
				}
			}
			var want backend.Tensor
			for n, threads := range []int{1, 2, 3, 7} {
				be := open(t, Options{Tier: tier, Threads: threads})
				g.DBias = random(t, 30, of)
				if n == 3 {
					g.DQ, g.DK, g.DV = backend.Tensor{}, backend.Tensor{}, backend.Tensor{}
				}
				must.Do(t, be.Backward(t.Context(), g))
				if n == 0 {
					want = g.DBias
				}
				sameBits(t, fmt.Sprintf("%v on %d threads", of, threads), g.DBias, want)
			}
			g = everyGradient(t, open(t, Options{Tier: tier}))
		}
	})
}

// TestPlanBackwardCountsSums shows that the scratch of a plan has the sums in float64 from which
// gradients of biases follow.
func TestPlanBackwardCountsSums(t *testing.T) {
	be := open(t, Options{})
	g := everyGradient(t, be)
	scratch := func() int64 {
		p := must.Get(be.PlanBackward(t.Context(), g))(t)
		return p.Scratch
	}
	d := g.Dims()
	g.DBias, g.DRelative, g.DSlopes = backend.Tensor{}, backend.Tensor{}, backend.Tensor{}
	none := scratch()
	for _, c := range []struct {
		name string
		to   *backend.Tensor
		s    backend.Shape
		each int // sums of a head
	}{
		{"dbias of keys", &g.DBias, backend.Shape{1, 1, 1, d.SeqK}, d.SeqK},
		{"dbias of rows", &g.DBias, backend.Shape{1, 1, d.SeqQ, 1}, d.SeqQ},
		{"dbias of pairs", &g.DBias, backend.Shape{1, 1, d.SeqQ, d.SeqK}, 0},
		{"drelative", &g.DRelative, backend.Shape{1, 1, 1, d.SeqQ + d.SeqK - 1}, d.SeqQ + d.SeqK - 1},
		{"dslopes", &g.DSlopes, backend.Shape{1, d.Heads, 1, 1}, d.SeqQ + d.SeqK - 1},
	} {
		*c.to = alloc(t, c.s)
		if got, want := scratch()-none, int64(8*d.Batch*d.Heads*c.each); got != want {
			t.Errorf("%s: %d bytes more, want %d", c.name, got, want)
		}
		*c.to = backend.Tensor{}
	}
}

// TestBackwardThreads shows that gradients have the same bits on any number of threads, and in
// a call on one of the batches.
func TestBackwardThreads(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		if tier == tierGonum {
			skipWithRace(t)
		}
		g := everyGradient(t, open(t, Options{Tier: tier}))
		want := *g
		for _, threads := range []int{1, 2, 3, 7} {
			be := open(t, Options{Tier: tier, Threads: threads})
			if threads > 1 {
				g.DQ, g.DK, g.DV = alloc(t, g.Q.Shape()), alloc(t, g.K.Shape()), alloc(t, g.V.Shape())
				g.DBias, g.DRelative = alloc(t, g.DBias.Shape()), alloc(t, g.DRelative.Shape())
				g.DSlopes, g.DSinks = alloc(t, g.DSlopes.Shape()), alloc(t, g.DSinks.Shape())
			}
			must.Do(t, be.Backward(t.Context(), g))
			got, _ := g.Operands()
			outputs, _ := want.Operands()
			for i, o := range outputs {
				sameBits(t, fmt.Sprintf("%d threads: %s", threads, o.Name), got[i].Tensor, o.Tensor)
			}
			for b := range g.Dims().Batch {
				if threads != 2 {
					break
				}
				one := *g
				one.Visible.KLen, one.Slopes = g.Visible.KLen[b:b+1], g.Slopes
				one.Dropout.First[backend.Batch] = b
				for _, x := range []*backend.Tensor{&one.Q, &one.K, &one.V, &one.O, &one.LSE, &one.DO, &one.DLSE, &one.Bias, &one.Relative, &one.Mask, &one.Blocks} {
					*x = cut(t, *x, backend.Batch, b, b+1)
				}
				one.DQ, one.DK, one.DV = alloc(t, one.Q.Shape()), alloc(t, one.K.Shape()), alloc(t, one.V.Shape())
				one.DBias, one.DRelative, one.DSlopes, one.DSinks = backend.Tensor{}, backend.Tensor{}, backend.Tensor{}, backend.Tensor{}
				must.Do(t, be.Backward(t.Context(), &one))
				got, _ := one.Operands()
				for i, o := range outputs[:3] {
					part := cut(t, o.Tensor, backend.Batch, b, b+1)
					sameBits(t, fmt.Sprintf("batch %d alone: %s", b, o.Name), got[i].Tensor, part)
				}
			}
		}
	})
}

// TestBackwardCancel shows that Backward returns the context's error, whichever task notices
// it first, while others wait for that task.
func TestBackwardCancel(t *testing.T) {
	be := open(t, Options{Threads: 3})
	g := everyGradient(t, be)
	for looks := int64(0); ; looks = looks*5/4 + 1 {
		ctx := &countedContext{Context: t.Context()}
		ctx.left.Store(looks)
		err := be.Backward(ctx, g)
		if err == nil {
			if looks < 50 {
				t.Fatalf("the context was looked at no more than %d times", looks)
			}
			return
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled by look %d: error %v", looks, err)
		}
	}
}

// TestBackwardMemory shows that Backward returns ErrMemory where an allocation is refused, and
// succeeds afterwards.
func TestBackwardMemory(t *testing.T) {
	for nth := 1; ; nth++ {
		be := New(Options{Threads: 1})
		g := everyGradient(t, be)
		runtime.GC() // the first leaves the contents of pools where they are found once more
		runtime.GC()
		stop := backend.FailMemory(nth)
		err := be.Backward(t.Context(), g)
		requests := stop()
		be.Close()
		if requests < nth {
			if nth < 5 {
				t.Errorf("Backward makes %d requests for memory, the sums and the scratch are 4 or more", requests)
			}
			return
		}
		if !errors.Is(err, backend.ErrMemory) {
			t.Fatalf("request %d refused: error %v", nth, err)
		}
	}
}

// TestBackwardHidden shows that the contents of hidden keys and of fully masked rows reach no
// gradient, NaN and Inf included.
func TestBackwardHidden(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		be := open(t, Options{Tier: tier})
		const sq, sk, d = 70, 300, 16
		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), math.MaxFloat32} {
			var results [2]*backend.Gradients
			for n := range results {
				c := withO(t, backend.Call{Q: random(t, 1, backend.Shape{1, 2, sq, d}), K: random(t, 2, backend.Shape{1, 1, sk, d}), V: random(t, 3, backend.Shape{1, 1, sk, d}),
					Problem: backend.Problem{Scale: 0.3, Softcap: 3, Visible: backend.Everything(), Mask: flags(t, 4, backend.Shape{1, 2, sq, sk})}})
				seen := must.Get(c.Mask.Bools())(t)
				for i := range seen {
					if i%sk%7 == 2 || i/sk == 5 {
						seen[i] = false
					}
				}
				g := backwardOf(t, be, c)
				if n == 1 {
					for x := range d {
						for j := 2; j < sk; j += 7 {
							floats(t, c.K)[j*d+x], floats(t, c.V)[j*d+x] = bad, bad
						}
						floats(t, c.Q)[5*d+x], floats(t, g.DO)[5*d+x] = bad, bad
					}
				}
				must.Do(t, be.Backward(t.Context(), g))
				results[n] = g
			}
			want, _ := results[0].Operands()
			got, _ := results[1].Operands()
			for i := range want[:3] {
				sameBits(t, fmt.Sprintf("hidden %v: %s", bad, want[i].Name), got[i].Tensor, want[i].Tensor)
			}
		}
	})
}
