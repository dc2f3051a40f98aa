package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// element is a type that keys and values have in memory.
type element struct {
	suffix, ctype string
	bytes         int
	load          func(m Mem, to reg.VecVirtual)
}

var elements = []element{
	{"", "float32", 4, func(m Mem, to reg.VecVirtual) { VMOVUPS(m, to) }},
	{"F16", "uint16", 2, func(m Mem, to reg.VecVirtual) { VCVTPH2PS(m, to) }},
	{"BF16", "uint16", 2, func(m Mem, to reg.VecVirtual) {
		VPMOVZXWD(m, to)
		VPSLLD(Imm(16), to, to)
	}},
}

// dots writes scores with keys as lanes: squares of K are transposed in
// registers, so that each score is summed in the same order as in scores.
func (a *isa) dots(e element) {
	name := "dots" + e.suffix
	a.text(name, "s *float32, lds int, k *"+e.ctype+", ldk int, q *float32, ldq, heads, chunks, groups int", "is Kernels."+name+".")
	s, lds, k, ldk, q, ldq := param("s"), param("lds"), param("k"), param("ldk"), param("q"), param("ldq")
	heads, chunks, groups := argument("heads"), argument("chunks"), argument("groups")
	c := AllocLocal(8) // there are not enough registers for all counters
	kp, qp, sp, row, h := GP64(), GP64(), GP64(), GP64(), GP64()
	qc, ahead := GP64(), GP64()
	lds3, ldq3 := tripled(lds), tripled(ldq)
	lines, jump, left := AllocLocal(8), AllocLocal(8), GP64()
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
	MOVQ(ldk, ahead)
	SHLQ(Imm(5), ahead)
	ADDQ(k, ahead)
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
			for i := range rows {
				e.load(Mem{Base: row}, rows[i])
				if i < len(rows)-1 {
					ADDQ(ldk, row)
				}
			}
			// The processor does not guess so many streams: as many lines are
			// asked for as were read, row by row, some rows ahead.
			for i := range a.lanes * a.lanes * e.bytes / 64 {
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
			// Four rows at a time, so that four chains of FMAs are under way.
			byFour("head", heads, func(n int) {
				acc := make([]reg.VecVirtual, n)
				for r := range acc {
					acc[r] = a.vec()
					VMOVUPS(rowAt(sp, lds, lds3, r, 0), acc[r])
				}
				for i := range t {
					for r := range acc {
						m := rowAt(qp, ldq, ldq3, r, 4*i)
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
					VMOVUPS(acc[r], rowAt(sp, lds, lds3, r, 0))
				}
				if n == 4 {
					LEAQ(Mem{Base: sp, Index: lds, Scale: 4}, sp)
					LEAQ(Mem{Base: qp, Index: ldq, Scale: 4}, qp)
				} else {
					ADDQ(lds, sp)
					ADDQ(ldq, qp)
				}
			})
			ADDQ(U32(uint32(a.lanes*e.bytes)), kp)
			ADDQ(U32(uint32(a.bytes())), qc)
		})
		ADDQ(U32(uint32(a.bytes())), s)
		p := GP64()
		MOVQ(ldk, p)
		SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes)))), p)
		ADDQ(p, k)
	})
	end()
}

// mix writes the value product of heads rows with elements as lanes: strips of
// vectors vectors, o = alpha*o + Σ p·v with the sum from zero.
func (a *isa) mix(e element, heads, vectors int) {
	name := fmt.Sprintf("mix%s%dx%d", e.suffix, heads, vectors)
	a.text(name, "o *float32, ldo int, v *"+e.ctype+", ldv int, p *float32, ldp, keys int, alpha *float32, strips int", "is Kernels."+name+".")
	o, ldo, v, ldv, p0, ldp, keys, alpha, strips := param("o"), param("ldo"), param("v"), param("ldv"), param("p"), param("ldp"), param("keys"), param("alpha"), param("strips")
	vp, p, n := GP64(), GP64(), GP64()
	ldp3 := tripled(ldp)
	if !a.wide() && (heads*vectors > 12 || heads == 1 && vectors == 8 && e.bytes == 2) {
		vectors /= 2 // there are too few registers: done in two halves
		a.mixStrips(e, heads, vectors, 2, o, ldo, v, ldv, p0, ldp, ldp3, keys, alpha, strips, vp, p, n)
		return
	}
	a.mixStrips(e, heads, vectors, 1, o, ldo, v, ldv, p0, ldp, ldp3, keys, alpha, strips, vp, p, n)
}

func (a *isa) mixStrips(e element, heads, vectors, halves int, o, ldo, v, ldv, p0, ldp, ldp3, keys, alpha, strips, vp, p, n reg.GPVirtual) {
	if halves == 2 {
		ADDQ(strips, strips)
	}
	ahead := GP64()
	loop("strip", strips, 1, func() {
		acc := make([][]reg.VecVirtual, heads)
		for h := range acc {
			acc[h] = a.vecs(vectors)
			for j := range acc[h] {
				a.zero(acc[h][j])
			}
		}
		MOVQ(v, vp)
		MOVQ(p0, p)
		MOVQ(keys, n)
		MOVQ(ldv, ahead)
		SHLQ(Imm(4), ahead)
		ADDQ(v, ahead)
		loop("key", n, 1, func() {
			x := a.vecs(vectors)
			for j := 0; j < vectors*a.lanes*e.bytes; j += 64 {
				PREFETCHT1(Mem{Base: ahead, Disp: j})
			}
			inMemory := heads == 1 && e.bytes == 4 // each is used once
			if !inMemory {
				for j := range x {
					e.load(Mem{Base: vp, Disp: j * a.lanes * e.bytes}, x[j])
				}
			}
			for h := range acc {
				w := a.vec()
				VBROADCASTSS(rowAt(p, ldp, ldp3, h, 0), w)
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
			ADDQ(Imm(4), p)
		})
		op := GP64()
		MOVQ(o, op)
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
		ADDQ(U32(uint32(vectors*a.lanes*e.bytes)), v)
	})
	end()
}
