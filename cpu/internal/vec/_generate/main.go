// Command main writes the assembly of package vec, and its tables in tables_amd64.go:
//
//	go run . -out ../vec_amd64.s -stubs ../vec_amd64.go -pkg vec
//
// It is a module of its own, so programs that import attn do not download it. Each
// kernel is written once and generated for both instruction sets; isa.go has most
// of the differences.
package main

import (
	. "github.com/mmcloughlin/avo/build"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

func main() {
	ConstraintExpr("amd64")
	layConstants()
	for _, a := range []*isa{avx512, avx2} {
		a.tile()
		a.exp2()
		a.exp2Sum()
		a.scaleMax()
		a.rowWeights()
		a.softcap()
		a.bias()
		rows, vectors := a.outerTile()
		for _, rows := range []int{1, rows} {
			for _, vectors := range []int{1, vectors} {
				a.outerSum(rows, vectors)
			}
		}
		a.scoreGradients()
		a.nonFinite()
		a.transpose()
		a.join()
		a.bound()
		a.hideRow()
		a.dropRow()
		a.loadF16()
		a.loadBF16()
		a.loadQ8()
		a.loadQ4()
		a.loadF8()
		a.storeF16()
		a.storeBF16()
		a.rankOne()
		a.productSum()
		a.silu()
		a.sumsFrom()
		for _, e := range elements {
			if e.split == nil {
				a.dotsF32()
			} else {
				a.dots(e)
			}
			switch {
			case e.lead > 0 && a.wide():
				a.dotsFixed(e)
			case e.lead > 0:
				a.dotsWords(e)
			}
			a.mixes(e)
		}
	}
	for _, e := range elements[:3] {
		if e.split == nil {
			ordered.dotsF32()
		} else {
			ordered.dots(e)
		}
		ordered.mixes(e)
	}
	avx2.dots(elementF8)
	avx2.mixes(elementF8)
	avx512.dots(elementF8)
	for _, tile := range [][2]int{{8, 2}, {8, 1}, {4, 4}, {4, 1}, {1, 4}, {1, 1}} {
		avx512.mix(elementF8, tile[0], tile[1])
	}
	vbmi.dots(elementF8)
	vbmi.mixes(elementF8)
	avx512.dotsQ4()
	for _, tile := range [][2]int{{8, 2}, {4, 4}, {4, 2}, {1, 8}, {1, 4}, {1, 2}} {
		avx512.mix(elementQ4, tile[0], tile[1])
	}
	for _, a := range narrow {
		a.tile()
	}
	for _, rows := range half.rows {
		half.scores(rows)
	}
	half.scorePairs()
	half.softmax()
	half.exp2()
	half.rowWeights()
	half.softcap()
	avx512.rowValues(half, 2)
	half.foldRows()
	x1 := narrow[1]
	avx512.rowValues(x1, 1)
	x1.foldRows()
	avx512.turn("turn", 1)
	avx512.turn("turnPairs", 2)
	avx512.roundPairs()
	avx512.pairFMAs()
	cpuid()
	prefetchRows()
	for _, a := range []*isa{avx512, narrow[0], narrow[1]} {
		a.pairScores()
		a.pairValues()
		a.dotScores()
		a.pairWeights()
		a.dotValues()
	}
	// An FMA takes 4 or 5 cycles and at most 2 start in each, so 10 chains are enough; 16 also
	// suit narrower units. AVX2 has 16 registers, two of which hold constants.
	avx512.fma(16)
	avx2.fma(12)
	avx512.read()
	avx2.read()
	Generate()
	// 8 query rows fill half a vector, but the weights of one row a whole one.
	tables.Share("dropRow", avx512.name, half.name)
	tables.Share("fold", "AVX2x1", half.name)
	halfTable := half.table()
	halfTable.RowLanes = avx512.lanes
	all := []tables.Table{avx512.table(), avx2.table(), ordered.table(), vbmi.table(), halfTable}
	for _, a := range narrow {
		all = append(all, a.table())
	}
	tables.Write("../tables_amd64.go", all...)
}

// mixes writes the value products of rows of type e.
func (a *isa) mixes(e element) {
	four := 4
	if !a.inOrder() {
		four = min(4, 128/(e.bytes*a.lanes)) // with float32, strips of 256 bytes wait for memory
	}
	for _, tile := range tables.MixTiles(e.bytes, four) {
		if tile[0] < 8 || !a.inOrder() {
			a.mix(e, tile[0], tile[1])
		}
	}
}

// tile writes the kernels that depend on the number of query rows in a tile, except those
// of gradients: their sums over the lanes of a tile would change.
func (a *isa) tile() {
	for _, rows := range a.rows {
		a.scores(rows)
		a.values(rows)
	}
	if a.stepped() {
		a.partialScores()
	}
	a.softmax()
	a.fold()
}

// softmax writes the kernels between the two products of a tile.
func (a *isa) softmax() {
	a.weights()
	a.edge()
	a.columnMax()
	a.biasSquares()
	a.diagonal()
	a.slopes()
	a.hide()
	a.drop()
}
