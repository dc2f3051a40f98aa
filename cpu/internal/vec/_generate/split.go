package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The functions named split are element.split.

func splitBF16(a *dotsKernel, w reg.VecVirtual, _ Mem) func(int) reg.VecVirtual {
	return func(n int) reg.VecVirtual {
		x := a.vec()
		if n == 0 {
			VPSLLD(Imm(16), w, x)
		} else if a.wide() {
			VPANDD(cUpper.mem(), w, x)
		} else {
			VPAND(cUpper.mem(), w, x)
		}
		return x
	}
}

func splitF16(a *dotsKernel, w reg.VecVirtual, _ Mem) func(int) reg.VecVirtual {
	// The conversion takes adjacent halves.
	if a.wide() {
		return func(n int) reg.VecVirtual {
			x := a.vec()
			if n == 1 {
				VPSRLD(Imm(16), w, w)
			}
			y := YMM()
			VPMOVDW(w, y)
			VCVTPH2PS(y, x)
			return x
		}
	}
	both := a.vec()
	return func(n int) reg.VecVirtual {
		x := a.vec()
		if n == 0 {
			low := a.vec()
			a.zero(low)
			VPBLENDW(Imm(0x55), w, low, low)
			VPSRLD(Imm(16), w, both)
			VPACKUSDW(both, low, both)
			VPERMQ(Imm(0xd8), both, both)
		} else {
			VPERMQ(Imm(0x4e), both, both)
		}
		VCVTPH2PS(both.AsX(), x)
		return x
	}
}

// splitF16Pairs is splitF16 for the words of two groups. The conversion takes the halves of
// both: the first vector has the elements of the first half of each group in turns, the
// second one has the others. inGroups restores the order.
func splitF16Pairs(a *dotsKernel, first, second reg.VecVirtual) []func(int) reg.VecVirtual {
	both := a.vec()
	convert := func(n int) reg.VecVirtual {
		other := first
		if n == 0 {
			VPSLLD(Imm(16), second, both)
		} else {
			other = second
			VPSRLD(Imm(16), first, both)
		}
		x := a.vec()
		if a.wide() {
			VPTERNLOGD(U8([]uint8{0xe4, 0xd8}[n]), cUpper.mem(), other, both) // other in the lower halves; n=1: in the upper ones
			VCVTPH2PS(both.AsY(), x)
		} else {
			VPBLENDW(Imm([]uint64{0x55, 0xaa}[n]), other, both, both)
			VCVTPH2PS(both.AsX(), x)
		}
		return x
	}
	rest := func(int) reg.VecVirtual {
		x := a.vec()
		if a.wide() {
			y := YMM()
			VEXTRACTI64X4(Imm(1), both, y)
			VCVTPH2PS(y, x)
		} else {
			y := XMM()
			VEXTRACTI128(Imm(1), both, y)
			VCVTPH2PS(y, x)
		}
		return x
	}
	return []func(int) reg.VecVirtual{convert, rest}
}

// inGroups returns the elements at even and at odd places of x and y.
func (a *isa) inGroups(x, y reg.VecVirtual) (even, odd reg.VecVirtual) {
	out := a.vecs(2)
	for i, take := range []U8{0x88, 0xdd} {
		VSHUFPS(take, y, x, out[i])
		VPERMPD(U8(0xd8), out[i], out[i])
		if a.wide() {
			VSHUFF64X2(U8(0xd8), out[i], out[i], out[i])
		}
	}
	return out[0], out[1]
}

// splitQ8 converts bytes without shifting each of them. In the last bits of the fraction
// of 2^23 + 128, a byte with its sign bit inverted adds the integer, and so does the second
// byte of a word in 2^15 + 128. AVX2, which lacks VPTERNLOGD, converts the integer times
// 2^24 where scaleDown has divided the scales by that.
func splitQ8(a *dotsKernel, w reg.VecVirtual, scale Mem) func(int) reg.VecVirtual {
	return func(n int) reg.VecVirtual {
		x := a.vec()
		if n == 2 && !a.scaledDown {
			VPSRLD(Imm(16), w, w)
		}
		switch {
		case a.scaledDown:
			VPSHUFB((cToTop + constant(n)).mem(), w, x)
			VCVTDQ2PS(x, x)
		case a.wide():
			VMOVAPS(a.byteMask[n%2], x)
			VPTERNLOGD(U8(0x6a), a.biased[n%2], w, x) // (x & w) ^ biased
			VSUBPS(a.biased[n%2], x, x)
		default:
			biased := (cBiased0 + constant(n%2)).mem()
			VPAND((cByte0 + constant(n%2)).mem(), w, x)
			VPXOR(biased, x, x)
			VSUBPS(biased, x, x)
		}
		VMULPS(scale, x, x)
		return x
	}
}

// scaleDown divides the vector at scales by 2^24. It jumps to inexact if that rounds any.
func (d *dotsKernel) scaleDown(scales Mem, inexact string) {
	s, size, positive := d.vec(), d.vec(), d.vec()
	VMOVUPS(scales, s)
	VPAND(cAbs.mem(), s, size)
	VMULPS(cDown.mem(), s, s)
	VMOVUPS(s, scales)
	d.zero(positive)
	VPCMPGTD(positive, size, positive)
	VMOVUPS(cTiny.mem(), s)
	VPCMPGTD(size, s, s)
	VPAND(positive, s, s)
	lanes := GP32()
	VMOVMSKPS(s, lanes)
	TESTL(lanes, lanes)
	JNZ(LabelRef(inexact))
}
