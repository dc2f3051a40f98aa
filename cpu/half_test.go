package cpu

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
)

// TestWeightsAreRounded compares the roundings of Options.LowPrecision with those of stored elements: numbers
// of each exponent that weights have, ties among them.
func TestWeightsAreRounded(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		be := open(t, Options{Tier: tier})
		for _, dtype := range []backend.DType{backend.F16, backend.BF16} {
			weights := make([]float32, 0, 128<<8)
			for exp := range uint32(128) { // up to 1.99
				for i := range uint32(256) {
					weights = append(weights, math.Float32frombits(exp<<23|i<<15|i&7<<12|i%3))
				}
			}
			want := make([]float32, len(weights))
			for i, w := range weights {
				want[i] = dtype.Round(w)
			}
			tile.Round(be.kernels, dtype, weights, make([]uint16, 256))
			for i, got := range weights {
				if got != want[i] {
					t.Fatalf("%v: weight %d is rounded to %v, should be %v", dtype, i, got, want[i])
				}
			}
		}
	})
}
