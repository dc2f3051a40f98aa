package vec

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestDrop compares dropout of tiles, of rows and of rows of many heads with the contract's generator.
func TestDrop(t *testing.T) {
	eachTier(t, func(t *testing.T, x, _ *Kernels, _ *rand.Rand) {
		for _, p := range []float32{0, 0.3, 0.75, 0.999} {
			want := backend.Dropout{P: p, Seed: 0xfedcba9876543210, First: [4]int{3, 1 << 20, 1 << 30, math.MaxInt32 - 50}}
			first := func(axis int) uint32 { return uint32(want.First[axis]) }
			of := func(row, key int) float32 {
				if want.Keeps(2, 5, row, key) {
					return want.Factor()
				}
				return 0
			}
			var d Draw
			d.Seed(want)
			const row0, key0, keys = 4 * 77, 9, 101 // beyond 2^31 and more
			if !x.OnlyKeyLanes {
				ones := filled((keys+3)*x.Width, 1)
				ones[0] = float32(math.NaN())
				d.Tile(x, first(backend.Batch)+2, first(backend.Heads)+5, first(backend.Seq)+row0)
				x.Drop(ones, keys, &d, first(backend.Dim)+key0)
				if ones[0] == ones[0] {
					t.Fatalf("%s: dropout of NaN is %v", x.Tier, ones[0])
				}
				for i, got := range ones[:keys*x.Width] {
					if y := of(row0+i%x.Width, key0+i/x.Width); got != y && i > 0 {
						t.Fatalf("%s, P = %v: row %d of key %d is multiplied by %v, should be by %v", x.Tier, p, i%x.Width, i/x.Width, got, y)
					}
				}
				for row := range 4 {
					ones = filled((keys+1)*x.Width, 1)
					d.Rows(x, first(backend.Batch)+2, first(backend.Heads)+5, first(backend.Seq)+uint32(row), x.Lanes)
					x.Drop(ones[x.Width-x.Lanes:], keys, &d, first(backend.Dim)+key0)
					for i, got := range ones[:keys*x.Width] {
						head, key, y := i%x.Width-x.Width+x.Lanes, i/x.Width, float32(1)
						if head >= 0 && !want.Keeps(2, 5+head, row, key0+key) {
							y = 0
						} else if head >= 0 {
							y = want.Factor()
						}
						if got != y {
							t.Fatalf("%s, P = %v: row %d of key %d, head %d, is multiplied by %v, should be by %v", x.Tier, p, row, key, head, got, y)
						}
					}
				}
			}
			for row := range 6 {
				line := filled(5*x.DropLanes(), 1)
				d.Rows(x, first(backend.Batch)+2, first(backend.Heads)+5, first(backend.Seq)+uint32(row), 1)
				x.Drop(line, len(line), &d, first(backend.Dim)+key0)
				for j, got := range line {
					if y := of(row, key0+j); got != y {
						t.Fatalf("%s, P = %v: key %d of row %d is multiplied by %v, should be by %v", x.Tier, p, j, row, got, y)
					}
				}
			}
		}
	})
}
