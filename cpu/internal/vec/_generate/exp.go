package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

const degree = 6

// exponential holds the polynomial's coefficients, in registers if there are enough.
type exponential struct {
	*isa
	c []Op
}

func (a *isa) exponential(inRegisters bool) exponential {
	e := exponential{a, make([]Op, degree+1)}
	for i := range e.c {
		m := (cExp0 + constant(i)).mem()
		e.c[i] = m
		if inRegisters {
			r := a.vec()
			VMOVUPS(m, r)
			e.c[i] = r
		}
	}
	return e
}

// of returns 2^y and overwrites y. With n = floor(y) and f = y-n,
//
//	2^y = 2^n · (1 + f·(c1 + f·(... + f·c6)))
//
// Below -126 the result is 0: on AVX-512 VSCALEFPS flushes it (which flush turns on), on
// AVX2 the factor 2^n is 0 for n = -127, the least one. NaN stays NaN.
func (e exponential) of(y reg.VecVirtual) reg.VecVirtual { return e.all(y)[0] }

// all returns 2^y for each of y, which it overwrites. They share what is loaded.
func (e exponential) all(y ...reg.VecVirtual) []reg.VecVirtual {
	r := e.vecs(len(y))
	if e.masks() {
		f := e.vecs(len(y))
		for i := range y {
			VREDUCEPS(Imm(1), y[i], f[i])
		}
		e.polynomials(f, r)
		for i := range y {
			VSCALEFPS(y[i], r[i], r[i])
		}
		return r
	}
	n := e.vecs(len(y))
	for i := range y {
		VMOVUPS(cLeast.mem(), n[i])
		VMAXPS(y[i], n[i], y[i]) // y where that is NaN
		VROUNDPS(Imm(1|8), y[i], n[i])
		VSUBPS(n[i], y[i], y[i])
	}
	e.polynomials(y, r)
	for i := range y {
		VADDPS(cBiased.mem(), n[i], n[i]) // n + 127 in the last bits
		VPSLLD(Imm(23), n[i], n[i])
		VMULPS(n[i], r[i], r[i])
	}
	return r
}

// polynomials computes r from each of f. It loads each coefficient once.
func (e exponential) polynomials(f, r []reg.VecVirtual) {
	for i := range f {
		VMOVUPS(e.c[degree], r[i])
	}
	for n := degree - 1; n >= 0; n-- {
		c := e.c[n]
		if _, load := c.(Mem); load && len(f) > 1 {
			c = e.vec()
			VMOVUPS(e.c[n], c)
		}
		for i := range f {
			VFMADD213PS(c, f[i], r[i])
		}
	}
}

// flush makes results below 2^-126 zero until restore; AVX2 does not need it.
func (a *isa) flush() (restore func()) {
	if !a.masks() {
		return func() {}
	}
	old, on := AllocLocal(4), AllocLocal(4)
	r := GP32()
	STMXCSR(old)
	MOVL(old, r)
	ORL(U32(0x8000), r)
	MOVL(r, on)
	LDMXCSR(on)
	return func() { LDMXCSR(old) }
}

// weights turns a score tile into weights.
func (a *isa) weights() {
	a.kernel("weights")
	a.weightsTo(param("s"), func(s reg.GPVirtual, p []reg.VecVirtual, j int) {
		for u := range p {
			VMOVUPS(p[u], a.at(s, u*a.cols+j))
		}
	})
}

