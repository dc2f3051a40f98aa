package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// element is the type of keys or values in memory.
type element struct {
	suffix string
	bytes  int
	lead   int // bytes of a row's scale, which precedes its elements
	// load reads the vector at m of a row with the given scale.
	load func(a *isa, m, scale Mem, to reg.VecVirtual)
}

var elements = []element{
	{"", 4, 0, func(_ *isa, m, _ Mem, to reg.VecVirtual) { VMOVUPS(m, to) }},
	{"F16", 2, 0, func(_ *isa, m, _ Mem, to reg.VecVirtual) { VCVTPH2PS(m, to) }},
	{"BF16", 2, 0, func(_ *isa, m, _ Mem, to reg.VecVirtual) {
		VPMOVZXWD(m, to)
		VPSLLD(Imm(16), to, to)
	}},
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
	}},
}

// dots writes scores with keys as lanes. It transposes squares of K in registers, so
// each score is summed in the same order as in scores.
func (a *isa) dots(e element) {
	name := "dots" + e.suffix
	a.text(name, "s *float32, lds int, k *byte, ldk int, next uintptr, q *float32, ldq, heads, chunks, groups int", "is Kernels."+name+".")
	lds, ldk, ldq := param("lds"), param("ldk"), param("ldq")
	s, k, q, heads, chunks, groups := argument("s"), argument("k"), argument("q"), argument("heads"), argument("chunks"), argument("groups")
	c := AllocLocal(8) // there are too few registers for all counters
	kp, qp, sp, row, h := GP64(), GP64(), GP64(), GP64(), GP64()
	qc, ahead := GP64(), GP64()
	lds3, ldq3 := tripled(lds), tripled(ldq)
	lines, jump, left := AllocLocal(8), AllocLocal(8), GP64()
	if e.lead == 0 {
		MOVQ(chunks, left) // of a row: vectors, bytes, lines
		SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes*e.bytes)))), left)
		ADDQ(Imm(63), left)
		SHRQ(Imm(6), left)
		MOVQ(left, lines)
		SHLQ(Imm(6), left)
		MOVQ(ldk, ahead)
		SUBQ(left, ahead)
		MOVQ(ahead, jump)
		MOVQ(lines, left)
	}
	MOVQ(argument("next"), ahead)
	loop("group", groups, 1, func() {
		MOVQ(k, kp)
		MOVQ(q, qc)
		// Sums start at zero.
		zero := a.vec()
		a.zero(zero)
		MOVQ(s, sp)
		MOVQ(heads, h)
		loop("clear", h, 1, func() {
			VMOVUPS(zero, a.at(sp, 0))
			ADDQ(lds, sp)
		})
		MOVQ(chunks, h)
		MOVQ(h, c)
		loop("chunk", c, 1, func() {
			rows := a.vecs(a.lanes)
			MOVQ(kp, row)
			back := GP64() // bytes from a chunk back to the first one
			if e.lead > 0 {
				MOVQ(c, back)
				SUBQ(chunks, back)
				SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes*e.bytes)))), back)
			}
			for i := range rows {
				scale := Mem{}
				if e.lead > 0 {
					scale = Mem{Base: row, Index: back, Scale: 1}
				}
				e.load(a, Mem{Base: row, Disp: e.lead}, scale, rows[i])
				if i < len(rows)-1 {
					ADDQ(ldk, row)
				}
			}
			if e.lead > 0 {
				// Prefetch a line of each row whenever a line of them has been read.
				TESTQ(U32(63), back)
				JNZ(LabelRef("read"))
				MOVQ(ahead, row)
				SUBQ(back, row)
				for i := range rows {
					PREFETCHT1(Mem{Base: row})
					if i < len(rows)-1 {
						ADDQ(ldk, row)
					}
				}
				Label("read")
			}
			// The processor does not predict so many streams. Prefetch as many lines
			// as were read, row by row, some rows ahead.
			for i := range a.lanes * a.lanes * e.bytes / 64 {
				if e.lead > 0 {
					break
				}
				PREFETCHT1(Mem{Base: ahead})
				ADDQ(Imm(64), ahead)
				DECQ(left)
				JNZ(LabelRef(fmt.Sprintf("same%d", i)))
				ADDQ(jump, ahead)
				MOVQ(lines, left)
				Label(fmt.Sprintf("same%d", i))
			}
			t := a.transposed(rows)
			MOVQ(qc, qp)
			MOVQ(s, sp)
			// Several rows at a time give as many independent chains of FMAs.
			body := func(n int) {
				sums, queries := []reg.Register{sp}, []reg.Register{qp}
				if n > 4 {
					s4, q4 := GP64(), GP64()
					LEAQ(Mem{Base: sp, Index: lds, Scale: 4}, s4)
					LEAQ(Mem{Base: qp, Index: ldq, Scale: 4}, q4)
					sums, queries = append(sums, s4), append(queries, q4)
				}
				acc := make([]reg.VecVirtual, n)
				for r := range acc {
					acc[r] = a.vec()
					VMOVUPS(rowAt(sums[r/4], lds, lds3, r%4, 0), acc[r])
				}
				for i := range t {
					for r := range acc {
						m := rowAt(queries[r/4], ldq, ldq3, r%4, 4*i)
						if a.wide() {
							VFMADD231PS_BCST(m, t[i], acc[r])
							continue
						}
						x := a.vec()
						VBROADCASTSS(m, x)
						VFMADD231PS(x, t[i], acc[r])
					}
				}
				for r := range acc {
					VMOVUPS(acc[r], rowAt(sums[r/4], lds, lds3, r%4, 0))
				}
				switch n {
				case 8:
					LEAQ(Mem{Base: sums[1], Index: lds, Scale: 4}, sp)
					LEAQ(Mem{Base: queries[1], Index: ldq, Scale: 4}, qp)
				case 4:
					LEAQ(Mem{Base: sp, Index: lds, Scale: 4}, sp)
					LEAQ(Mem{Base: qp, Index: ldq, Scale: 4}, qp)
				default:
					ADDQ(lds, sp)
					ADDQ(ldq, qp)
				}
			}
			if a.wide() {
				MOVQ(heads, h)
				CMPQ(h, Imm(8))
				JL(LabelRef("under8"))
				SHRQ(Imm(3), h)
				loop("eight", h, 1, func() { body(8) })
				Label("under8")
				MOVQ(heads, h)
				ANDQ(Imm(7), h)
				byFour("head", h, body)
			} else {
				byFour("head", heads, body)
			}
			ADDQ(U32(uint32(a.lanes*e.bytes)), kp)
			ADDQ(U32(uint32(a.bytes())), qc)
		})
		ADDQ(U32(uint32(a.bytes())), s)
		p := GP64()
		MOVQ(ldk, p)
		SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes)))), p)
		ADDQ(p, k)
		if e.lead > 0 {
			ADDQ(p, ahead)
		}
	})
	end()
}

