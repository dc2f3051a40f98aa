package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// rankOne computes o = alpha*o + p·x for rows of o, each with a number of alpha and one of p.
func (a *isa) rankOne() {
	a.kernel("rankOne")
	o, ldo, x, p, alpha, rows, vectors, ahead := param("o"), param("ldo"), param("x"), param("p"), param("alpha"), param("rows"), param("vectors"), param("ahead")
	op, xp := GP64(), GP64()
	loop("row", rows, 1, func() {
		w, factor := a.vec(), a.vec()
		VBROADCASTSS(Mem{Base: p}, w)
		VBROADCASTSS(Mem{Base: alpha}, factor)
		MOVQ(o, op)
		MOVQ(x, xp)
		byFour("vector", vectors, func(n int) {
			for i := 0; i < n*a.bytes(); i += 64 {
				PREFETCHT0(Mem{Base: op, Index: ahead, Scale: 1, Disp: i})
			}
			y := a.vecs(n)
			for u := range y {
				VMULPS(a.at(xp, u), w, y[u])
				VFMADD231PS(a.at(op, u), factor, y[u])
				VMOVUPS(y[u], a.at(op, u))
			}
			advance(n*a.bytes(), op, xp)
		})
		ADDQ(ldo, o)
		ADDQ(Imm(4), p)
		ADDQ(Imm(4), alpha)
	})
	end()
}

// productSum computes o = x·y + z.
func (a *isa) productSum() {
	a.kernel("productSum")
	o, x, y, z, vectors := param("o"), param("x"), param("y"), param("z"), param("vectors")
	byFour("vector", vectors, func(n int) {
		s, t := a.vecs(n), a.vecs(n)
		for u := range s {
			VMOVUPS(a.at(x, u), s[u])
			VMOVUPS(a.at(y, u), t[u])
			VFMADD213PS(a.at(z, u), s[u], t[u])
		}
		a.store(t, o)
		advance(n*a.bytes(), o, x, y, z)
	})
	end()
}

// silu replaces vectors of x by x/(1 + exp(-x)). With e = exp(-|x|) it is x/(1+e), times e where x is negative.
func (a *isa) silu() {
	a.kernel("silu")
	x, vectors := param("x"), param("vectors")
	restore := a.flush()
	e, one := a.exponential(a.masks()), a.constant(cOne)
	a.each(x, vectors, func(y reg.VecVirtual) reg.VecVirtual {
		negative, p, factor := a.constant(cSign), a.vec(), a.vec()
		VORPS(y, negative, negative)
		VMULPS(cLog2E.mem(), negative, p)
		p = e.of(p)
		VMOVAPS(one, factor)
		a.where(negative, y, p, factor)
		VADDPS(one, p, p)
		VMULPS(factor, y, y)
		VDIVPS(p, y, y)
		return y
	})
	restore()
	end()
}

// sumsFrom replaces columns of x by their sums less those up to row ref, in units of log2 e. It computes both sums twice
// rather than keep them.
func (a *isa) sumsFrom() {
	a.kernel("sumsFrom")
	x, minus, ld, at := param("x"), param("minus"), param("ld"), param("at")
	xp, mp, n, scale, sign, before, sums := GP64(), GP64(), GP64(), a.constant(cLongLog2E), a.constant(cSign), a.vecs(2), a.vecs(2)
	add := func(sums []reg.VecVirtual) { // the row at xp
		for i, sum := range sums {
			y := a.vec()
			VCVTPS2PD(Mem{Base: xp, Disp: i * a.bytes() / 2}, y)
			VADDPD(y, sum, sum)
		}
	}
	round := func(y reg.VecVirtual) reg.Register {
		if VMULPD(scale, y, y); a.wide() {
			VCVTPD2PS(y, a.lower(y))
		} else {
			VCVTPD2PSY(y, a.lower(y))
		}
		return a.lower(y)
	}
	loop("vector", argument("vectors"), 1, func() {
		MOVQ(x, xp)
		MOVQ(minus, mp)
		a.clear([][]reg.VecVirtual{before, sums})
		MOVQ(argument("ref"), n)
		INCQ(n)
		loop("before", n, 1, func() {
			add(before)
			ADDQ(ld, xp)
		})
		MOVQ(x, xp)
		MOVQ(argument("rows"), n)
		loop("row", n, 1, func() {
			add(sums)
			for i, sum := range sums {
				y, to := a.vec(), i*a.bytes()/2
				VSUBPD(before[i], sum, y)
				VMOVUPS(round(y), Mem{Base: xp, Disp: to})
				VXORPS(sign, y, y)
				VMOVUPS(a.lower(y), Mem{Base: mp, Disp: to})
			}
			ADDQ(ld, xp)
			ADDQ(ld, mp)
		})
		for i, y := range before {
			VMOVUPS(round(y), Mem{Base: at, Disp: i * a.bytes() / 2})
		}
		advance(a.bytes(), x, minus, at)
	})
	end()
}
