package cpu

import (
	"math"

	"github.com/x448/float16"
)

// f16ToF32 returns the number whose binary16 bits are h, exactly. The exponent
// and fraction move to their binary32 places, and a multiplication by 2^112
// corrects the exponent's bias, subnormals included; Inf and NaN keep an
// exponent of ones.
func f16ToF32(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	rest := uint32(h&0x7fff) << 13
	if rest >= 0x7c00<<13 {
		return math.Float32frombits(sign | rest | 0x7f800000)
	}
	return math.Float32frombits(math.Float32bits(math.Float32frombits(rest)*0x1p112) | sign)
}

// bf16ToF32 returns the number whose bfloat16 bits are h, exactly.
func bf16ToF32(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// f32ToF16 rounds x to binary16, to nearest even; NaN stays NaN.
func f32ToF16(x float32) uint16 { return float16.Fromfloat32(x).Bits() }

// f32ToBF16 rounds x to bfloat16, to nearest even; NaN stays NaN.
func f32ToBF16(x float32) uint16 {
	u := math.Float32bits(x)
	if u&0x7fffffff > 0x7f800000 {
		return uint16(u>>16) | 0x40 // quiet, so that the payload cannot round away to Inf
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}
