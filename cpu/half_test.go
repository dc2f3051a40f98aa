package cpu

import (
	"math"
	"testing"

	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// TestHalfLoads compares every 16-bit pattern with an independent conversion.
func TestHalfLoads(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		got, want := vec.F16ToF32(h), float16.Frombits(h).Float32()
		if got != want && (got == got || want == want) || math.Signbit(float64(got)) != math.Signbit(float64(want)) {
			t.Fatalf("f16 %#04x is %g, want %g", h, got, want)
		}
		if back := backend.F16.Encode(got); got == got && back != h {
			t.Fatalf("f16 %#04x came back as %#04x", h, back)
		}
		if x := vec.BF16ToF32(h); x == x && backend.BF16.Encode(x) != h {
			t.Fatalf("bf16 %#04x came back as %#04x", h, backend.BF16.Encode(x))
		}
	}
}

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
