package vec

// assembly lists the tables of assembly kernels that this machine runs. Every processor
// that Go supports has NEON with FMAs and the conversions of binary16.
var assembly = []*Kernels{&kernelsNEON}

var kernelsNEON = Kernels{
	Tier: "neon", Lanes: 4, Width: 16,
	tile: tileKernels{
		tiles:   []registerTile{{4, scores4NEON, values4NEON}, {1, scores1NEON, values1NEON}},
		weights: weightsNEON, edge: edgeNEON, columnMax: columnMaxNEON, fold: foldNEON,
		biasSquares: biasSquaresNEON, diagonal: diagonalNEON, slopes: slopesNEON,
		hide: hideNEON, drop: dropNEON,
	},
	hideRow: hideRowNEON, scoreGradients: scoreGradientsNEON, transpose: transposeNEON,
	exp2: exp2NEON, exp2Sum: exp2SumNEON, scaleMax: scaleMaxNEON, rowWeights: rowWeightsNEON, softcap: softcapNEON,
	bias: biasNEON, join: joinNEON, bound: boundNEON, dropRow: dropRowNEON, nonFinite: nonFiniteNEON,
	loadF16: loadF16NEON, loadBF16: loadBF16NEON, loadQ8: loadQ8NEON, storeF16: storeF16NEON,
	outerRows: 4, outerVectors: 4, outer: [2][2]outerFunc{{outer1x1NEON, outer1x4NEON}, {outer4x1NEON, outer4x4NEON}},
	dots: [elements]dotsFunc{F32: dotsNEON, F16: dotsF16NEON, BF16: dotsBF16NEON, Q8: dotsQ8NEON},
	mix: [elements]mixes{
		F32:  {{mix1x1NEON, mix1x4NEON, mix1x8NEON}, {mix4x1NEON, mix4x4NEON}, {mix8x1NEON, mix8x2NEON}},
		F16:  {{mixF161x1NEON, mixF161x4NEON, mixF161x8NEON}, {mixF164x1NEON, mixF164x4NEON}, {mixF168x1NEON, mixF168x2NEON}},
		BF16: {{mixBF161x1NEON, mixBF161x4NEON, mixBF161x8NEON}, {mixBF164x1NEON, mixBF164x4NEON}, {mixBF168x1NEON, mixBF168x2NEON}},
		Q8:   {{mixQ81x1NEON, mixQ81x4NEON, mixQ81x8NEON}, {mixQ84x1NEON, mixQ84x4NEON}, {mixQ88x1NEON, mixQ88x2NEON}},
	},
}