// weightsTo computes weights of four rows and vector j, which store stores before it returns, for
// each vector and all rows.
func (a *isa) weightsTo(s reg.GPVirtual, store func(s reg.GPVirtual, p []reg.VecVirtual, j int)) {
	fours, pm, mx, l, alpha := param("fours"), param("m"), param("mx"), param("l"), param("alpha")
	restore := a.flush()
	e := a.exponential(a.masks())
	sum := a.vecs(a.cols)
	m := make([]Op, a.cols)
	for j := range m {
		old, new := a.vec(), a.vec()
		VMOVUPS(a.at(pm, j), old)
		VMOVUPS(a.at(mx, j), new)
		VSUBPS(new, old, old)
		VMOVUPS(new, a.at(pm, j))
		VMOVUPS(e.of(old), a.at(alpha, j))
		m[j] = a.at(mx, j)
		if a.masks() {
			m[j] = new
			a.zero(sum[j])
		}
	}
	four := func(j int, m, sum Op) {
		y := a.vecs(4)
		for u := range y {
			VMOVUPS(a.at(s, u*a.cols+j), y[u])
			VSUBPS(m, y[u], y[u])
		}
		p := e.all(y...)
		store(s, p, j)
		VADDPS(p[1], p[0], p[0])
		VADDPS(p[3], p[2], p[2])
		VADDPS(p[2], p[0], p[0])
		VADDPS(p[0], sum, sum)
	}
	total := func(j int) {
		x := a.vec()
		VMOVUPS(a.at(alpha, j), x)
		VMULPS(a.at(l, j), x, x)
		VADDPS(sum[j], x, x)
		VMOVUPS(x, a.at(l, j))
	}
	if a.masks() {
		loop("row", fours, 1, func() {
			for j := range m {
				four(j, m[j], sum[j])
			}
			ADDQ(U32(uint32(4*a.rowBytes())), s)
		})
		for j := range m {
			total(j)
		}
	} else { // the exponentials of a column at a time fill the registers
		left, first := GP64(), GP64()
		MOVQ(s, first)
		for j := range m {
			MOVQ(fours, left)
			MOVQ(first, s)
			x := a.vec()
			VMOVUPS(m[j], x)
			a.zero(sum[j])
			loop(fmt.Sprintf("column%d", j), left, 1, func() {
				four(j, x, sum[j])
				ADDQ(U32(uint32(4*a.rowBytes())), s)
			})
			total(j)
		}
	}
	restore()
	end()
}

// exp2 replaces vectors of x by 2^(x-m).
func (a *isa) exp2() {
	a.kernel("exp2")
	x, vectors := param("x"), param("vectors")
	restore := a.flush()
	m, e := a.broadcastParam("m"), a.exponential(a.masks())
	a.each(x, vectors, func(y reg.VecVirtual) reg.VecVirtual {
		VSUBPS(m, y, y)
		return e.of(y)
	})
	restore()
	end()
}

// bias adds log2(e)·b to vectors of x; where b is -Inf the result is -Inf.
func (a *isa) bias() {
	a.kernel("bias")
	x, b, vectors := param("x"), param("b"), param("vectors")
	scale := a.constant(cLog2E)
	loop("next", vectors, 1, func() {
		y, s := a.vec(), a.vec()
		VMOVUPS(a.at(b, 0), y)
		VMOVUPS(a.at(x, 0), s)
		a.addBias(s, y, scale)
		VMOVUPS(s, a.at(x, 0))
		advance(a.bytes(), x, b)
	})
	end()
}

// addBias computes s += scale·y, with finite y bounded to ±2^127, or s = y where y is
// infinite.
func (a *isa) addBias(s, y, scale reg.VecVirtual) { a.addBounded(s, y, a.bounded(y), scale) }

// addBounded computes s += scale·bounded, or s = y where y is infinite.
func (a *isa) addBounded(s, y, bounded, scale reg.VecVirtual) {
	VFMADD231PS(scale, bounded, s)
	size := a.vec()
	VANDPS(cAbs.mem(), y, size)
	a.where(size, cInf.mem(), y, s)
}

// bounded returns y bounded to ±2^127; NaN stays NaN.
func (a *isa) bounded(y reg.VecVirtual) reg.VecVirtual {
	low := a.constant(cLow)
	VMAXPS(y, low, low) // returns the second operand, y, where that is NaN
	b := a.constant(cHigh)
	VMINPS(low, b, b)
	return b
}

