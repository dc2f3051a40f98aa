package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestPages compares the bits of calls over pages of any size with those of the same keys in
// one tensor: 2 to 40 query rows of a group, keys that end within a page, windows that begin
// within one, with options, in each type, and with values that are not finite.
func TestPages(t *testing.T) {
	skipWithRace(t)
	eachTier(t, testPages)
}

func testPages(t *testing.T, tier string) {
	rng, rounds := rand.New(rand.NewPCG(21, 22)), 400
	if testing.Short() {
		rounds = 200
	}
	one := func(n ...int) int { return n[rng.IntN(len(n))] }
	be, inPlace := open(t, Options{Tier: tier, Threads: 2}), 0
	for n := range rounds {
		sq, sk := 1+rng.IntN(20), one(1, 90, 127, 300, 301, 1040, 2100)
		say, c := drawOptions(t, rng, n, sq, sk)
		if n%4 == 1 {
			c.Visible = backend.Visibility{Offset: sk - sq, Left: rng.IntN(300), Right: one(0, 5)}
		}
		d, dv := one(12, 16, 64, 80), one(4, 16, 48, 96)
		size := one(1+rng.IntN(40), 16, 16, 32, 48, 64)
		dtype := []backend.DType{backend.F32, backend.F32, backend.F16, backend.BF16, backend.Q8}[rng.IntN(5)]
		c.Q = random(t, rng.Uint64(), backend.Shape{1, 2, sq, d})
		c.K = random(t, rng.Uint64(), backend.Shape{1, 1, sk, d})
		c.V = random(t, rng.Uint64(), backend.Shape{1, 1, sk, dv})
		if n%3 == 0 && dtype != backend.Q8 {
			values := floats(t, c.V)
			for range 3 { // half of them in the last row of a page
				row := min(sk-1, rng.IntN(tile.CeilDiv(sk, size))*size+one(size-1, rng.IntN(size)))
				values[row*dv+rng.IntN(dv)] = float32([]float64{math.Inf(1), math.NaN(), 3e38}[rng.IntN(3)])
			}
		}
		order := rng.Perm(tile.CeilDiv(sk, size) + 2)
		paged := c
		c.K, c.V = typed(t, c.K, dtype), typed(t, c.V, dtype)
		paged.K, paged.V = inPages(t, paged.K, size, order, dtype), inPages(t, paged.V, size, order, dtype)
		paged.Pages = &backend.Pages{Table: make([][]int32, 1), Keys: sk}
		for _, page := range order[:tile.CeilDiv(sk, size)] {
			paged.Pages.Table[0] = append(paged.Pages.Table[0], int32(page))
		}
		if l := newPartition(be.kernels, &paged, 2).layout; !l.KeyLanes && l.ReadK && l.ReadV {
			inPlace++
		}
		var out [2][2]backend.Tensor
		for i, c := range []*backend.Call{&c, &paged} {
			c.O, c.LSE = alloc(t, backend.Shape{1, 2, sq, dv}), alloc(t, backend.Shape{1, 2, sq, 1})
			must.Do(t, be.Attention(t.Context(), c))
			out[i] = [2]backend.Tensor{c.O, c.LSE}
		}
		say = fmt.Sprintf("%d: %s, head sizes %d and %d of %v, pages of %d, %+v", n, say, d, dv, dtype, size, c.Visible)
		sameBits(t, say, out[1][0], out[0][0])
		sameBits(t, say+", lse", out[1][1], out[0][1])
	}
	if vectors := !be.kernels.OnlyKeyLanes; vectors != (inPlace > rounds/10) {
		t.Errorf("%d of %d calls read pages in place with query rows as lanes", inPlace, rounds)
	}
}

// inPages returns the rows of x, of one head, as dtype in pages of size rows: page i at order[i].
// Other rows are NaN, as far as the type has it.
func inPages(t *testing.T, x backend.Tensor, size int, order []int, dtype backend.DType) backend.Tensor {
	shape := x.Shape()
	pool := alloc(t, backend.Shape{len(order), 1, size, shape[backend.Dim]})
	from := floats(t, x)
	to := floats(t, pool)
	if dtype != backend.Q8 {
		tile.Fill(to, float32(math.NaN()))
	}
	d := shape[backend.Dim]
	for s := range shape[backend.Seq] {
		copy(to[(order[s/size]*size+s%size)*d:][:d], from[s*d:])
	}
	return typed(t, pool, dtype)
}
