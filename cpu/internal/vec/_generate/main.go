// Command main writes the assembly of package vec:
//
//	go run . -out ../vec_amd64.s -stubs ../vec_amd64.go -pkg vec
//
// It is a module of its own, so programs that import attn do not download it. Each
// kernel is written once and generated for both instruction sets; isa.go has most
// of the differences.
package main

import . "github.com/mmcloughlin/avo/build"

func main() {
	ConstraintExpr("amd64")
	layConstants()
	for _, a := range []*isa{avx512, avx2} {
		for _, rows := range []int{4, 1} {
			a.scores(rows)
			a.values(rows)
		}
		a.weights()
		a.exp2()
		a.exp2Sum()
		a.scaleMax()
		a.softcap()
		a.bias()
		a.edge()
		a.columnMax()
		a.fold()
		rows, vectors := a.outerTile()
		for _, rows := range []int{1, rows} {
			for _, vectors := range []int{1, vectors} {
				a.outerSum(rows, vectors)
			}
		}
		a.scoreGradients()
		a.nonFinite()
		a.transpose()
		a.biasSquare()
		a.diagonal()
		a.join()
		a.bound()
		a.hide()
		a.hideRow()
		a.drop()
		a.dropRow()
		a.loadF16()
		a.loadBF16()
		a.loadQ8()
		a.storeF16()
		for _, e := range elements {
			a.dots(e)
			a.mix(e, 8, 2)
			a.mix(e, 8, 1)
			a.mix(e, 4, 4)
			a.mix(e, 4, 1)
			a.mix(e, 1, 8)
			a.mix(e, 1, 1)
		}
	}
	Generate()
}
