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

// TestSmallProblems compares the bits of small problems with those that the engine computes in tiles.
func TestSmallProblems(t *testing.T) { eachTier(t, testSmallProblems) }

func testSmallProblems(t *testing.T, tier string) {
	rng := rand.New(rand.NewPCG(11, 12))
	be, small := open(t, Options{Tier: tier, Threads: 2}), 0
	pick := func(of ...int) int { return of[rng.IntN(len(of))] }
	for n := range 600 {
		batch, kv, share := pick(1, 3, 40), pick(1, 2), pick(1, 1, 2)
		sq, sk, d, dv := pick(1, 1, 2, 4, 5), pick(1, 1, 2, 7, 8, 9, 16, 33, 64, 127, 128), pick(1, 8, 16, 24, 64), pick(1, 3, 8, 16, 40)
		values := func(batch, heads, seq, dim int) backend.Tensor {
			x := random(t, rng.Uint64(), backend.Shape{batch, seq, heads, dim}) // heads of a row are adjacent
			data := floats(t, x)
			for i := range data {
				data[i] *= 8
				if n%3 == 0 && rng.IntN(30) == 0 {
					data[i] = float32([]float64{0, math.Copysign(0, -1), 1e-42, 3e38, math.Inf(1), math.Inf(-1), math.NaN()}[rng.IntN(7)])
				}
			}
			x = swap(t, x, backend.Heads, backend.Seq)
			return x
		}
		c := backend.Call{Q: values(batch, kv*share, sq, d), K: values(batch, kv, sk, d), V: values(batch, kv, sk, dv),
			Problem: backend.Problem{Scale: []float32{0.125, 1, 1e-38}[rng.IntN(3)], Visible: backend.Everything()}}
		switch rng.IntN(4) {
		case 0:
			c.Visible = backend.Visibility{Left: backend.Unbounded, Offset: pick(-1, 0, sk-sq)}
		case 1:
			c.Visible = backend.Visibility{Left: pick(0, 5), Right: pick(0, 3), Offset: pick(0, sk-sq)}
		}
		if rng.IntN(3) == 0 {
			for range batch {
				c.Visible.KLen = append(c.Visible.KLen, rng.IntN(sk+1))
			}
		}
		if rng.IntN(3) == 0 {
			for range kv * share {
				c.Sinks = append(c.Sinks, rng.Float32())
			}
		}
		if batch == 1 && rng.IntN(2) == 0 {
			size := pick(8, 16, 64)
			pages := tile.CeilDiv(sk, size) + 3 // more than the call has
			c.K, c.V = values(pages, kv, size, d), values(pages, kv, size, dv)
			c.Pages = &backend.Pages{Table: [][]int32{nil}, Keys: sk}
			for _, page := range rng.Perm(pages) {
				c.Pages.Table[0] = append(c.Pages.Table[0], int32(page))
			}
		}
		wanted := rng.IntN(2) == 0
		run := func(engine bool) (o, lse backend.Tensor) {
			c := c
			c.O = alloc(t, backend.Shape{batch, kv * share, sq, dv})
			if wanted {
				c.LSE = alloc(t, backend.Shape{batch, kv * share, sq, 1})
			}
			a := must.Get(be.openAttention(&c, 2))(t)
			defer a.release()
			if a.partition.taskGroups > 0 {
				small++
			}
			if engine {
				a.partition = newPartition(be.kernels, &c, 2)
			}
			must.Do(t, sharedPool.Run(t.Context(), a, a.partition.floats, a.partition.tasks, 2))
			return c.O, c.LSE
		}
		o, lse := run(false)
		o2, lse2 := run(true)
		what := fmt.Sprintf("%d: q %v, k %v, v %v, %+v", n, c.Q.Shape(), c.K.Shape(), c.V.Shape(), c.Problem)
		sameBits(t, what, o, o2)
		if wanted {
			sameBits(t, what+", lse", lse, lse2)
		}
	}
	if vectors := !be.kernels.OnlyKeyLanes; vectors != (small > 600) {
		t.Errorf("%d of 1200 calls were of small problems", small)
	}
}
