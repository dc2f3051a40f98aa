package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// element is the type of keys or values in memory.
type element struct {
	suffix string
	bytes  int
	lead   int // bytes of a row's scale, which precedes its elements
	// load reads the vector at m of a row with the given scale.
	load func(a *isa, m, scale Mem, to reg.VecVirtual)
	// split returns the n-th vector of the elements that the words of 32 bits in w hold,
	// in turns, times scale. It is nil for float32, which dotsF32 writes.
	split func(d *dotsKernel, w reg.VecVirtual, scale Mem) func(n int) reg.VecVirtual
	// splitPairs is split for the words of two groups, which it mixes, or nil.
	splitPairs func(d *dotsKernel, first, second reg.VecVirtual) []func(n int) reg.VecVirtual
}

var elements = []element{
	{"", 4, 0, func(_ *isa, m, _ Mem, to reg.VecVirtual) { VMOVUPS(m, to) }, nil, nil},
	{"F16", 2, 0, func(_ *isa, m, _ Mem, to reg.VecVirtual) { VCVTPH2PS(m, to) }, splitF16, splitF16Pairs},
	{"BF16", 2, 0, func(_ *isa, m, _ Mem, to reg.VecVirtual) {
		VPMOVZXWD(m, to)
		VPSLLD(Imm(16), to, to)
	}, splitBF16, nil},
	{"Q8", 1, 4, func(a *isa, m, scale Mem, to reg.VecVirtual) {
		VPMOVSXBD(m, to)
		VCVTDQ2PS(to, to)
		if a.wide() {
			VMULPS_BCST(scale, to, to)
			return
		}
		x := a.vec()
		VBROADCASTSS(scale, x)
		VMULPS(x, to, to)
	}, splitQ8, nil},
}

// mix writes the value product of heads rows with elements as lanes: strips of
// vectors vectors, o = alpha*o + Σ p·v with the sum from zero. The values are those of
// n runs.
func (a *isa) mix(e element, heads, vectors int) {
	a.oneOf("mix", tables.Which{Element: e.suffix, Rows: heads, Vectors: vectors})
	strips := AllocLocal(8)
	count := param("strips")
	if !a.wide() && (heads*vectors > 12 || heads == 1 && vectors == 8 && e.bytes <= 2) {
		vectors /= 2 // there are too few registers, so two halves
		ADDQ(count, count)
	}
	MOVQ(count, strips)
	o, ldv, ldp := argument("o"), param("ldv"), param("ldp")
	off, vp, n, ldp3, rest := GP64(), GP64(), GP64(), tripled(ldp), AllocLocal(8)
	p := []reg.GPVirtual{GP64()} // one for each four rows
	if heads > 4 {
		p = append(p, GP64())
	}
	q4, f8 := e.suffix == elementQ4.suffix, e.suffix == elementF8.suffix && a != vbmi
	var numbers, order reg.VecVirtual
	var tables *tablesF8
	if a == vbmi {
		tables, order = a.tablesF8(), a.constant(cRowsF8)
	}
	if q4 {
		numbers = a.q4Numbers()
	}
	MOVQ(argument("first"), off) // bytes before the strip in a row
	lines := 1                   // of a quarter of the scales, with those that other strips prefetch
	if a.wide() {
		lines = 2
	}
	loop("strip", strips, 1, func() {
		acc := a.accumulators(heads, vectors)
		a.clear(acc)
		var seen *seenF8
		if f8 {
			seen = a.seenF8()
			a.zero(seen.most)
		}
		MOVQ(argument("p"), p[0])
		if heads > 4 {
			LEAQ(Mem{Base: p[0], Index: ldp, Scale: 4}, p[1])
		}
		back := GP64() // bytes back to the row's beginning
		if e.lead > 0 {
			MOVQ(off, back)
			NEGQ(back)
		}
		eachRun(vp, off, nil, func(length Mem, ahead *lookahead) {
			ahead.inOrder = a.inOrder()
			left := GP64()
			MOVQ(length, left)
			MOVQ(left, rest)
			if e.lead > 0 { // the rows are longer than their elements
				ahead.prefetch("run", lines)
			}
			if !a.inOrder() && (e.bytes == 2 || e.bytes == 4 && heads > 1) { // as much as streams are staggered, or twice that
				ahead.overlap(vectors * a.lanes / 8)
			}
			Label("keys")
			// As many lines as the next keys have in the strip.
			size := e.span(vectors * a.lanes)
			ahead.prefetch("keys", max(1, size/256))
			key := func(body func()) { body() }
			if size < 256 {
				key = func(body func()) { loop("key", n, 1, body) }
				MOVQ(U32(uint32(256/size)), n)
				CMPQ(n, rest)
				CMOVQGT(rest, n)
				SUBQ(n, rest)
			}
			key(func() {
				var x []reg.VecVirtual
				if tables != nil {
					x = tables.read(a, Mem{Base: vp}, order, vectors)
				} else {
					x = a.vecs(vectors)
				}
				inMemory := heads == 1 && e.bytes == 4 // each value is used once
				if !inMemory {
					scale := Mem{}
					if e.lead > 0 {
						scale = Mem{Base: vp, Index: back, Scale: 1}
					}
					for j := 0; q4 && j < len(x); j += 2 {
						a.blockQ4(Mem{Base: vp, Disp: e.span(j * a.lanes)}, numbers, x[j:j+2])
					}
					if f8 {
						seen.read(a, Mem{Base: vp}, x)
					}
					for j := 0; f8 && heads > len(x) && j < len(x); j++ {
						VMULPS(cUpF8.mem(), x[j], x[j])
					}
					for j := 0; !q4 && !f8 && tables == nil && j < len(x); j++ {
						e.load(a, Mem{Base: vp, Disp: e.lead + j*a.lanes*e.bytes}, scale, x[j])
					}
				}
				for h := range acc {
					m := rowAt(p[h/4], ldp, ldp3, h%4, 0)
					if a.wide() && heads > 4 {
						for j := range x {
							VFMADD231PS_BCST(m, x[j], acc[h][j])
						}
						continue
					}
					w := a.vec()
					VBROADCASTSS(m, w)
					if f8 && heads <= len(x) {
						VMULPS(cUpF8.mem(), w, w)
					}
					for j := range x {
						if inMemory {
							VFMADD231PS(a.at(vp, j), w, acc[h][j])
						} else {
							VFMADD231PS(x[j], w, acc[h][j])
						}
					}
				}
				for j := 0; a.inOrder() && !inMemory && j < size; j += 64 {
					PREFETCHT0(Mem{Base: vp, Disp: valuesAhead + j})
				}
				ADDQ(ldv, vp)
				for i := range p {
					ADDQ(Imm(4), p[i])
				}
			})
			if size < 256 {
				CMPQ(rest, Imm(0))
			} else {
				DECQ(rest)
			}
			JNE(LabelRef("keys"))
		})
		if f8 {
			seen.spread(a, acc)
		}
		op := GP64()
		MOVQ(o, op)
		ldo, alpha := param("ldo"), param("alpha")
		for h := range acc {
			w := a.vec()
			VBROADCASTSS(Mem{Base: alpha, Disp: 4 * h}, w)
			for j := range acc[h] {
				VFMADD231PS(a.at(op, j), w, acc[h][j])
				VMOVUPS(acc[h][j], a.at(op, j))
			}
			if h < heads-1 {
				ADDQ(ldo, op)
			}
		}
		ADDQ(U32(uint32(vectors*a.bytes())), o)
		ADDQ(U32(uint32(e.span(vectors*a.lanes))), off)
	})
	end()
}
