package vec

import "golang.org/x/sys/cpu"

// assembly lists the tables of assembly kernels that this machine runs, the
// widest first.
var assembly = func() (list []*Kernels) {
	x := &cpu.X86
	if !x.HasAVX2 || !x.HasFMA {
		return nil
	}
	if x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL {
		list = append(list, &kernelsAVX512)
	}
	// F16C has no flag in x/sys/cpu: every processor with AVX2 has it.
	return append(list, &kernelsAVX2)
}()

var kernelsAVX512 = Kernels{
	Tier: "avx512", Lanes: 16, Width: 64,
	scores4: scores4AVX512, scores1: scores1AVX512, values4: values4AVX512, values1: values1AVX512, weights: weightsAVX512,
	biasSquare: biasSquareAVX512, diagonal: diagonalAVX512, hide: hideAVX512, hideRow: hideRowAVX512, edge: edgeAVX512, columnMax: columnMaxAVX512,
	fold: foldAVX512, scoreGradients: scoreGradientsAVX512, drop: dropAVX512, transpose: transposeAVX512,
	exp2: exp2AVX512, exp2Sum: exp2SumAVX512, scaleMax: scaleMaxAVX512, softcap: softcapAVX512,
	bias: biasAVX512, join: joinAVX512, bound: boundAVX512, dropRow: dropRowAVX512, nonFinite: nonFiniteAVX512,
	loadF16: loadF16AVX512, loadBF16: loadBF16AVX512, loadQ8: loadQ8AVX512, storeF16: storeF16AVX512,
	outerRows: 4, outerVectors: 4, outer: [2][2]outerFunc{{outer1x1AVX512, outer1x4AVX512}, {outer4x1AVX512, outer4x4AVX512}},
	dots: [elements]dotsFunc{F32: dotsAVX512, F16: dotsF16AVX512, BF16: dotsBF16AVX512, Q8: dotsQ8AVX512},
	mix: [elements]mixes{
		F32:  {{mix1x1AVX512, mix1x8AVX512}, {mix4x1AVX512, mix4x4AVX512}, {mix8x1AVX512, mix8x2AVX512}},
		F16:  {{mixF161x1AVX512, mixF161x8AVX512}, {mixF164x1AVX512, mixF164x4AVX512}, {mixF168x1AVX512, mixF168x2AVX512}},
		BF16: {{mixBF161x1AVX512, mixBF161x8AVX512}, {mixBF164x1AVX512, mixBF164x4AVX512}, {mixBF168x1AVX512, mixBF168x2AVX512}},
		Q8:   {{mixQ81x1AVX512, mixQ81x8AVX512}, {mixQ84x1AVX512, mixQ84x4AVX512}, {mixQ88x1AVX512, mixQ88x2AVX512}},
	},
}

var kernelsAVX2 = Kernels{
	Tier: "avx2", Lanes: 8, Width: 24,
	scores4: scores4AVX2, scores1: scores1AVX2, values4: values4AVX2, values1: values1AVX2, weights: weightsAVX2,
	biasSquare: biasSquareAVX2, diagonal: diagonalAVX2, hide: hideAVX2, hideRow: hideRowAVX2, edge: edgeAVX2, columnMax: columnMaxAVX2,
	fold: foldAVX2, scoreGradients: scoreGradientsAVX2, drop: dropAVX2, transpose: transposeAVX2,
	exp2: exp2AVX2, exp2Sum: exp2SumAVX2, scaleMax: scaleMaxAVX2, softcap: softcapAVX2,
	bias: biasAVX2, join: joinAVX2, bound: boundAVX2, dropRow: dropRowAVX2, nonFinite: nonFiniteAVX2,
	loadF16: loadF16AVX2, loadBF16: loadBF16AVX2, loadQ8: loadQ8AVX2, storeF16: storeF16AVX2,
	outerRows: 6, outerVectors: 2, outer: [2][2]outerFunc{{outer1x1AVX2, outer1x2AVX2}, {outer6x1AVX2, outer6x2AVX2}},
	dots: [elements]dotsFunc{F32: dotsAVX2, F16: dotsF16AVX2, BF16: dotsBF16AVX2, Q8: dotsQ8AVX2},
	mix: [elements]mixes{
		F32:  {{mix1x1AVX2, mix1x8AVX2}, {mix4x1AVX2, mix4x4AVX2}, {mix8x1AVX2, mix8x2AVX2}},
		F16:  {{mixF161x1AVX2, mixF161x8AVX2}, {mixF164x1AVX2, mixF164x4AVX2}, {mixF168x1AVX2, mixF168x2AVX2}},
		BF16: {{mixBF161x1AVX2, mixBF161x8AVX2}, {mixBF164x1AVX2, mixBF164x4AVX2}, {mixBF168x1AVX2, mixBF168x2AVX2}},
		Q8:   {{mixQ81x1AVX2, mixQ81x8AVX2}, {mixQ84x1AVX2, mixQ84x4AVX2}, {mixQ88x1AVX2, mixQ88x2AVX2}},
	},
}