// where replaces s by y where x equals the vector m.
func (a *isa) where(x reg.VecVirtual, m Op, y, s reg.VecVirtual) {
	if a.masks() {
		k := K()
		VCMPPS(Imm(0), m, x, k)
		VMOVAPS(y, k, s)
		return
	}
	is := a.vec()
	VCMPPS(Imm(0), m, x, is)
	VBLENDVPS(is, y, s, s)
}

// bound clamps finite elements of vectors of x to ±limit.
func (a *isa) bound() {
	a.kernel("bound")
	x, vectors := param("x"), param("vectors")
	within := a.limit()
	a.each(x, vectors, func(y reg.VecVirtual) reg.VecVirtual {
		size := a.vec()
		z := within(y)
		VANDPS(cAbs.mem(), y, size)
		a.where(size, cInf.mem(), y, z)
		return z
	})
	end()
}

// limit returns a function that returns y bounded to ±limit, a parameter; NaN stays NaN.
func (a *isa) limit() func(y reg.VecVirtual) reg.VecVirtual {
	high, low := a.broadcastParam("limit"), a.vec()
	a.zero(low)
	VSUBPS(high, low, low)
	return func(y reg.VecVirtual) reg.VecVirtual {
		z := a.vec()
		VMAXPS(y, low, z) // the second operand, y, where that is NaN
		VMINPS(z, high, z)
		return z
	}
}

// join adds vectors of b, which are bounded, to those of x, which it bounds before and
// after. Infinite elements win over finite ones, and -Inf over +Inf.
func (a *isa) join() {
	a.kernel("join")
	x, b, vectors := param("x"), param("b"), param("vectors")
	loop("next", vectors, 1, func() {
		y, z := a.vec(), a.vec()
		VMOVUPS(a.at(x, 0), y)
		VMOVUPS(a.at(b, 0), z)
		VMOVUPS(a.joined(y, z, z), a.at(x, 0))
		advance(a.bytes(), x, b)
	})
	end()
}

// joined returns the sum of the biases y and z; bounded is z where that is finite.
func (a *isa) joined(y, z, bounded reg.VecVirtual) reg.VecVirtual {
	sum := a.bounded(y)
	VADDPS(bounded, sum, sum)
	sum = a.bounded(sum)
	for _, v := range []reg.VecVirtual{z, y} {
		size := a.vec()
		VANDPS(cAbs.mem(), v, size)
		a.where(size, cInf.mem(), v, sum)
	}
	a.where(z, cNegInf.mem(), z, sum)
	return sum
}

// scaleMax multiplies vectors of x by c and writes the largest product to mx, which has
// room for a vector.
func (a *isa) scaleMax() {
	a.kernel("scaleMax")
	x, vectors, mx := param("x"), param("vectors"), param("mx")
	c, m := a.broadcastParam("c"), a.constant(cNegInf)
	loop("next", vectors, 1, func() {
		y := a.vec()
		VMULPS(a.at(x, 0), c, y)
		VMOVUPS(y, a.at(x, 0))
		VMAXPS(m, y, m) // m where y is NaN
		ADDQ(U32(uint32(a.bytes())), x)
	})
	quarter := a.largestLane(m) // none is NaN
	VMOVSS(quarter, Mem{Base: mx})
	end()
}

// exp2Sum replaces vectors of x by 2^(x-m) and adds them to sum, lane by lane.
func (a *isa) exp2Sum() {
	a.kernel("exp2Sum")
	x, vectors, sum := param("x"), param("vectors"), param("sum")
	restore := a.flush()
	m, e, s := a.broadcastParam("m"), a.exponential(a.wide()), a.vec()
	VMOVUPS(a.at(sum, 0), s)
	a.each(x, vectors, func(y reg.VecVirtual) reg.VecVirtual {
		VSUBPS(m, y, y)
		p := e.of(y)
		VADDPS(p, s, s)
		return p
	})
	VMOVUPS(s, a.at(sum, 0))
	restore()
	end()
}

