package cpu

import (
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// rowsAlone fails unless the rows that compute writes to a tensor with rows [from, to) have
// the bits of each row alone, and no zero of them is negative.
func rowsAlone(t *testing.T, what string, rows, cols int, compute func(from, to int, o backend.Tensor) error) {
	t.Helper()
	run := func(from, to int) []float32 {
		o := alloc(t, backend.Shape{1, 1, to - from, cols})
		must.Do(t, compute(from, to, o))
		return rowsOfHead(t, o, 0, 0, to-from)
	}
	zeros, all := 0, run(0, rows)
	for i := range rows {
		for c, y := range run(i, i+1) {
			x := all[i*cols+c]
			if math.Float32bits(x) != math.Float32bits(y) || x == 0 && math.Signbit(float64(x)) {
				t.Fatalf("%s: element %d of row %d of %d is %v (bits %#x), alone it is %v (bits %#x)",
					what, c, i, rows, x, math.Float32bits(x), y, math.Float32bits(y))
			}
			if x == 0 {
				zeros++
			}
		}
	}
	if zeros == 0 || zeros == len(all) {
		t.Fatalf("%s: %d of %d elements are 0, so nothing underflows", what, zeros, len(all))
	}
}

// TestNoNegativeZeros shows that outputs that underflow have the bits of each row alone, and
// that none is a negative zero.
func TestNoNegativeZeros(t *testing.T) { eachTier(t, testNoNegativeZeros) }

func testNoNegativeZeros(t *testing.T, tier string) {
	const d = 16
	for _, c := range []struct {
		dtype backend.DType
		unit  float32 // of values
		keys  int
		dv    int
		sink  float32 // scales outputs down
		left  int
	}{
		{backend.F32, 3e-45, 300, 32, vec.NegInf, backend.Unbounded},
		{backend.F32, 3e-45, 40, 20, vec.NegInf, backend.Unbounded},
		{backend.F32, 3e-45, 300, 20, vec.NegInf, 30},
		{backend.F32, 2e-44, 2*tile.SumKeys + 5, 32, vec.NegInf, backend.Unbounded}, // divided for several threads
		{backend.F32, 1e-43, ShardKeys + 140, 20, vec.NegInf, backend.Unbounded},    // merged
		{backend.BF16, 1e-40, 300, 32, 16, backend.Unbounded},
		{backend.F16, 1e-7, 300, 20, 91, backend.Unbounded},
		{backend.Q8, 1e-36, 300, 32, 26, backend.Unbounded},
	} {
		k := typed(t, random(t, 2, backend.Shape{1, 1, c.keys, d}), c.dtype)
		v := typed(t, signed(t, 3, backend.Shape{1, 1, c.keys, c.dv}, c.unit), c.dtype)
		for _, rows := range []int{1, 2, 4, 8, 16, 33, 64, 100} {
			threads := 1
			if c.keys > tile.SumKeys {
				if threads = 7; rows != 33 {
					continue
				}
			}
			be, q := open(t, Options{Tier: tier, Threads: threads}), random(t, 1, backend.Shape{1, 1, rows, d})
			p := backend.Problem{Scale: 1, Visible: backend.Visibility{Left: c.left, Offset: c.keys - rows}}
			if c.sink != vec.NegInf {
				p.Sinks = []float32{c.sink}
			}
			rowsAlone(t, fmt.Sprintf("%v, %d keys, head size %d", c.dtype, c.keys, c.dv), rows, c.dv, func(from, to int, o backend.Tensor) error {
				call := backend.Call{Q: cut(t, q, backend.Seq, from, to), K: k, V: v, O: o, Problem: p}
				call.Visible.Offset += from
				return be.Attention(t.Context(), &call)
			})
		}
	}
}

// TestNoNegativeZerosOfProducts is the same for QK, PV and Project.
func TestNoNegativeZerosOfProducts(t *testing.T) { eachTier(t, testNoNegativeZerosOfProducts) }

func testNoNegativeZerosOfProducts(t *testing.T, tier string) {
	const n, d = 150, 16
	be, ctx := open(t, Options{Tier: tier, Threads: 1}), t.Context()
	k, v := signed(t, 2, backend.Shape{1, 1, n, d}, 1e-23), signed(t, 3, backend.Shape{1, 1, n, 24}, 1e-24)
	bias := signed(t, 4, backend.Shape{1, 1, 1, 24}, float32(math.Copysign(0, -1)))
	for _, rows := range []int{1, 2, 4, 8, 16, 33, 64, 100} {
		q, w := signed(t, 1, backend.Shape{1, 1, rows, d}, 1e-23), signed(t, 5, backend.Shape{1, 1, rows, n}, 1e-22)
		rowsAlone(t, "qk", rows, n, func(from, to int, o backend.Tensor) error {
			return be.QK(ctx, o, cut(t, q, backend.Seq, from, to), k)
		})
		rowsAlone(t, "pv", rows, 24, func(from, to int, o backend.Tensor) error {
			return be.PV(ctx, o, cut(t, w, backend.Seq, from, to), v)
		})
		rowsAlone(t, "project", rows, 24, func(from, to int, o backend.Tensor) error {
			return be.Project(ctx, o, cut(t, w, backend.Seq, from, to), v, bias)
		})
	}
}
