package cpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// backwardOf returns a request for gradients of c, with random DO and DLSE, after a forward call on be.
func backwardOf(t testing.TB, be *Backend, c backend.Call) *backend.Gradients {
	t.Helper()
	d := c.Dims()
	c.O, c.LSE = alloc(t, c.O.Shape()), alloc(t, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1})
	must.Do(t, be.Attention(t.Context(), &c))
	return &backend.Gradients{Call: c, DO: random(t, 20, c.O.Shape()), DLSE: random(t, 21, c.LSE.Shape()),
		DQ: random(t, 22, c.Q.Shape()), DK: random(t, 23, c.K.Shape()), DV: random(t, 24, c.V.Shape())}
}

// everyGradient returns a request for all gradients of a call with most options, over more than one chunk of keys.
func everyGradient(t testing.TB, be *Backend) *backend.Gradients {
	t.Helper()
	const b, h, hkv, sq, sk, d, dv = 2, 4, 2, 70, 1100, 24, 21
	g := backwardOf(t, be, withO(t, backend.Call{Q: random(t, 1, backend.Shape{b, h, sq, d}), K: random(t, 2, backend.Shape{b, hkv, sk, d}), V: random(t, 3, backend.Shape{b, hkv, sk, dv}),
		Problem: everyOption(t, b, h, sq, sk, backend.Visibility{Offset: 600, Left: 900, Right: 70, KLen: []int{sk, 650}})}))
	g.DBias, g.DRelative = alloc(t, backend.Shape{b, h, 1, sk}), alloc(t, backend.Shape{b, 1, 1, sq + sk - 1})
	g.DSlopes, g.DSinks = alloc(t, backend.Shape{b, h, 1, 1}), alloc(t, backend.Shape{1, h, 1, 1})
	return g
}

// TestBackwardThreads shows that gradients have the same bits on any number of threads, with biases of every shape, where
// tasks that run at the same time add to one element, and without gradients of operands.
func TestBackwardThreads(t *testing.T) {
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
			var want [7]backend.Operand
			for n, threads := range []int{1, 2, 3, 7} {
				be, x := open(t, Options{Tier: tier, Threads: threads}), *g
				x.DBias = alloc(t, of)
				for _, to := range []*backend.Tensor{&x.DQ, &x.DK, &x.DV, &x.DRelative, &x.DSlopes, &x.DSinks} {
					*to = alloc(t, to.Shape())
				}
				if n == 3 {
					x.DQ, x.DK, x.DV = backend.Tensor{}, backend.Tensor{}, backend.Tensor{}
				}
				must.Do(t, be.Backward(t.Context(), &x))
				got, _ := x.Operands()
				if n == 0 {
					want = got
				}
				for i, o := range got {
					if !o.Tensor.IsZero() {
						sameBits(t, fmt.Sprintf("bias %v, %d threads: %s", of, threads, o.Name), o.Tensor, want[i].Tensor)
					}
				}
			}
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

// TestBackwardHidden shows that the contents of hidden keys and of fully masked rows reach no
// gradient, NaN and Inf included.
func TestBackwardHidden(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		be := open(t, Options{Tier: tier})
		const sq, sk, d = 70, 300, 16
		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), math.MaxFloat32} {
			var results [2][7]backend.Operand
			for n := range results {
				c := withO(t, backend.Call{Q: random(t, 1, backend.Shape{1, 2, sq, d}), K: random(t, 2, backend.Shape{1, 1, sk, d}), V: random(t, 3, backend.Shape{1, 1, sk, d}),
					Problem: backend.Problem{Scale: 0.3, Softcap: 3, Visible: backend.Everything(), Mask: flags(t, 4, backend.Shape{1, 2, sq, sk})}})
				seen := must.Get(c.Mask.Bools())(t)
				for i := range seen {
					seen[i] = seen[i] && i%sk%7 != 2 && i/sk != 5
				}
				g := backwardOf(t, be, c)
				for j := 2; n == 1 && j < sk; j += 7 {
					tile.Fill(floats(t, c.K)[j*d:][:d], bad)
					tile.Fill(floats(t, c.V)[j*d:][:d], bad)
					tile.Fill(floats(t, c.Q)[5*d:][:d], bad)
					tile.Fill(floats(t, g.DO)[5*d:][:d], bad)
				}
				must.Do(t, be.Backward(t.Context(), g))
				results[n], _ = g.Operands()
			}
			for i, want := range results[0][:3] {
				sameBits(t, fmt.Sprintf("hidden %v: %s", bad, want.Name), results[1][i].Tensor, want.Tensor)
			}
		}
	})
}
