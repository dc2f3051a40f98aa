package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// dotsF32 is dots for float32 keys. It transposes squares of lanes x lanes, and reads a whole
// line of each key at once: from memory that is faster than the words of twice as many keys.
func (a *isa) dotsF32() {
	a.kernel("dots")
	lds, ldk, ldq := param("lds"), param("ldk"), param("ldq")
	s, k, q, heads, chunks, groups := argument("s"), argument("k"), argument("q"), argument("heads"), argument("chunks"), argument("groups")
	c := AllocLocal(8) // there are too few registers for all counters
	kp, qp, sp, row, h := GP64(), GP64(), GP64(), GP64(), GP64()
	qc := GP64()
	lds3, ldq3 := tripled(lds), tripled(ldq)
	ahead := continued(argument("run"))
	ahead.inOrder = a.inOrder()
	// square returns the group's next square of keys, transposed.
	square := func(label string) []reg.VecVirtual {
		rows := a.vecs(a.lanes)
		MOVQ(kp, row)
		// Lines of the run's next group that are in the second-level cache move to the first
		// one: later they would wait for buffers that lines from memory fill.
		group := GP64()
		if !a.inOrder() {
			XORQ(group, group)
			CMPQ(groups, Imm(1))
			JE(LabelRef(label + "_last"))
			MOVQ(ldk, group)
			SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes)))), group)
			Label(label + "_last")
		}
		for i := range rows {
			VMOVUPS(Mem{Base: row}, rows[i])
			if i < len(rows)-1 {
				ADDQ(ldk, row)
			}
		}
		MOVQ(kp, row)
		if a.inOrder() { // as many adjacent lines
			SUBQ(k, row)
			SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes)))), row)
			ADDQ(k, row)
		} else {
			ADDQ(group, row)
		}
		jobs := make([]func(), a.lanes)
		for i := range jobs {
			jobs[i] = func() {
				if a.inOrder() {
					PREFETCHT0(Mem{Base: row, Disp: keysAhead + 64*i})
					return
				}
				PREFETCHT0(Mem{Base: row})
				if i < a.lanes-1 {
					ADDQ(ldk, row)
				}
			}
		}
		for i := range a.lanes * a.bytes() / 256 { // as many lines as were read
			jobs = append(jobs, func() { ahead.prefetch(fmt.Sprint(label, i), 1) })
		}
		return a.transposed(rows, jobs...)
	}
	multiply := func(t, acc []reg.VecVirtual, queries ...reg.Register) {
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
	}
	nextGroup := func() {
		ADDQ(U32(uint32(a.bytes())), s)
		MOVQ(ldk, row)
		SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes)))), row)
		ADDQ(row, k)
	}
	for _, rows := range []int{4, 1} { // with the sums in registers
		label := fmt.Sprintf("rows%d", rows)
		CMPQ(heads, Imm(uint64(rows)))
		JNE(LabelRef(label + "_not"))
		loop(label, groups, 1, func() {
			MOVQ(k, kp)
			MOVQ(q, qp)
			acc := a.vecs(rows)
			for r := range acc {
				a.zero(acc[r])
			}
			MOVQ(chunks, h)
			MOVQ(h, c)
			loop(label+"_chunk", c, 1, func() {
				multiply(square(label), acc, qp)
				advance(a.bytes(), kp, qp)
			})
			MOVQ(s, sp)
			for r := range acc {
				VMOVUPS(acc[r], rowAt(sp, lds, lds3, r, 0))
			}
			nextGroup()
		})
		JMP(LabelRef("end"))
		Label(label + "_not")
	}
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
			t := square("chunk")
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
				acc := a.vecs(n)
				for r := range acc {
					VMOVUPS(rowAt(sums[r/4], lds, lds3, r%4, 0), acc[r])
				}
				multiply(t, acc, queries...)
				for r := range acc {
					VMOVUPS(acc[r], rowAt(sums[r/4], lds, lds3, r%4, 0))
				}
				if n == 8 {
					LEAQ(Mem{Base: sums[1], Index: lds, Scale: 4}, sp)
					LEAQ(Mem{Base: queries[1], Index: ldq, Scale: 4}, qp)
				} else {
					skip(n, sp, lds)
					skip(n, qp, ldq)
				}
			}
			if a.wide() && !a.inOrder() {
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
			advance(a.bytes(), kp, qc)
		})
		nextGroup()
	})
	Label("end")
	ahead.save()
	end()
}
