package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/fit"
)

// softcap replaces vectors of x by c*tanh(x).
func (a *isa) softcap() {
	a.kernel("softcap")
	x, vectors := param("x"), param("vectors")
	if a.masks() {
		a.shortSoftcap(x, vectors)
		end()
		return
	}
	c, e := a.broadcastParam("c"), a.exponential(false)
	a.each(x, vectors, func(y reg.VecVirtual) reg.VecVirtual {
		size := a.vec()
		VANDPS(cAbs.mem(), y, size)
		// 1 - 2/(e^2|y| + 1), with y's sign. min returns its second operand, size,
		// when that is NaN.
		big := a.constant(cTen)
		VMINPS(size, big, big)
		VMULPS(c2Log2E.mem(), big, big)
		big = e.of(big)
		one := a.constant(cOne)
		VADDPS(one, big, big)
		two := a.constant(cTwo)
		VDIVPS(big, two, big)
		VSUBPS(big, one, big)
		sign := a.vec()
		VANDPS(cSign.mem(), y, sign)
		VORPS(sign, big, big)
		// y + y·z·q(z), z = y²
		z := a.vec()
		VMULPS(y, y, z)
		q := a.constant(cTanh0 + 5)
		for i := 4; i >= 0; i-- {
			VFMADD213PS((cTanh0 + constant(i)).mem(), z, q)
		}
		VMULPS(y, z, z)
		VFMADD213PS(y, z, q)
		VCMPPS(Imm(14), cSmall.mem(), size, size) // greater than
		VBLENDVPS(size, big, q, q)
		VMULPS(c, q, q)
		return q
	})
	end()
}

// shortSoftcap is softcap in fewer instructions, without branches for small x and for signs:
//
//	tanh(x) = e/(e + 2)    e = e^2x - 1 = 2^n·(2^f - 1) + (2^n - 1)    2x·log2 e = n + f, |f| <= 1/2
//
// For small x n is 0, and e has the relative error of its polynomial.
func (a *isa) shortSoftcap(x, vectors reg.GPVirtual) {
	c, coefficients := a.broadcastParam("c"), []reg.VecVirtual{}
	for i := range fit.Exp2Minus1 {
		coefficients = append(coefficients, a.constant(cExpm0+constant(i)))
	}
	one, two, ten, factor := a.constant(cOne), a.constant(cTwo), a.constant(cTen), a.constant(c2Log2E)
	a.each(x, vectors, func(y reg.VecVirtual) reg.VecVirtual {
		f, s, e := a.vec(), a.vec(), a.vec()
		VMINPS(y, ten, y) // the second operand, y, where that is NaN
		VMULPS(factor, y, y)
		VREDUCEPS(Imm(0), y, f)
		VSUBPS(f, y, y)
		VSCALEFPS(y, one, s)
		VMOVAPS(coefficients[len(coefficients)-1], e)
		for i := len(coefficients) - 2; i >= 0; i-- {
			VFMADD213PS(coefficients[i], f, e)
		}
		VMULPS(f, e, e)
		VSUBPS(one, s, y)
		VFMADD213PS(y, s, e)
		VADDPS(two, e, y)
		VDIVPS(y, e, e)
		VMULPS(c, e, e)
		return e
	})
}
