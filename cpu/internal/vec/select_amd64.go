package vec

import "golang.org/x/sys/cpu"

// assembly lists the tables of assembly kernels that this machine runs, the
// widest first.
var assembly = func() (list []*Kernels) {
	x := &cpu.X86
	if !x.HasAVX2 || !x.HasFMA {
		return nil
	}
	kernelsAVX2.narrow = []*Kernels{
		kernelsAVX2.narrowed(1, tileKernels{
			tiles:   []registerTile{{12, scores12AVX2x1, values12AVX2x1}, {8, scores8AVX2x1, values8AVX2x1}, {1, scores1AVX2x1, values1AVX2x1}},
			weights: weightsAVX2x1, edge: edgeAVX2x1, columnMax: columnMaxAVX2x1, fold: foldAVX2x1,
			biasSquares: biasSquaresAVX2x1, diagonal: diagonalAVX2x1, slopes: slopesAVX2x1,
			hide: hideAVX2x1, drop: dropAVX2x1,
		}),
		kernelsAVX2.narrowed(2, tileKernels{
			tiles:   []registerTile{{6, scores6AVX2x2, values6AVX2x2}, {4, scores4AVX2x2, values4AVX2x2}, {1, scores1AVX2x2, values1AVX2x2}},
			weights: weightsAVX2x2, edge: edgeAVX2x2, columnMax: columnMaxAVX2x2, fold: foldAVX2x2,
			biasSquares: biasSquaresAVX2x2, diagonal: diagonalAVX2x2, slopes: slopesAVX2x2,
			hide: hideAVX2x2, drop: dropAVX2x2,
		}),
	}
	if x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL && x.HasBMI2 {
		// 8 query rows fill half a vector; all but the products take vectors of 8.
		half := kernelsAVX2.narrowed(1, tileKernels{
			tiles:   []registerTile{{32, scores32AVX512Half, nil}, {16, scores16AVX512Half, nil}, {4, scores4AVX512Half, nil}, {1, scores1AVX512Half, nil}},
			weights: weightsAVX512Half, edge: edgeAVX512Half, columnMax: columnMaxAVX512Half, fold: foldAVX2x1, halfValues: halfValuesAVX512,
			biasSquares: biasSquaresAVX512Half, diagonal: diagonalAVX512Half, slopes: slopesAVX512Half,
			hide: hideAVX512Half, drop: dropAVX512Half,
		})
		half.Tier, half.exp2, half.softcap = kernelsAVX512.Tier, exp2AVX512Half, softcapAVX512Half
		half.rowWeights, half.dropRow, half.rowLanes = rowWeightsAVX512Half, dropRowAVX512, kernelsAVX512.Lanes
		kernelsAVX512.narrow = []*Kernels{
			half,
			kernelsAVX512.narrowed(1, tileKernels{
				tiles:   []registerTile{{16, scores16AVX512x1, values16AVX512x1}, {4, scores4AVX512x1, values4AVX512x1}, {1, scores1AVX512x1, values1AVX512x1}},
				weights: weightsAVX512x1, edge: edgeAVX512x1, columnMax: columnMaxAVX512x1, fold: foldAVX512x1,
				biasSquares: biasSquaresAVX512x1, diagonal: diagonalAVX512x1, slopes: slopesAVX512x1,
				hide: hideAVX512x1, drop: dropAVX512x1,
			}),
			kernelsAVX512.narrowed(2, tileKernels{
				tiles:   []registerTile{{8, scores8AVX512x2, values8AVX512x2}, {4, scores4AVX512x2, values4AVX512x2}, {1, scores1AVX512x2, values1AVX512x2}},
				weights: weightsAVX512x2, edge: edgeAVX512x2, columnMax: columnMaxAVX512x2, fold: foldAVX512x2,
				biasSquares: biasSquaresAVX512x2, diagonal: diagonalAVX512x2, slopes: slopesAVX512x2,
				hide: hideAVX512x2, drop: dropAVX512x2,
			}),
		}
		list = append(list, &kernelsAVX512)
	}
	// F16C has no flag in x/sys/cpu: every processor with AVX2 has it.
	return append(list, &kernelsAVX2)
}()

