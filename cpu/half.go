package cpu

import "math"

// Loading is a call a number on the gonum path, so these are small enough to be
// compiled into their callers; what is stored is rounded by backend.DType.Encode.

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
