package cpu

import (
	"math"
	"testing"

	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
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
		x := vec.BF16ToF32(h)
		if math.Float32bits(x) != uint32(h)<<16 {
			t.Fatalf("bf16 %#04x is %g", h, x)
		}
		if back := backend.BF16.Encode(x); x == x && back != h {
			t.Fatalf("bf16 %#04x came back as %#04x", h, back)
		}
	}
}

// TestHalfStores shows rounding to nearest even, and that NaN stays NaN.
func TestHalfStores(t *testing.T) {
	for _, c := range []struct {
		say       string
		x         float32
		f16, bf16 uint16
	}{
		{"a tie goes down to even", 1 + 0x1p-11, 0x3c00, 0x3f80},
		{"a tie goes up to even", 1 + 3*0x1p-11, 0x3c02, 0x3f80},
		{"bf16 tie down", 1 + 0x1p-8, 0x3c04, 0x3f80},
		{"bf16 tie up", 1 + 3*0x1p-8, 0x3c0c, 0x3f82},
		{"just above a tie", 1 + 0x1p-8 + 0x1p-20, 0x3c04, 0x3f81},
		{"too large", 3e38, 0x7c00, 0x7f62},
		{"largest finite rounds to Inf in bf16", math.MaxFloat32, 0x7c00, 0x7f80},
		{"-Inf", float32(math.Inf(-1)), 0xfc00, 0xff80},
		{"smallest f16", 0x1p-24, 1, 0x3380},
		{"negative zero", float32(math.Copysign(0, -1)), 0x8000, 0x8000},
	} {
		if got := backend.F16.Encode(c.x); got != c.f16 {
			t.Errorf("%s: f16 of %g is %#04x, want %#04x", c.say, c.x, got, c.f16)
		}
		if got := backend.BF16.Encode(c.x); got != c.bf16 {
			t.Errorf("%s: bf16 of %g is %#04x, want %#04x", c.say, c.x, got, c.bf16)
		}
	}
	for _, u := range []uint32{0x7f800001, 0x7fc00000, 0xffffffff, 0x7fffffff} {
		x := math.Float32frombits(u)
		if f := vec.F16ToF32(backend.F16.Encode(x)); f == f {
			t.Errorf("NaN %#x became f16 %g", u, f)
		}
		if f := vec.BF16ToF32(backend.BF16.Encode(x)); f == f {
			t.Errorf("NaN %#x became bf16 %g", u, f)
		}
	}
}
