package cpu

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
)

// TestError shows that the relative L2 error against float64 is below 1e-6, with heads that are wider than those of the
// conformance suite, and that it does not grow with the number of keys: 64 times the keys leave it within a factor of 4.
// The conformance suite bounds every element; this is the property that summing each key block from zero buys.
func TestError(t *testing.T) {
	skipWithRace(t)
	eachTier(t, func(t *testing.T, tier string) {
		be := open(t, Options{Tier: tier, Threads: 2})
		var first float64
		for n, c := range []struct{ heads, rows, keys, d, dv int }{
			{1, 8, 1024, 64, 64}, {1, 8, 8192, 64, 64}, {1, 8, 65536, 64, 64}, // in this order
			{2, 13, 2049, 7, 9}, {16, 1, 260, 576, 512}, {16, 5, 260, 576, 512}, {2, 1, 300, 1100, 1030}, {2, 70, 300, 1100, 1030},
		} {
			if c.keys > 10000 && (testing.Short() || be.kernels.OnlyKeyLanes) {
				continue // takes too long
			}
			kv := random(t, 2, backend.Shape{1, 1, c.keys, c.d + c.dv})
			x := backend.Call{Q: random(t, 1, backend.Shape{1, c.heads, c.rows, c.d}), K: cut(t, kv, backend.Dim, 0, c.d), V: cut(t, kv, backend.Dim, c.d, c.d+c.dv),
				Problem: backend.Problem{Scale: min(0.5, 32/float32(c.d)), Visible: backend.Everything()}}
			o := floats(t, attended(t, be, x))
			off, size := 0.0, 0.0
			for r := range c.heads * c.rows {
				row := oracle.Row{Q: floats(t, x.Q)[r*c.d:][:c.d], Dv: c.dv, Scale: x.Scale}
				for j := range c.keys {
					k := floats(t, kv)[j*(c.d+c.dv):]
					row.K, row.V = append(row.K, k[:c.d]...), append(row.V, k[c.d:][:c.dv]...)
				}
				for i, want := range oracle.Solve(row).O {
					off += math.Pow(float64(o[r*c.dv+i])-want, 2)
					size += want * want
				}
			}
			e := math.Sqrt(off / size)
			if n == 0 {
				first = e
			}
			if !(e <= 1e-6) || n < 3 && e > 4*first {
				t.Errorf("%+v: relative L2 error is %.2g, with 1,024 keys %.2g", c, e, first)
			}
		}
	})
}
