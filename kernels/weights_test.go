package kernels

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// normal returns a tensor of normally distributed numbers.
func normal(t *testing.T, rng *rand.Rand, s Shape) Tensor {
	data := make([]float32, s.Elements())
	for i := range data {
		data[i] = float32(rng.NormFloat64())
	}
	return must.Get(HostF32(data, s))(t)
}

// halves returns segments of n elements: one up to at, and another one.
func halves(n, at int) [][]int32 {
	ids := make([]int32, n)
	for i := at; i < n; i++ {
		ids[i] = 1
	}
	return [][]int32{ids}
}

// TestTopWeightsInChunks: for every chunk size and every cut by options, the result is that of one chunk, which the conformance
// suite compares with all weights.
func TestTopWeightsInChunks(t *testing.T) {
	dev := NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	const b, h, sq, sk, n = 2, 4, 41, 53, 7
	rng := rand.New(rand.NewPCG(1, 2))
	tensor := func(s Shape) Tensor { return normal(t, rng, s) }
	bools := func(s Shape) Tensor {
		data := make([]bool, s.Elements())
		for i := range data {
			data[i] = rng.IntN(3) > 0
		}
		return must.Get(HostBool(data, s))(t)
	}
	q, k := tensor(Shape{b, h, sq, 8}), tensor(Shape{b, 2, sk, 8})
	whole := weightChunk
	defer func() { weightChunk = whole }()
	for name, opt := range map[string]Options{
		"plain":     {},
		"causal":    {Causal: true, Prefix: []int{20}, KLen: []int{5, 50}},
		"segments":  {QSegments: halves(sq, 13), KSegments: halves(sk, 24), BlockMask: bools(Shape{1, h, 6, 7}), BlockSize: 8},
		"short":     {Mask: bools(Shape{1, 1, sq, 40}), Bias: tensor(Shape{b, h, 1, sk})},
		"dropout":   {Dropout: Dropout{P: 0.5, Seed: 4}, ALiBi: []float32{1, 2, 3, 4, 5, 6, 7, 8}},
		"no weight": {KLen: []int{0, 0}},
	} {
		want := must.Get(dev.TopWeights(t.Context(), q, k, n, opt))(t)
		for _, weightChunk = range []int{1, sk * 3, sk * h * 9} {
			got := must.Get(dev.TopWeights(t.Context(), q, k, n, opt))(t)
			if !slices.Equal(got.Keys, want.Keys) || !slices.Equal(got.Weights, want.Weights) {
				t.Errorf("%s, %d weights at a time: keys %v..., should be %v...", name, weightChunk, got.Keys[:4*n], want.Keys[:4*n])
			}
		}
		weightChunk = whole
	}
}

func TestTopWeightsRefuses(t *testing.T) {
	q, k := meta(t, F32, 2, 4, 8, 16), meta(t, F32, 2, 2, 9, 16)
	must.Fail(t, "no weights", must.Err(refusing(t).TopWeights(t.Context(), q, k, 0, Options{})), ErrOption, "n is 0")
	must.Fail(t, "k for q", must.Err(refusing(t).TopWeights(t.Context(), k, q, 3, Options{})), ErrShape)
	must.Fail(t, "pages", must.Err(refusing(t).TopWeights(t.Context(), q, k, 3, Options{Pages: &Pages{}})), ErrUnsupported)
	dev := NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	dead, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", must.Err(dev.TopWeights(dead, q, k, 3, Options{})), context.Canceled)
}

