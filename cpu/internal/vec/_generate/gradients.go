package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// outerSum adds sums over lanes to o, a tile of rows and vectors groups times.
func (a *isa) outerSum(rows, vectors int) {
	a.oneOf("outer", tables.Which{Rows: rows, Vectors: vectors})
	o, ldo, x, ldx, n, p, groups := param("o"), param("ldo"), param("x"), param("ldx"), param("n"), param("p"), param("groups")
	xp, pp := GP64(), GP64()
	acc, b, t := a.accumulators(rows, vectors), a.vecs(vectors), a.vecs(a.temps)
	Label("group")
	MOVQ(x, xp)
	MOVQ(p, pp)
	a.clear(acc)
	byFour("lane", n, func(m int) {
		for u := range m {
			a.load(xp, b)
			a.outer(acc, b, t, u, func(i int) Mem { return Mem{Base: pp, Disp: i*a.rowBytes() + 4*u} })
			ADDQ(ldx, xp)
		}
		ADDQ(Imm(uint64(4*m)), pp)
	})
	for i := range acc {
		for j := range acc[i] {
			VADDPS(a.at(o, j), acc[i][j], acc[i][j])
			VMOVUPS(acc[i][j], a.at(o, j))
		}
		ADDQ(ldo, o)
	}
	ADDQ(U32(uint32(rows*a.rowBytes())), p)
	DECQ(groups)
	JNZ(LabelRef("group"))
	end()
}

// outerTile returns the rows and the vectors of outerSum's register tile. On AVX2 it is 6
// rows of 2 vectors, not 4 of 3, because head sizes are rarely multiples of 3 vectors.
func (a *isa) outerTile() (rows, vectors int) {
	if a.wide() {
		return 4, 4
	}
	return 6, 2
}

// scoreGradients replaces rows of all lanes of ds, the gradients of weights, by those of scores.
func (a *isa) scoreGradients() {
	a.kernel("scoreGradients")
	ds, p, w, rows, dots := param("ds"), param("p"), param("w"), param("rows"), param("dots")
	factor, zero := a.broadcastParam("factor"), a.vec()
	a.zero(zero)
	dot := a.row(dots)
	loop("row", rows, 1, func() {
		for j := range dot {
			x, weight := a.vec(), a.vec()
			VMULPS(a.at(ds, j), factor, x)
			VMOVUPS(a.at(w, j), weight)
			a.where(weight, zero, zero, x)
			VSUBPS(dot[j], x, x)
			VMOVUPS(a.at(p, j), weight)
			VMULPS(weight, x, x)
			a.where(weight, zero, zero, x)
			VMOVUPS(x, a.at(ds, j))
		}
		advance(a.rowBytes(), ds, p, w)
	})
	end()
}
