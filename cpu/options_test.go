package cpu

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestOneRowOfManyHeads shows that heads which share their keys have the bits of each alone.
func TestOneRowOfManyHeads(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		const heads, sk, dim = 17, 307, 16
		be := open(t, Options{Tier: tier})
		rows := func(seed uint64, cols int) backend.Tensor { return random(t, seed, backend.Shape{1, heads, 1, cols}) }
		q, k, v := rows(1, dim), random(t, 2, backend.Shape{1, 1, sk, dim}), random(t, 3, backend.Shape{1, 1, sk, dim})
		far := backend.Everything()
		far.Offset = 1 << 26
		slopes := func(first float32) (s []float32) {
			for range heads {
				s, first = append(s, first), first/2
			}
			return s
		}
		for n, p := range []backend.Problem{
			{Bias: rows(4, sk)},
			{Relative: rows(4, sk)},
			{Bias: rows(4, sk), Relative: rows(5, sk)},
			{Bias: rows(4, sk), Slopes: slopes(1)},
			{Mask: flags(t, 4, backend.Shape{1, heads, 1, sk})},
			{Slopes: slopes(1), Visible: backend.Visibility{Offset: 250, Left: 200, Right: 3}},
			{Slopes: slopes(-0x1p-20), Visible: far},
			{Slopes: slopes(0x1p120)},
		} {
			if p.Scale = 1; p.Visible.Offset == 0 {
				p.Visible = backend.Everything()
			}
			attend := func(from, to int) backend.Tensor {
				c := backend.Call{Q: q, K: k, V: v, Problem: p}
				for _, x := range []*backend.Tensor{&c.Q, &c.Bias, &c.Relative, &c.Mask} {
					if !x.IsZero() {
						*x = cut(t, *x, backend.Heads, from, to)
					}
				}
				if p.Slopes != nil {
					c.Slopes = p.Slopes[from:to]
				}
				return attended(t, be, c)
			}
			for _, together := range []int{8, 16, heads} {
				got := attend(0, together)
				for h := range together {
					sameBits(t, fmt.Sprintf("problem %d, head %d of %d", n, h, together), cut(t, got, backend.Heads, h, h+1), attend(h, h+1))
				}
			}
		}
	})
}

// drawOptions returns the nth of some calls of two heads, with a quarter of the options each, and a description of it.
func drawOptions(t *testing.T, rng *rand.Rand, n, sq, sk int) (say string, c backend.Call) {
	one := func(n ...int) int { return n[rng.IntN(len(n))] }
	const heads = 2
	c = backend.Call{Q: random(t, uint64(n), backend.Shape{1, heads, sq, 9}), K: random(t, 2, backend.Shape{1, 1, sk, 9}), V: random(t, 3, backend.Shape{1, 1, sk, 7}),
		Problem: backend.Problem{Scale: 0.7, Visible: backend.Everything()}}
	say = fmt.Sprintf("%d x %d", sq, sk)
	for _, o := range []struct {
		say string
		do  func()
	}{
		{"window", func() { c.Visible = backend.Visibility{Offset: sk - sq, Left: one(100, 300), Right: n % 7} }},
		{"softcap", func() { c.Softcap = 2 }},
		{"mask", func() {
			c.Mask = broadcast(t, flags(t, uint64(n), backend.Shape{1, 1, sq, sk}), backend.Shape{1, heads, sq, sk})
		}},
		{"mask of rows", func() {
			c.Mask = broadcast(t, flags(t, uint64(n), backend.Shape{1, heads, sq, 1}), backend.Shape{1, heads, sq, sk})
		}},
		{"bias", func() {
			x := random(t, uint64(n), backend.Shape{1, heads, sq, sk})
			c.Bias = typed(t, x, []backend.DType{backend.F32, backend.F16, backend.BF16}[n%3])
		}},
		{"slopes", func() { c.Slopes = []float32{0.3, 0.01} }},
		{"relative", func() {
			x := random(t, uint64(n), backend.Shape{1, heads, 1, sq + sk - 1})
			data := floats(t, x)
			data[rng.IntN(len(data))] = vec.NegInf
			c.Relative = typed(t, x, []backend.DType{backend.F32, backend.F16, backend.BF16}[n%3])
		}},
		{"blocks", func() {
			c.BlockQ, c.BlockK = one(1, 7, 16, 64, 100), one(1, 7, 16, 64, 100)
			c.Blocks = flags(t, uint64(n), backend.Shape{1, heads, tile.CeilDiv(sq, c.BlockQ), tile.CeilDiv(sk, c.BlockK)})
			seen := must.Get(c.Blocks.Bools())(t)
			for i := range seen { // three in four, or one
				seen[i] = seen[i] == (n%2 == 0)
			}
		}},
		{"sinks", func() { c.Sinks = []float32{1, -2} }},
		{"dropout", func() { c.Dropout = backend.Dropout{P: 0.4, Seed: 5, First: [4]int{1, 2, one(0, 3, 4), 7}} }},
	} {
		if rng.IntN(4) == 0 {
			say += ", " + o.say
			o.do()
		}
	}
	return say, c
}
