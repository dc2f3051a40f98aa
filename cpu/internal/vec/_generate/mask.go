package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// hide writes -Inf to squares of scores where a mask, whose rows are lanes, is false.
func (a *isa) hide() {
	a.kernel("hide")
	s, mask, ld, squares := param("s"), param("mask"), param("ld"), param("squares")
	hidden, bits := a.constant(cNegInf), AllocLocal(64)
	p := GP64()
	loop("square", squares, 1, func() {
		// Bit i of element j is byte j of row i; 1 is visible.
		seen := a.vec()
		MOVQ(mask, p)
		for i := range a.lanes {
			if i == 0 {
				VPMOVZXBD(Mem{Base: p}, seen)
			} else {
				x := a.vec()
				VPMOVZXBD(Mem{Base: p}, x)
				VPSLLD(Imm(uint64(i)), x, x)
				if a.masks() {
					VPORD(x, seen, seen)
				} else {
					VPOR(x, seen, seen)
				}
			}
			PREFETCHT1(Mem{Base: p, Disp: maskAhead})
			if i < a.lanes-1 {
				ADDQ(ld, p)
			}
		}
		if a.masks() {
			VPTERNLOGD(U8(0x55), seen, seen, seen) // not
			VMOVDQU32(seen, bits)
			for j := range a.lanes {
				k := K()
				KMOVW(bits.Offset(4*j), k)
				VMOVUPS(hidden, k, Mem{Base: s, Disp: j * a.rowBytes()})
			}
		} else {
			VMOVDQU(seen, bits)
			for j := range a.lanes {
				x, y := a.vec(), a.vec()
				VPBROADCASTD(bits.Offset(4*j), x)
				VPAND(cBits.mem(), x, x)
				VPCMPEQD(cBits.mem(), x, x) // seen
				VMOVUPS(Mem{Base: s, Disp: j * a.rowBytes()}, y)
				VBLENDVPS(x, y, hidden, y)
				VMOVUPS(y, Mem{Base: s, Disp: j * a.rowBytes()})
			}
		}
		ADDQ(U32(uint32(a.lanes*a.rowBytes())), s)
		ADDQ(U32(uint32(a.lanes)), mask)
	})
	end()
}

// hideRow writes -Inf to vectors of x where mask is false.
func (a *isa) hideRow() {
	a.kernel("hideRow")
	x, mask, vectors := param("x"), param("mask"), param("vectors")
	hidden, zero := a.constant(cNegInf), a.vec()
	a.zero(zero)
	loop("next", vectors, 1, func() {
		seen := a.vec()
		VPMOVZXBD(Mem{Base: mask}, seen)
		if a.wide() {
			k := K()
			VPCMPD(Imm(0), zero, seen, k)
			VMOVUPS(hidden, k, a.at(x, 0))
		} else {
			y := a.vec()
			VPCMPEQD(zero, seen, seen)
			VMOVUPS(a.at(x, 0), y)
			VBLENDVPS(seen, hidden, y, y)
			VMOVUPS(y, a.at(x, 0))
		}
		ADDQ(U32(uint32(a.bytes())), x)
		ADDQ(U32(uint32(a.lanes)), mask)
	})
	end()
}

// maskAhead is biasAhead for a mask of bytes: the tile of the next 128 keys.
const maskAhead = 128

// diagonal adds biases by distance: each row of scores reads the biases one element
// before those of the previous row.
func (a *isa) diagonal() {
	a.kernel("diagonal")
	s, b, rows, mx := param("s"), param("b"), param("rows"), param("mx")
	scale := a.constant(cLog2E)
	m := a.row(mx)
	loop("row", rows, 1, func() {
		for c := range m {
			x, y := a.vec(), a.vec()
			VMOVUPS(a.at(b, c), y)
			VMOVUPS(a.at(s, c), x)
			a.addBias(x, y, scale)
			VMOVUPS(x, a.at(s, c))
			VMAXPS(m[c], x, m[c]) // m where x is NaN
		}
		SUBQ(Imm(4), b)
		ADDQ(U32(uint32(a.rowBytes())), s)
	})
	a.store(m, mx)
	end()
}

// slopes adds multiples of the distances between rows and keys, d at the first key, four
// keys at a time.
func (a *isa) slopes() {
	a.kernel("slopes")
	s, d, factors, fours, mx := param("s"), param("d"), param("factors"), param("fours"), param("mx")
	scale, m, at := a.constant(cLog2E), a.vecs(a.cols), a.vecs(a.cols)
	for c := range m {
		VMOVUPS(a.at(mx, c), m[c])
		VMOVUPS(a.at(d, c), at[c])
	}
	loop("row", fours, 1, func() {
		for c := range m {
			var largest [4]reg.VecVirtual
			later := [4]reg.VecVirtual{at[c], a.vec(), a.vec(), a.vec()} // distances of the keys
			VADDPS(cOne.mem(), at[c], later[1])
			VADDPS(cTwo.mem(), at[c], later[2])
			VADDPS(cTwo.mem(), later[1], later[3])
			for u, y := range later {
				x, far := a.vec(), a.vec()
				VANDPS(cAbs.mem(), y, far)
				VMULPS(a.at(factors, c), far, far)
				VMOVUPS(a.at(s, u*a.cols+c), x)
				VFMADD231PS(scale, far, x)
				VMOVUPS(x, a.at(s, u*a.cols+c))
				largest[u] = x
				if u&1 == 1 {
					VMAXPS(largest[u-1], x, largest[u-1])
				}
			}
			VADDPS(cTwo.mem(), later[2], at[c])
			VMAXPS(largest[0], largest[2], largest[0])
			VMAXPS(m[c], largest[0], m[c]) // m where the other is NaN
		}
		ADDQ(U32(uint32(4*a.rowBytes())), s)
	})
	a.store(m, mx)
	end()
}