// mix writes the value product of heads rows with elements as lanes: strips of
// vectors vectors, o = alpha*o + Σ p·v with the sum from zero. The values are those of
// n runs of three words each: the first row, the first row to prefetch, the length.
func (a *isa) mix(e element, heads, vectors int) {
	name := fmt.Sprintf("mix%s%dx%d", e.suffix, heads, vectors)
	a.text(name, "o *float32, ldo int, runs *uintptr, n, ldv int, p *float32, ldp int, alpha *float32, first, strips int", "is Kernels."+name+".")
	strips := AllocLocal(8)
	count := GP64()
	MOVQ(argument("strips"), count)
	if !a.wide() && (heads*vectors > 12 || heads == 1 && vectors == 8 && e.bytes <= 2) {
		vectors /= 2 // there are too few registers, so two halves
		ADDQ(count, count)
	}
	MOVQ(count, strips)
	o, ldv, ldp := argument("o"), param("ldv"), param("ldp")
	off, vp, n, ahead, ldp3 := GP64(), GP64(), GP64(), GP64(), tripled(ldp)
	run, left := GP64(), GP64()
	p := []reg.GPVirtual{GP64()} // one for each four rows
	if heads > 4 {
		p = append(p, GP64())
	}
	MOVQ(argument("first"), off) // bytes before the strip in a row
	loop("strip", strips, 1, func() {
		acc := make([][]reg.VecVirtual, heads)
		for h := range acc {
			acc[h] = a.vecs(vectors)
			for j := range acc[h] {
				a.zero(acc[h][j])
			}
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
		MOVQ(argument("runs"), run)
		MOVQ(argument("n"), left)
		loop("run", left, 1, func() {
			MOVQ(Mem{Base: run}, vp)
			MOVQ(Mem{Base: run, Disp: 8}, ahead)
			MOVQ(Mem{Base: run, Disp: 16}, n)
			ADDQ(U32(24), run)
			ADDQ(off, vp)
			ADDQ(off, ahead)
			loop("key", n, 1, func() {
				x := a.vecs(vectors)
				for j := 0; j < vectors*a.lanes*e.bytes; j += 64 {
					PREFETCHT1(Mem{Base: ahead, Disp: j})
				}
				inMemory := heads == 1 && e.bytes == 4 // each value is used once
				if !inMemory {
					scale := Mem{}
					if e.lead > 0 {
						scale = Mem{Base: vp, Index: back, Scale: 1}
					}
					for j := range x {
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
					for j := range x {
						if inMemory {
							VFMADD231PS(a.at(vp, j), w, acc[h][j])
						} else {
							VFMADD231PS(x[j], w, acc[h][j])
						}
					}
				}
				ADDQ(ldv, vp)
				ADDQ(ldv, ahead)
				for i := range p {
					ADDQ(Imm(4), p[i])
				}
			})
		})
		op, ldo, alpha := GP64(), GP64(), GP64()
		MOVQ(o, op)
		MOVQ(argument("ldo"), ldo)
		MOVQ(argument("alpha"), alpha)
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
		ADDQ(U32(uint32(vectors*a.lanes*e.bytes)), off)
	})
	end()
}
