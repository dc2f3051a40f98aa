package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// A row of Q4 is blocks of 32 elements: a scale in float16, and bytes of two integers. The lower
// halves of the bytes are the first 16 elements.
const q4Elements, q4Bytes, q4Lead = 32, 18, 2

// elementQ4 is not one of elements: a vector has no part of a row to itself.
var elementQ4 = element{suffix: "Q4", bytes: 1}

// span returns the bytes of n elements.
func (e element) span(n int) int {
	if e.suffix == elementQ4.suffix {
		return n / q4Elements * q4Bytes
	}
	return n * e.bytes
}

// loadQ4 writes rows of Q4 as float32.
func (a *isa) loadQ4() {
	var numbers reg.VecVirtual
	a.loadRows("Q4", "block", q4Elements/a.lanes, q4Bytes, func() { numbers = a.q4Numbers() }, func(reg.GPVirtual) {}, func(from Mem, x []reg.VecVirtual) {
		a.blockQ4(from, numbers, x)
	})
}

// q4Numbers returns -8 to 7, one to a lane, or in AVX2 8 in each.
func (a *isa) q4Numbers() reg.VecVirtual {
	if a.wide() {
		return a.constant(cNumbers)
	}
	return a.constant(cEight)
}

// blockQ4 reads the block at m.
func (a *isa) blockQ4(m Mem, numbers reg.VecVirtual, x []reg.VecVirtual) {
	scale := a.vec()
	if a.wide() { // the integers choose among the 16 products
		VCVTPH2PS(m, scale.AsX())
		VBROADCASTSS(scale.AsX(), scale)
		VMULPS(numbers, scale, scale)
		n := a.vec()
		VPMOVZXBD(m.Offset(q4Lead), n)
		VPERMPS(scale, n, x[0])
		VPSRLD(Imm(4), n, n)
		VPERMPS(scale, n, x[1])
		return
	}
	VPBROADCASTW(m, scale.AsX())
	VCVTPH2PS(scale.AsX(), scale)
	for i := range 2 {
		lower := x[i]
		VPMOVZXBD(m.Offset(q4Lead+8*i), lower)
		VPSRLD(Imm(4), lower, x[2+i])
		VPAND(cLow4.mem(), lower, lower)
	}
	for i := range x {
		VPSUBD(numbers, x[i], x[i])
		VCVTDQ2PS(x[i], x[i])
		VMULPS(scale, x[i], x[i])
	}
}

// dotsQ4 is dots for rows of Q4. It transposes the words of a block as dots does. Where the fraction of
// 2^15 or of 2^7 counts ones, an integer n makes 2^15+n, of which one FMA makes scale·(n-8): it
// adds -(2^15+8)·scale, which float32 has exactly, because the scale has 11 bits.
func (a *isa) dotsQ4() {
	a.oneOf("dots", tables.Which{Element: "Q4"})
	d := &dotsQ4Kernel{dotsKernel: dotsKernel{isa: a, element: element{lead: q4Lead, bytes: 1}, ldk: param("ldk"), sp: AllocLocal(8), kp: AllocLocal(8), count: AllocLocal(8)}}
	d.ldk3 = tripled(d.ldk)
	for i := range d.mask {
		d.mask[i], d.power[i] = a.constant(cMask8+constant(i)), a.constant(cPower8+constant(i))
	}
	d.eachRows(map[int][]int{8: {1}, 4: {1}, 1: {2, 1}}, d.tile) // the chains of FMAs of two groups alternate
}

type dotsQ4Kernel struct {
	dotsKernel
	mask, power [2]reg.VecVirtual // of integers in bits 8 to 11 and 16 to 19
}

// tile computes the scores of rows query rows and of groups vectors of keys.
func (d *dotsQ4Kernel) tile(label string, rows, groups int) {
	a := d.isa
	t := &dotsTile{d: &d.dotsKernel, label: label, rows: rows, groups: groups}
	acc := make([][]reg.VecVirtual, groups)
	base := make([]reg.GPVirtual, groups)
	p := GP64()
	MOVQ(d.kp, p)
	for g := range groups {
		base[g] = GP64()
		MOVQ(p, base[g])
		acc[g] = a.vecs(rows)
		for r := range acc[g] {
			a.zero(acc[g][r])
		}
		far := GP64()
		MOVQ(d.ldk, far)
		SHLQ(Imm(4), far)
		ADDQ(far, p)
	}
	MOVQ(p, d.kp)
	t.openQueries()
	ahead := continued(argument("run"))
	ahead.prefetch(label, 1) // the blocks prefetch 8 of 9 lines
	loop(label+"_block", param("chunks"), q4Elements/a.lanes, func() {
		words, scale := make([][]reg.VecVirtual, groups), a.vecs(groups)
		bias := make([][2]reg.VecVirtual, groups)
		for g := range groups {
			d.scalesOf(base[g], t.at, scale[g])
			for i := range bias[g] {
				bias[g][i] = a.vec()
				VMULPS((cBias8 + constant(i)).mem(), scale[g], bias[g][i])
			}
			words[g] = d.words(4, base[g], t.at)
		}
		fetch := among(8, ahead.lines(label+"_ahead", groups))
		for upper := range 2 {
			for i := range 4 {
				fetch()
				turned := a.vecs(groups)
				for g := range groups {
					if upper == 1 {
						VPSRLD(Imm(4), words[g][i], words[g][i])
					}
					VPRORD(Imm(16), words[g][i], turned[g])
				}
				for b := range 4 {
					at := 1 - b%2 // byte 1, or 3 of turned, is in bits 8 to 15, byte 2, or 0 of turned, in 16 to 23
					for g := range groups {
						w, x := words[g][i], a.vec()
						if b == 0 || b == 3 {
							w = turned[g]
						}
						VPANDD(d.mask[at], w, x)
						VPORD(d.power[at], x, x) // faster on Zen 4 than a copy and VPTERNLOGD
						VFMADD213PS(bias[g][at], scale[g], x)
						for r := range rows {
							VFMADD231PS_BCST(t.query(r, 4*(16*upper+4*i+b)), x, acc[g][r])
						}
					}
				}
			}
		}
		ADDQ(U32(q4Bytes), t.at)
		for _, q := range t.queries {
			ADDQ(U32(4*q4Elements), q)
		}
	})
	ahead.save()
	t.acc = acc
	t.write()
}

// scalesOf reads the scales of the blocks at a place of 16 rows.
func (d *dotsQ4Kernel) scalesOf(base, at reg.GPVirtual, scale reg.VecVirtual) {
	p, halves := GP64(), []reg.VecVirtual{XMM(), XMM()}
	LEAQ(Mem{Base: base, Index: at, Scale: 1}, p)
	for lane := range 16 {
		m, x := rowAt(p, d.ldk, d.ldk3, lane%4, 0), halves[lane/8]
		if lane%8 == 0 {
			VPXOR(x, x, x)
		}
		VPINSRW(Imm(uint64(lane%8)), m, x, x)
		if lane%4 == 3 && lane < 15 {
			LEAQ(Mem{Base: p, Index: d.ldk, Scale: 4}, p)
		}
	}
	both := YMM()
	VINSERTI128(Imm(1), halves[1], halves[0].AsY(), both)
	VCVTPH2PS(both, scale)
}
