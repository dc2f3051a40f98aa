package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// dotsWords is dotsFixed without VNNI: keys become integers of 16 bits, as the query rows are, and
// VPMADDWD adds their products in pairs. Sums of integers are exact in any order, so the words of
// keys are not transposed: eight keys have a vector of sums each, whose lanes are added at the end.
func (a *isa) dotsWords(e element) {
	a.oneOf("dots", tables.Which{Element: "Fixed"})
	const step = 16 // elements of each key
	s, k, ldk, groups := param("s"), param("k"), param("ldk"), argument("groups")
	ldk3, kp, kp4, q, left := tripled(ldk), GP64(), GP64(), GP64(), GP64()
	second, hop := pairRuns(a.lanes, ldk)
	scales, run, before, row, sp, heads := AllocLocal(a.bytes()), AllocLocal(8), AllocLocal(8), AllocLocal(8), AllocLocal(8), AllocLocal(8)
	MOVQ(argument("run"), q)
	MOVQ(q, run)
	MOVQ(U32(pairedRun/8), before) // groups before the second run, if there is one
	key := func(i, disp int) Mem { return rowAt([]reg.Register{kp, kp4}[i/4], ldk, ldk3, i%4, disp) }
	fetch := func(label string) {
		ahead := continued(run)
		ahead.prefetch(label, 1)
		ahead.save()
	}
	// open sets the first keys of a query row.
	open := func() {
		MOVQ(k, kp)
		LEAQ(Mem{Base: k, Index: ldk, Scale: 4}, kp4)
	}
	// scores computes those of the query row at row, with the keys' scales.
	scores := func(label string, scale reg.VecVirtual, first bool) {
		sums, words := a.vecs(8), a.vec()
		for i := range sums {
			a.zero(sums[i])
		}
		MOVQ(row, q)
		MOVQ(argument("chunks"), left)
		SHRQ(Imm(1), left) // of 8 elements
		loop(label, left, 1, func() {
			if first { // lines for two steps
				TESTQ(U32(1), left)
				JNZ(LabelRef(label + "_odd"))
				fetch(label)
				Label(label + "_odd")
			}
			VMOVUPS(Mem{Base: q}, words)
			for i := range sums {
				x := a.vec()
				VPMOVSXBW(key(i, e.lead), x)
				VPMADDWD(words, x, x)
				VPADDD(x, sums[i], sums[i])
			}
			ADDQ(Imm(step), kp)
			ADDQ(Imm(step), kp4)
			ADDQ(Imm(2*step), q)
		})
		for n := 4; n > 1; n /= 2 {
			for i := range n {
				VPHADDD(sums[2*i+1], sums[2*i], sums[i])
			}
		}
		low, high := a.vec(), a.vec()
		VPERM2I128(Imm(0x20), sums[1], sums[0], low)
		VPERM2I128(Imm(0x31), sums[1], sums[0], high)
		VPADDD(high, low, low)
		VCVTDQ2PS(low, low)
		VMULPS(scale, low, low)
		VBROADCASTSS(Mem{Base: q}, high) // the row's unit
		VMULPS(high, low, low)
		MOVQ(sp, q)
		VMOVUPS(low, Mem{Base: q})
	}
	loop("group", groups, 1, func() {
		open()
		for i := range a.lanes {
			scale := GP32()
			MOVL(key(i, 0), scale)
			MOVL(scale, scales.Offset(4*i))
		}
		scale := a.finiteScales(scales)
		MOVQ(s, sp)
		MOVQ(argument("q"), q)
		MOVQ(q, row)
		MOVQ(argument("heads"), q)
		MOVQ(q, heads)
		TESTQ(U32(3), groups)
		JNZ(LabelRef("short"))
		fetch("lead") // the rows are longer than their elements
		Label("short")
		scores("first", scale, true)
		DECQ(heads)
		JZ(LabelRef("scored"))
		loop("head", heads, 1, func() {
			MOVQ(argument("lds"), q)
			ADDQ(q, sp)
			MOVQ(argument("ldq"), q)
			ADDQ(q, row)
			open()
			scores("other", scale, false)
		})
		Label("scored")
		ADDQ(Imm(uint64(a.bytes())), s)
		LEAQ(Mem{Base: k, Index: ldk, Scale: 8}, k)
		DECQ(before)
		JNZ(LabelRef("same"))
		ADDQ(hop, k)
		MOVQ(second, q)
		MOVQ(q, run)
		Label("same")
	})
	end()
}