var kernelsAVX512 = Kernels{
	Tier: "avx512", Lanes: 16, Width: 64,
	tile: tileKernels{
		tiles:   []registerTile{{4, scores4AVX512, values4AVX512}, {1, scores1AVX512, values1AVX512}},
		weights: weightsAVX512, edge: edgeAVX512, columnMax: columnMaxAVX512, fold: foldAVX512,
		biasSquares: biasSquaresAVX512, diagonal: diagonalAVX512, slopes: slopesAVX512,
		hide: hideAVX512, drop: dropAVX512,
	},
	hideRow: hideRowAVX512, scoreGradients: scoreGradientsAVX512, transpose: transposeAVX512,
	exp2: exp2AVX512, exp2Sum: exp2SumAVX512, scaleMax: scaleMaxAVX512, rowWeights: rowWeightsAVX512, softcap: softcapAVX512,
	bias: biasAVX512, join: joinAVX512, bound: boundAVX512, dropRow: dropRowAVX512, nonFinite: nonFiniteAVX512,
	loadF16: loadF16AVX512, loadBF16: loadBF16AVX512, loadQ8: loadQ8AVX512, storeF16: storeF16AVX512,
	outerRows: 4, outerVectors: 4, outer: [2][2]outerFunc{{outer1x1AVX512, outer1x4AVX512}, {outer4x1AVX512, outer4x4AVX512}},
	dots: [elements]dotsFunc{F32: dotsAVX512, F16: dotsF16AVX512, BF16: dotsBF16AVX512, Q8: dotsQ8AVX512},
	mix: [elements]mixes{
		F32:  {{mix1x1AVX512, mix1x4AVX512, mix1x8AVX512}, {mix4x1AVX512, mix4x4AVX512}, {mix8x1AVX512, mix8x2AVX512}},
		F16:  {{mixF161x1AVX512, mixF161x4AVX512, mixF161x8AVX512}, {mixF164x1AVX512, mixF164x4AVX512}, {mixF168x1AVX512, mixF168x2AVX512}},
		BF16: {{mixBF161x1AVX512, mixBF161x4AVX512, mixBF161x8AVX512}, {mixBF164x1AVX512, mixBF164x4AVX512}, {mixBF168x1AVX512, mixBF168x2AVX512}},
		Q8:   {{mixQ81x1AVX512, mixQ81x4AVX512, mixQ81x8AVX512}, {mixQ84x1AVX512, mixQ84x4AVX512}, {mixQ88x1AVX512, mixQ88x2AVX512}},
	},
}

var kernelsAVX2 = Kernels{
	Tier: "avx2", Lanes: 8, Width: 24,
	tile: tileKernels{
		tiles:   []registerTile{{4, scores4AVX2, values4AVX2}, {1, scores1AVX2, values1AVX2}},
		weights: weightsAVX2, edge: edgeAVX2, columnMax: columnMaxAVX2, fold: foldAVX2,
		biasSquares: biasSquaresAVX2, diagonal: diagonalAVX2, slopes: slopesAVX2,
		hide: hideAVX2, drop: dropAVX2,
	},
	hideRow: hideRowAVX2, scoreGradients: scoreGradientsAVX2, transpose: transposeAVX2,
	exp2: exp2AVX2, exp2Sum: exp2SumAVX2, scaleMax: scaleMaxAVX2, rowWeights: rowWeightsAVX2, softcap: softcapAVX2,
	bias: biasAVX2, join: joinAVX2, bound: boundAVX2, dropRow: dropRowAVX2, nonFinite: nonFiniteAVX2,
	loadF16: loadF16AVX2, loadBF16: loadBF16AVX2, loadQ8: loadQ8AVX2, storeF16: storeF16AVX2,
	outerRows: 6, outerVectors: 2, outer: [2][2]outerFunc{{outer1x1AVX2, outer1x2AVX2}, {outer6x1AVX2, outer6x2AVX2}},
	dots: [elements]dotsFunc{F32: dotsAVX2, F16: dotsF16AVX2, BF16: dotsBF16AVX2, Q8: dotsQ8AVX2},
	mix: [elements]mixes{
		F32:  {{mix1x1AVX2, mix1x4AVX2, mix1x8AVX2}, {mix4x1AVX2, mix4x4AVX2}, {mix8x1AVX2, mix8x2AVX2}},
		F16:  {{mixF161x1AVX2, mixF161x4AVX2, mixF161x8AVX2}, {mixF164x1AVX2, mixF164x4AVX2}, {mixF168x1AVX2, mixF168x2AVX2}},
		BF16: {{mixBF161x1AVX2, mixBF161x4AVX2, mixBF161x8AVX2}, {mixBF164x1AVX2, mixBF164x4AVX2}, {mixBF168x1AVX2, mixBF168x2AVX2}},
		Q8:   {{mixQ81x1AVX2, mixQ81x4AVX2, mixQ81x8AVX2}, {mixQ84x1AVX2, mixQ84x4AVX2}, {mixQ88x1AVX2, mixQ88x2AVX2}},
	},
}