// largestLane returns the largest element of m in the first element of a register. None of
// them is NaN.
func (a *isa) largestLane(m reg.VecVirtual) reg.Register {
	half := m
	if a.wide() {
		half = YMM()
		VEXTRACTF32X8(Imm(1), m, half)
		VMAXPS(m.AsY(), half, half)
	}
	quarter, other := half.AsX(), XMM()
	VEXTRACTF128(Imm(1), half, other)
	VMAXPS(other, quarter, quarter)
	VPERMILPS(Imm(0x4e), quarter, other) // elements 2, 3, 0, 1
	VMAXPS(other, quarter, quarter)
	VPERMILPS(Imm(0xb1), quarter, other) // elements 1, 0, 3, 2
	VMAXPS(other, quarter, quarter)
	return quarter
}

// rowWeights is weights for rows of scores with keys as lanes.
func (a *isa) rowWeights() {
	a.kernel("rowWeights")
	s, lds, vectors, rows, pm, l, alpha := param("s"), param("lds"), argument("vectors"), param("rows"), param("m"), param("l"), param("alpha")
	restore := a.flush()
	e := a.exponential(a.masks())
	p, left := GP64(), GP64()
	loop("row", rows, 1, func() {
		var mx [4]reg.VecVirtual // as many as hide the latency of a maximum
		for u := range mx {
			mx[u] = a.constant(cNegInf)
		}
		MOVQ(s, p)
		byFour("max", vectors, func(n int) {
			for u := range n {
				y := a.vec()
				VMOVUPS(a.at(p, u), y)
				VMAXPS(mx[u], y, mx[u]) // mx where y is NaN
			}
			ADDQ(U32(uint32(n*a.bytes())), p)
		})
		VMAXPS(mx[1], mx[0], mx[0])
		VMAXPS(mx[3], mx[2], mx[2])
		VMAXPS(mx[2], mx[0], mx[0])
		largest, old := a.largestLane(mx[0]), a.vec()
		VMAXSS(Mem{Base: pm}, largest, largest)
		VBROADCASTSS(Mem{Base: pm}, old)
		VMOVSS(largest, Mem{Base: pm})
		m := a.vec()
		VBROADCASTSS(largest, m)
		VSUBPS(m, old, old)
		factor, sum := e.of(old), XMM()
		VMOVSS(factor.AsX(), Mem{Base: alpha})
		VXORPS(sum, sum, sum)
		MOVQ(s, p)
		MOVQ(vectors, left)
		loop("vector", left, 1, func() {
			y, four := a.vec(), a.vec()
			VMOVUPS(a.at(p, 0), y)
			VSUBPS(m, y, y)
			x := e.of(y)
			VMOVUPS(x, a.at(p, 0))
			VPERMILPS(Imm(0xb1), x, four)
			VADDPS(x, four, four)
			VPERMILPS(Imm(0x4e), four, x)
			VADDPS(x, four, four) // (p0 + p1) + (p2 + p3) in each element
			VADDSS(four.AsX(), sum, sum)
			for i := 1; i < a.lanes/4; i++ {
				next := XMM()
				if a.wide() {
					VEXTRACTF32X4(Imm(uint64(i)), four, next)
				} else {
					VEXTRACTF128(Imm(uint64(i)), four, next)
				}
				VADDSS(next, sum, sum)
			}
			ADDQ(U32(uint32(a.bytes())), p)
		})
		VMULSS(Mem{Base: l}, factor.AsX(), factor.AsX())
		VADDSS(sum, factor.AsX(), sum)
		VMOVSS(sum, Mem{Base: l})
		ADDQ(lds, s)
		for _, x := range []reg.GPVirtual{pm, l, alpha} {
			ADDQ(Imm(4), x)
		}
	})
	restore()
	end()
}
