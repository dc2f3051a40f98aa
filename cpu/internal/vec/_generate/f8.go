package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// elementF8 is not one of elements: AVX-512 converts rows first. To take one byte of 16 words out of a
// vector it needs two shuffles, and there was no such processor to measure what else would be faster.
var elementF8 = element{"F8", 1, 0, (*isa).readF8, splitF8, nil}

// halvesF8 turns words of 16 bits into float16. Bits 15 and 14 of a word are the sign of a number in e4m3fn and bits 13
// to 7 the rest of it, which has the value that they have in float16 times 2^8, exactly, also for subnormal numbers: the
// conversion of these takes no longer, while multiplying subnormal float32 does on many processors. NaN becomes NaN.
func halvesF8(words, t reg.Register) {
	VPAND(cHalfF8.mem(), words, words)
	VPADDW(words, words, t) // without its sign
	VPCMPEQW(cNaNF8.mem(), t, t)
	VPOR(t, words, words)
}

// readF8 is element.load.
func (a *isa) readF8(m, _ Mem, to reg.VecVirtual) {
	var words, t reg.Register = to.AsX(), a.vec().AsX()
	if a.wide() {
		words, t = to.AsY(), a.vec().AsY()
	}
	VPMOVSXBW(m, words)
	VPSLLW(Imm(7), words, words)
	halvesF8(words, t)
	VCVTPH2PS(words, to)
	VMULPS(cUpF8.mem(), to, to)
}

// readPairF8 reads two vectors at m that are 2^8 times smaller.
func (a *isa) readPairF8(m Mem, x []reg.VecVirtual) {
	VPMOVSXBW(m, x[1])
	VPSLLW(Imm(7), x[1], x[1])
	halvesF8(x[1], x[0])
	VCVTPH2PS(x[1].AsX(), x[0])
	VEXTRACTI128(Imm(1), x[1], x[1].AsX())
	VCVTPH2PS(x[1].AsX(), x[1])
}

func (a *isa) loadF8() {
	a.loadRows("F8", 1, func(src Mem, dst reg.VecVirtual) { a.readF8(src, Mem{}, dst) })
}

// splitF8 is element.split. It converts two elements of each row at once.
func splitF8(a *dotsKernel, w reg.VecVirtual, _ Mem) func(int) reg.VecVirtual {
	both := a.vec()
	return func(n int) reg.VecVirtual {
		x := a.vec()
		if n%2 == 0 {
			VPSHUFB((cSplitF8 + constant(n/2)).mem(), w, both)
			VPSRAW(Imm(1), both, both)
			halvesF8(both, x)
			VPERMQ(Imm(0xd8), both, both)
			VCVTPH2PS(both.AsX(), x)
		} else {
			VEXTRACTI128(Imm(1), both, x.AsX())
			VCVTPH2PS(x.AsX(), x)
		}
		VMULPS(cUpF8.mem(), x, x)
		return x
	}
}
