package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestSmallProblems compares the bits of small problems with those that the engine
// computes in tiles.
func TestSmallProblems(t *testing.T) { eachTier(t, testSmallProblems) }

func testSmallProblems(t *testing.T, tier string) {
	rng := rand.New(rand.NewPCG(11, 12))
	be, small := open(t, Options{Tier: tier, Threads: 2}), 0
	pick := func(of ...int) int { return of[rng.IntN(len(of))] }
	for n := range 600 {
		batch, kv, share := pick(1, 3, 40), pick(1, 2), pick(1, 1, 2)
		sq, sk, d, dv := pick(1, 1, 2, 4, 5), pick(1, 1, 2, 7, 8, 9, 16, 33, 64, 127, 128), pick(1, 8, 16, 24, 64), pick(1, 3, 8, 16, 40)
		values := func(heads, seq, dim int) backend.Tensor {
			x := random(t, rng.Uint64(), backend.Shape{batch, seq, heads, dim}) // heads of a row are adjacent
			data, err := x.Float32s()
			if err != nil {
				t.Fatal(err)
			}
			for i := range data {
				data[i] *= 8
				if n%3 == 0 && rng.IntN(30) == 0 {
					data[i] = float32([]float64{0, math.Copysign(0, -1), 1e-42, 3e38, math.Inf(1), math.Inf(-1), math.NaN()}[rng.IntN(7)])
				}
			}
			if x, err = x.Swap(backend.Heads, backend.Seq); err != nil {
				t.Fatal(err)
			}
			return x
		}
		c := backend.Call{Q: values(kv*share, sq, d), K: values(kv, sk, d), V: values(kv, sk, dv),
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
			size := pick(8, 16, 64) // the pool has more pages than the call, in a drawn order
			c.K, c.V = values(kv, sk+3*size, d), values(kv, sk+3*size, dv)
			paged(t, &c, size)
			c.Pages.Keys = sk
		}
		wanted := rng.IntN(2) == 0
		run := func(engine bool) (o, lse backend.Tensor) {
			c := c
			c.O = alloc(t, backend.Shape{batch, kv * share, sq, dv})
			if wanted {
				c.LSE = alloc(t, backend.Shape{batch, kv * share, sq, 1})
			}
			a, err := be.openAttention(&c, 2)
			if err != nil {
				t.Fatal(err)
			}
			defer a.release()
			if a.taskGroups > 0 {
				small++
			}
			if engine {
				a.partition = newPartition(be.kernels, &c, 2)
			}
			if err := be.workers.run(t.Context(), a, a.tasks, 2); err != nil {
				t.Fatal(err)
			}
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
	if vectors := !be.kernels.KeyLanes; vectors != (small > 600) {
		t.Errorf("%d of 1200 calls were of small problems", small)
	}
}

// paged puts the keys and values of c, of one batch, into pages in a drawn order.
func paged(tb testing.TB, c *backend.Call, size int) {
	tb.Helper()
	seq := c.K.Shape()[backend.Seq]
	order := rand.New(rand.NewPCG(7, 7)).Perm(ceilDiv(seq, size))
	be := open(tb, Options{})
	pool := func(from backend.Tensor) backend.Tensor {
		s := from.Shape()
		// A head's pages are adjacent, as in kvcache.Paged.
		to, err := backend.AllocHost(from.DType(), backend.Shape{s[backend.Heads], len(order), size, s[backend.Dim]})
		if err == nil {
			to, err = to.Swap(backend.Batch, backend.Heads)
		}
		if err != nil {
			tb.Fatal(err)
		}
		for i, p := range order {
			lo, hi := i*size, min((i+1)*size, seq)
			rows, err := from.Slice(backend.Seq, lo, hi)
			if err != nil {
				tb.Fatal(err)
			}
			page, err := to.Slice(backend.Batch, p, p+1)
			if err == nil {
				page, err = page.Slice(backend.Seq, 0, hi-lo)
			}
			if err == nil {
				err = be.Copy(tb.Context(), []backend.Tensor{page}, []backend.Tensor{rows})
			}
			if err != nil {
				tb.Fatal(err)
			}
		}
		return to
	}
	c.K, c.V = pool(c.K), pool(c.V)
	c.Pages = &backend.Pages{Table: [][]int32{make([]int32, len(order))}, Keys: seq}
	for i, p := range order {
		c.Pages.Table[0][i] = int32(p)
	}
}