// TestEachWeightRow compares ranges of the weights with all weights of Device.Attention, over
// more rows than a chunk has.
func TestEachWeightRow(t *testing.T) {
	ctx := t.Context()
	dev := NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	const batch, heads, kvHeads, dim, seqQ, seqK = 2, 4, 2, 8, rangeRows + 60, 190
	tensor := func(s Shape) Tensor { return normal(t, rng, s) }
	q := tensor(Shape{batch, heads, seqQ, dim})
	k := tensor(Shape{batch, kvHeads, seqK, dim})
	bias := tensor(Shape{batch, 1, seqQ, seqK})
	bools := make([]bool, heads*seqK)
	for i := range bools {
		bools[i] = i%7 != 3
	}
	mask := must.Get(HostBool(bools, Shape{1, heads, 1, seqK}))(t)
	blocks := must.Get(HostBool(bools[:32*19], Shape{1, 1, 32, 19}))(t)
	for _, tt := range []struct {
		name string
		opt  Options
	}{
		{"plain", Options{}},
		{"causal", Options{Causal: true}},
		{"causal to the lower right, rows that see nothing", Options{Causal: true, Align: LowerRight}},
		{"window", Options{Window: &Window{Left: 20, Right: 3}}},
		{"lengths, and rows whose window is past them", Options{KLen: []int{190, 70}, Window: &Window{Left: 30, Right: 0}}},
		{"boolean mask of each head", Options{Mask: mask}},
		{"slopes and sinks of each head, bias by distance", Options{ALiBi: []float32{.5, .25, .125, .0625}, Sinks: []float32{0, 1, 2, 3},
			RelativeBias: tensor(Shape{1, heads, 1, seqQ + seqK - 1}), Align: LowerRight}},
		{"a bias of fewer keys", Options{Bias: tensor(Shape{1, 1, seqQ, 70})}},
		{"rows of each batch at a place of their own", Options{Causal: true, Offset: []int{-30, 20}}},
		{"slopes of each batch", Options{ALiBi: []float32{.5, .25, .125, .0625, 1, 2, 3, 4}}},
		{"prefix", Options{Causal: true, Prefix: []int{20, 99}}},
		{"segments", Options{QSegments: halves(seqQ, 130), KSegments: halves(seqK, 80)}},
		{"dropout", Options{Dropout: Dropout{P: 0.5, Seed: 4}, Causal: true}},
		{"window and block mask", Options{BlockMask: blocks, BlockSize: 10, Window: &Window{Left: 25, Right: 5}}},
		{"bias of each batch, softcap, scale", Options{Bias: bias, Softcap: 3, Scale: new(0.7), Causal: true}},
	} {
		opt := tt.opt
		opt.Weights = true
		r := must.Get(dev.Attention(ctx, q, k, k, opt))(t)
		whole := must.Get(dev.ToFloat32(ctx, r.Weights))(t)
		r.Release()
		for _, part := range []WeightRange{
			{0, 0, [2]int{0, seqQ}, [2]int{0, seqK}},
			{1, 3, [2]int{0, seqQ}, [2]int{0, seqK}},
			{1, 1, [2]int{3, seqQ - 1}, [2]int{40, 130}},
			{0, 2, [2]int{100, 101}, [2]int{99, 101}},
		} {
			rows, keys := part.Rows[1]-part.Rows[0], part.Keys[1]-part.Keys[0]
			got := make([]float32, rows*keys)
			err := dev.EachWeightRow(ctx, q, k, part, tt.opt, func(row, first int, weights []float32) {
				copy(got[(row-part.Rows[0])*keys+first-part.Keys[0]:], weights)
			})
			must.Do(must.In(t, "%s %+v", tt.name, part), err)
			for i := range rows {
				row := whole[((part.Batch*heads+part.Head)*seqQ+part.Rows[0]+i)*seqK:]
				for j := range keys {
					// The sums of some keys and of all of them round differently.
					want, have := float64(row[part.Keys[0]+j]), float64(got[i*keys+j])
					if !(math.Abs(have-want) <= 1e-5*want+1e-12) {
						t.Fatalf("%s %+v: row %d, key %d: %v, should be %v", tt.name, part, part.Rows[0]+i, part.Keys[0]+j, have, want)
					}
				}
			}
		}
	}
}

// TestEachWeightRowRange: a range that is empty or exceeds the operands is ErrShape.
func TestEachWeightRowRange(t *testing.T) {
	dev := NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	q := must.Get(HostF32(make([]float32, 24), Shape{1, 2, 4, 3}))(t)
	for _, r := range []WeightRange{{0, 0, [2]int{1, 1}, [2]int{0, 4}}, {0, 2, [2]int{0, 4}, [2]int{0, 4}}, {-1, 0, [2]int{0, 4}, [2]int{0, 4}}, {0, 0, [2]int{0, 4}, [2]int{0, 5}}} {
		must.Fail(t, fmt.Sprintf("%+v", r), dev.EachWeightRow(t.Context(), q, q, r, Options{}, func(int, int, []float32) { t.Errorf("%+v has weights", r) }), ErrShape)
	}
}

// TestPick: equal weights are in the order of their keys, NaN comes first, zeros are left out.
func TestPick(t *testing.T) {
	nan := float32(math.NaN())
	for _, c := range []struct {
		row  []float32
		n    int
		keys []int32
	}{
		{[]float32{0.1, 0.3, 0.3, 0.2, 0.3}, 3, []int32{11, 12, 14}},
		{[]float32{0.1, 0.3, 0.3, 0.2, 0.3}, 4, []int32{11, 12, 14, 13}},
		{[]float32{0.5, 0, 0.5, 0}, 3, []int32{10, 12, -1}},
		{[]float32{0.5, nan, 0.5, nan}, 3, []int32{11, 13, 10}},
		{[]float32{0, 0}, 1, []int32{-1}},
		{[]float32{1, 2, 3, 4, 5, 6, 7, 8, 9}, 9, []int32{18, 17, 16, 15, 14, 13, 12, 11, 10}},
	} {
		keys, weights := slices.Repeat([]int32{-1}, c.n), make([]float32, c.n)
		pick(c.row, 10, keys, weights)
		if !slices.Equal(keys, c.keys) {
			t.Errorf("%v: keys %v, should be %v", c.row, keys, c.keys)
		}
		for i, j := range keys {
			if j >= 0 && math.Float32bits(weights[i]) != math.Float32bits(c.row[j-10]) {
				t.Errorf("%v: weight %d is %v", c.row, i, weights[i])
			}
		}
	}
}
