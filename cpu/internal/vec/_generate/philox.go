package main

import (
	"fmt"
	"iter"
	"slices"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

func drawAt(base reg.Register, field int) Mem { return Mem{Base: base, Disp: field} }

// philox is the generator Philox4x32 on groups of counters whose words are the lower halves
// of 64 bit lanes. It ignores the upper halves, so products need no shuffles. Only the
// second words of the counters change in a loop; the Draw keeps what
// follows from the others.
type philox struct {
	*isa
	p            reg.Register // the Draw
	m0, m1, base reg.VecVirtual
}

// newPhilox prepares the first groups of the Draw at p.
func (a *isa) newPhilox(p reg.Register, groups int) *philox {
	x := &philox{isa: a, p: p, m0: a.vec(), m1: a.vec(), base: a.vec()}
	VMOVUPS(drawAt(p, tables.DrawM0), x.m0)
	VMOVUPS(drawAt(p, tables.DrawM1), x.m1)
	VMOVUPS(drawAt(p, tables.DrawBase), x.base)
	for g := range groups {
		c, n := a.vecs(4), 0
		for i, field := range []int{tables.DrawCounters + 64*g, 0, tables.DrawHeads + 64*g, tables.DrawBatch} {
			if i != 1 {
				VMOVUPS(drawAt(p, field), c[i])
			}
		}
		keep := func(round, key int, y reg.VecVirtual) {
			z := a.vec()
			x.xor(x.key(round, key), y, z)
			VMOVUPS(z, x.fixed(g, n))
			n++
		}
		low0, high0 := x.product(c[0], x.m0)
		low1, high1 := x.product(c[2], x.m1)
		keep(0, 0, high1)
		keep(1, 1, low0)
		x.xor3(x.key(0, 1), c[3], high0)
		low2, high2 := x.product(high0, x.m1)
		keep(2, 0, low2)
		x.xor3(x.key(1, 0), low1, high2)
		low3, high3 := x.product(high2, x.m0)
		keep(2, 1, high3)
		keep(3, 1, low3)
	}
	return x
}

// fixed addresses a number that counters of group g share.
func (x *philox) fixed(g, n int) Mem { return drawAt(x.p, tables.DrawFixed+64*(5*g+n)) }

// key addresses one of the two keys of a round.
func (x *philox) key(round, i int) Mem { return drawAt(x.p, tables.DrawRounds+128*round+64*i) }

// product returns the two words of y·m.
func (x *philox) product(y, m reg.VecVirtual) (low, high reg.VecVirtual) {
	low, high = x.vec(), x.vec()
	VPMULUDQ(y, m, low)
	VPSHUFD(U8(0xf5), low, high) // shifts would take the ports of the products
	return low, high
}

// xor computes to = x ^ y.
func (a *isa) xor(x Mem, y, to reg.VecVirtual) {
	if a.masks() {
		VPXORQ(x, y, to)
		return
	}
	VPXOR(x, y, to)
}

// chain writes instructions that wait for each other. It yields after each round.
type chain = iter.Seq[int]

// interleave writes the rounds of as many chains in turns as there are registers for: a
// processor does not look ahead far enough to find the next chain.
func (a *isa) interleave(chains ...chain) {
	most := 2
	if a.masks() {
		most = 4
	}
	for some := range slices.Chunk(chains, most) {
		var next []func() (int, bool)
		for _, c := range some {
			do, _ := iter.Pull(c)
			next = append(next, do)
		}
		for left := len(next); left > 0; {
			left = 0
			for _, do := range next {
				if _, ok := do(); ok {
					left++
				}
			}
		}
	}
}

// eight returns the words of the counters of group g after eight rounds.
func (x *philox) eight(g int, base reg.VecVirtual, yield func(int) bool) [4]reg.VecVirtual {
	c0, c2 := x.vec(), x.vec()
	VPADDQ(drawAt(x.p, tables.DrawKeys+64*g), base, c0)
	x.xor(x.fixed(g, 0), c0, c0)
	low0, high0 := x.product(c0, x.m0)
	x.xor(x.fixed(g, 1), high0, high0)
	yield(2)
	low1, high1 := x.product(high0, x.m1)
	x.xor(x.fixed(g, 2), high1, high1)
	x.xor(x.fixed(g, 3), low0, c2)
	yield(3)
	c3, high0 := x.product(high1, x.m0)
	c1, c0 := x.product(c2, x.m1)
	x.xor3(x.key(3, 0), low1, c0)
	x.xor(x.fixed(g, 4), high0, high0)
	c := [4]reg.VecVirtual{c0, c1, high0, c3}
	for round := 4; round < 8; round++ {
		yield(round)
		c = x.round(round, c)
	}
	yield(8)
	return c
}

func (x *philox) round(n int, c [4]reg.VecVirtual) [4]reg.VecVirtual {
	low0, high0 := x.product(c[0], x.m0)
	low1, high1 := x.product(c[2], x.m1)
	x.xor3(x.key(n, 0), c[1], high1)
	x.xor3(x.key(n, 1), c[3], high0)
	return [4]reg.VecVirtual{high1, low1, high0, low0}
}

// words returns the four words of the counters of group g.
func (x *philox) words(g int, yield func(int) bool) [4]reg.VecVirtual {
	c := x.round(8, x.eight(g, x.base, yield))
	yield(9)
	return x.round(9, c)
}

// word writes word n of the counters of group g to w. It leaves out those parts of the last
// rounds that only the other words need.
func (x *philox) word(g, n int, base reg.VecVirtual, w *reg.VecVirtual) chain {
	return func(yield func(int) bool) {
		c, m, half := x.eight(g, base, yield), [2]reg.VecVirtual{x.m1, x.m0}, n/2
		_, last := x.product(c[2*half], m[1-half])
		x.xor3(x.key(8, 1-half), c[3-2*half], last)
		low := x.vec()
		if n%2 == 1 {
			yield(9)
			VPMULUDQ(last, m[half], low)
			*w = low
			return
		}
		VPMULUDQ(c[2-2*half], m[half], low)
		yield(9)
		_, high := x.product(last, m[half])
		x.xor3(x.key(9, half), low, high)
		*w = high
	}
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

// dropped multiplies the vector at m by the factor where words are at least the
// threshold, and by 0 elsewhere.
func (a *isa) dropped(words reg.VecVirtual, p reg.Register, m Mem) {
	x := a.vec()
	if a.masks() {
		k := K()
		VPCMPUD(Imm(5), drawAt(p, tables.DrawThreshold), words, k) // not less
		VMOVUPS_Z(drawAt(p, tables.DrawFactor), k, x)
	} else {
		VPMAXUD(drawAt(p, tables.DrawThreshold), words, x)
		VPCMPEQD(words, x, x)
		VANDPS(drawAt(p, tables.DrawFactor), x, x)
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
	a.kernel("drop")
	s, times, p := param("s"), param("times"), param("d")
	x := a.newPhilox(p, groups)
	loop("row", times, 1, func() {
		var chains []chain
		for g := range groups {
			chains = append(chains, func(yield func(int) bool) {
				w := x.words(g, yield)
				low, high := a.vec(), a.vec()
				VSHUFPS(U8(0x88), w[1], w[0], low)
				VSHUFPS(U8(0x88), w[3], w[2], high)
				first, second := a.vec(), a.vec()
				VSHUFPS(U8(0x88), high, low, first)
				VSHUFPS(U8(0xdd), high, low, second)
				a.dropped(first, p, a.at(s, 2*g))
				a.dropped(second, p, a.at(s, 2*g+1))
			})
		}
		a.interleave(chains...)
		VPADDQ(drawAt(p, tables.DrawStep), x.base, x.base)
		ADDQ(U32(uint32(rows*a.rowBytes())), s)
	})
	end()
}

// dropRow applies dropout to vectors, step bytes apart: two groups of counters, one counter
// for each element, yield one word each.
func (a *isa) dropRow() {
	a.kernel("dropRow")
	s, vectors, step, p, word := param("s"), param("vectors"), param("step"), param("d"), param("word")
	x, nowhere := a.newPhilox(p, 2), GP64()
	LEAQ(drawAt(p, tables.DrawFixed+64*10), nowhere)
	for n := range 4 {
		if n < 3 {
			CMPQ(word, Imm(uint64(n)))
			JNE(LabelRef(fmt.Sprintf("not%d", n)))
		}
		label, to, later := fmt.Sprintf("word%d", n), GP64(), a.vec()
		Label(label)
		// The second vector of the last turn may not be there.
		LEAQ(Mem{Base: s, Index: step, Scale: 1}, to)
		CMPQ(vectors, Imm(1))
		CMOVQEQ(nowhere, to)
		VPADDQ(drawAt(p, tables.DrawStep), x.base, later)
		var w [4]reg.VecVirtual
		a.interleave(x.word(0, n, x.base, &w[0]), x.word(1, n, x.base, &w[1]), x.word(0, n, later, &w[2]), x.word(1, n, later, &w[3]))
		VSHUFPS(U8(0x88), w[1], w[0], w[0])
		a.dropped(w[0], p, a.at(s, 0))
		VSHUFPS(U8(0x88), w[3], w[2], w[2])
		a.dropped(w[2], p, a.at(to, 0))
		VPADDQ(drawAt(p, tables.DrawStep), later, x.base)
		LEAQ(Mem{Base: s, Index: step, Scale: 2}, s)
		SUBQ(Imm(2), vectors)
		JG(LabelRef(label))
		end()
		if n < 3 {
			Label(fmt.Sprintf("not%d", n))
		}
	}
}
