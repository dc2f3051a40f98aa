package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

const (
	pairs     = 16 // of keys in a tile of scorePairs
	pairDims  = 16 // elements of keys that it interleaves at once
	pairBytes = 2 * 4 * pairDims
)

// scorePairs is scores of 8 query rows with whole vectors: lane 2r has the first key of a
// pair and row r, lane 2r+1 the second key. It interleaves the keys of a pair, which takes
// two shuffles for 16 FMAs, and broadcasts two elements at a time from memory.
func (a *isa) scorePairs() {
	const rows = 2 * pairs
	// The stack frame is too large for NOSPLIT.
	a.text(a, "scores", tables.Which{Rows: rows}, 0)
	index := GLOBL("pairs", RODATA|NOPTR)
	for i := range 16 {
		DATA(4*i, U32(uint32(i/2)))
	}
	for i := range 16 {
		DATA(64+4*i, U32(uint32(i%8*2+i/8)))
	}
	s, k, ld, d, groups := param("s"), param("k"), param("ldk"), argument("d"), argument("groups")
	both := GP64()
	LEAQ(AllocLocal(pairs*pairBytes+64), both)
	ADDQ(Imm(63), both)
	ANDQ(I32(-64), both)
	_, hop := pairRuns(rows, ld)
	ahead := held(argument("run"))
	twice, apart, second := ZMM(), ZMM(), K()
	VMOVUPS(index, twice)
	VMOVUPS(index.Offset(64), apart)
	odd := GP64()
	MOVQ(U32(0xaaaa), odd)
	KMOVW(odd.As32(), second)
	acc := avx512.vecs(pairs)
	q, from, at, n := GP64(), GP64(), GP64(), GP64()
	query := func(i int) reg.VecVirtual {
		y, x := YMM(), ZMM()
		VMOVUPS(a.at(q, i), y)
		VPERMPS(y.AsZ(), twice, x)
		return x
	}
	nextPair := func(i int, at reg.GPVirtual) {
		if i < pairs-1 {
			LEAQ(Mem{Base: at, Index: ld, Scale: 2}, at)
		}
		if 2*(i+1) == pairedRun {
			ADDQ(hop, at)
		}
	}
	Label("group")
	ahead.overlap(2)
	for i := range acc {
		VPXORD(acc[i], acc[i], acc[i])
	}
	MOVQ(argument("qt"), q)
	MOVQ(k, from)
	MOVQ(d, n)
	SUBQ(Imm(pairDims), n)
	JL(LabelRef("rest"))
	Label("dims")
	MOVQ(from, at)
	for i := range acc {
		first, low, high := ZMM(), ZMM(), ZMM()
		VMOVUPS(Mem{Base: at}, first)
		other := Mem{Base: at, Index: ld, Scale: 1}
		VUNPCKLPS(other, first, low)
		VUNPCKHPS(other, first, high)
		VMOVUPS(low, Mem{Base: both, Disp: i * pairBytes})
		VMOVUPS(high, Mem{Base: both, Disp: i*pairBytes + 64})
		nextPair(i, at)
	}
	// The elements that come next, of these keys or the group after them in the run, move from
	// the second-level cache to the first: later they would wait behind lines from memory.
	next := GP64()
	LEAQ(Mem{Base: from, Disp: 4 * pairDims}, next)
	IMUL3Q(U32(rows), ld, at)
	ADDQ(k, at)
	CMPQ(groups, Imm(1))
	CMOVQEQ(from, at)
	CMPQ(n, Imm(pairDims))
	CMOVQLT(at, next)
	fetch := among(pairDims*pairs, ahead.lines("dims", rows*pairDims*4/256))
	for c := range pairDims {
		PREFETCHT0(Mem{Base: next})
		PREFETCHT0(Mem{Base: next, Index: ld, Scale: 1})
		nextPair(c, next)
		x := query(c)
		for i := range acc {
			two := ZMM()
			VBROADCASTSD(Mem{Base: both, Disp: i*pairBytes + c%4/2*64 + c/4*16 + c%2*8}, two)
			VFMADD231PS(two, x, acc[i])
			fetch()
		}
	}
	ADDQ(Imm(4*pairDims), from)
	ADDQ(U32(uint32(pairDims*a.bytes())), q)
	SUBQ(Imm(pairDims), n)
	JGE(LabelRef("dims"))
	Label("rest")
	ADDQ(Imm(pairDims), n)
	JZ(LabelRef("done"))
	Label("dim")
	MOVQ(from, at)
	x := query(0)
	for i := range acc {
		two := ZMM()
		VBROADCASTSS(Mem{Base: at}, two)
		VBROADCASTSS(Mem{Base: at, Index: ld, Scale: 1}, second, two)
		VFMADD231PS(two, x, acc[i])
		nextPair(i, at)
	}
	ADDQ(Imm(4), from)
	ADDQ(Imm(uint64(a.bytes())), q)
	DECQ(n)
	JNZ(LabelRef("dim"))
	Label("done")
	for i := range acc {
		VPERMPS(acc[i], apart, acc[i])
		VMOVUPS(acc[i], Mem{Base: s, Disp: i * 64})
	}
	for step := 1; step < pairs; step *= 2 {
		for i := 0; i < pairs; i += 2 * step {
			VMAXPS(acc[i+step], acc[i], acc[i])
		}
	}
	half, mx := YMM(), param("mx")
	VEXTRACTF64X4(Imm(1), acc[0], half)
	VMAXPS(acc[0].AsY(), half, half)
	VMAXPS(a.at(mx, 0), half, half)
	VMOVUPS(half, a.at(mx, 0))
	ADDQ(U32(pairs*64), s)
	IMUL3Q(U32(rows), ld, at)
	ADDQ(at, k)
	DECQ(groups)
	JNZ(LabelRef("group"))
	ahead.save()
	end()
}
