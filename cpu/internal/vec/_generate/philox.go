package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The offsets of the fields of Draw. Vectors of 64 bit numbers have the width of the
// wider instruction set; the narrower one reads their first half.
const (
	drawRounds    = 0                   // [20]: two keys for each round
	drawCounters  = drawRounds + 64*20  // [3]: first words of counters
	drawKeys      = drawCounters + 64*3 // [3]: second words less the base
	drawBase      = drawKeys + 64*3     // the base of second words
	drawStep      = drawBase + 64       // increment of the base
	drawHead      = drawStep + 64       // third words
	drawBatch     = drawHead + 64       // fourth words
	drawThreshold = drawBatch + 64      // 32 bit numbers
	drawFactor    = drawThreshold + 64  // float32
	drawM0        = drawFactor + 64     // the two multipliers
	drawM1        = drawM0 + 64
)

func drawAt(base reg.Register, field int) Mem { return Mem{Base: base, Disp: field} }

// philox computes the ten rounds of Philox4x32 on counters whose words are the lower
// halves of 64 bit lanes. It ignores the upper halves, so products need no shuffles.
func (a *isa) philox(p reg.Register, c [4]reg.VecVirtual, m0, m1 reg.VecVirtual) [4]reg.VecVirtual {
	for round := range 10 {
		low0, low1, high0, high1 := a.vec(), a.vec(), a.vec(), a.vec()
		VPMULUDQ(c[0], m0, low0)
		VPMULUDQ(c[2], m1, low1)
		VPSRLQ(Imm(32), low1, high1)
		VPSRLQ(Imm(32), low0, high0)
		a.xor3(drawAt(p, drawRounds+128*round), c[1], high1)
		a.xor3(drawAt(p, drawRounds+128*round+64), c[3], high0)
		c = [4]reg.VecVirtual{high1, low1, high0, low0}
	}
	return c
}

// xor3 computes to ^= x ^ y.
func (a *isa) xor3(x Mem, y, to reg.VecVirtual) {
	if a.masks() {
		VPTERNLOGQ(U8(0x96), x, y, to)
		return
	}
	VPXOR(y, to, to)
	VPXOR(x, to, to)
}

// counters loads the counters of group g, with the current base.
func (a *isa) counters(p reg.Register, g int, base reg.VecVirtual) [4]reg.VecVirtual {
	c := [4]reg.VecVirtual{a.vec(), a.vec(), a.vec(), a.vec()}
	VMOVUPS(drawAt(p, drawCounters+64*g), c[0])
	VPADDQ(drawAt(p, drawKeys+64*g), base, c[1])
	VMOVUPS(drawAt(p, drawHead), c[2])
	VMOVUPS(drawAt(p, drawBatch), c[3])
	return c
}

// dropped multiplies the vector at m by the factor where words are at least the
// threshold, and by 0 elsewhere.
func (a *isa) dropped(words reg.VecVirtual, p reg.Register, m Mem) {
	x := a.vec()
	if a.masks() {
		k := K()
		VPCMPUD(Imm(5), drawAt(p, drawThreshold), words, k) // not less
		VMOVUPS_Z(drawAt(p, drawFactor), k, x)
	} else {
		VPMAXUD(drawAt(p, drawThreshold), words, x)
		VPCMPEQD(words, x, x)
		VANDPS(drawAt(p, drawFactor), x, x)
	}
	VMULPS(m, x, x)
	VMOVUPS(x, m)
}

// drop applies dropout to rows of all lanes. Lane 2i of a group of counters is for the
// four elements from 4i on, lane 2i+1 for those half a group later; a group yields the
// words of two vectors.
func (a *isa) drop() {
	groups := 1 // as many as fill whole rows
	for 2*groups%a.cols != 0 {
		groups++
	}
	rows := 2 * groups / a.cols
	a.text("drop", "s *float32, times int, d *uint64", "is Kernels.drop.")
	s, times, p := param("s"), param("times"), param("d")
	m0, m1, base := a.vec(), a.vec(), a.vec()
	VMOVUPS(drawAt(p, drawM0), m0)
	VMOVUPS(drawAt(p, drawM1), m1)
	VMOVUPS(drawAt(p, drawBase), base)
	loop("row", times, 1, func() {
		for g := range groups {
			w := a.philox(p, a.counters(p, g, base), m0, m1)
			low, high := a.vec(), a.vec()
			VSHUFPS(U8(0x88), w[1], w[0], low)
			VSHUFPS(U8(0x88), w[3], w[2], high)
			first, second := a.vec(), a.vec()
			VSHUFPS(U8(0x88), high, low, first)
			VSHUFPS(U8(0xdd), high, low, second)
			a.dropped(first, p, a.at(s, 2*g))
			a.dropped(second, p, a.at(s, 2*g+1))
		}
		VPADDQ(drawAt(p, drawStep), base, base)
		ADDQ(U32(uint32(rows*a.rowBytes())), s)
	})
	end()
}

// dropRow applies dropout to one row: two groups of counters, one counter for each
// element, yield one word each.
func (a *isa) dropRow() {
	a.text("dropRow", "x *float32, vectors int, d *uint64, word int", "is Kernels.dropRow.")
	x, vectors, p, word := param("x"), param("vectors"), param("d"), param("word")
	m0, m1, base := a.vec(), a.vec(), a.vec()
	VMOVUPS(drawAt(p, drawM0), m0)
	VMOVUPS(drawAt(p, drawM1), m1)
	VMOVUPS(drawAt(p, drawBase), base)
	SHLQ(Imm(6), word)
	var words [2]Mem
	for g := range words {
		words[g] = AllocLocal(4 * 64)
	}
	loop("vector", vectors, 1, func() {
		var chosen [2]reg.VecVirtual
		for g := range words {
			for i, w := range a.philox(p, a.counters(p, g, base), m0, m1) {
				VMOVUPS(w, words[g].Offset(64*i))
			}
		}
		for g := range words {
			chosen[g] = a.vec()
			at := GP64()
			LEAQ(words[g], at)
			VMOVUPS(Mem{Base: at, Index: word, Scale: 1}, chosen[g])
		}
		VSHUFPS(U8(0x88), chosen[1], chosen[0], chosen[0])
		a.dropped(chosen[0], p, a.at(x, 0))
		VPADDQ(drawAt(p, drawStep), base, base)
		ADDQ(U32(uint32(a.bytes())), x)
	})
	end()
}
