package kernels

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
)

// TestEachWeightRow compares ranges of the weights with all weights of Device.Attention, over
// more rows than a chunk has.
func TestEachWeightRow(t *testing.T) {
	ctx := t.Context()
	dev := NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	const batch, heads, kvHeads, dim, seqQ, seqK = 2, 4, 2, 8, rangeRows + 60, 190
	tensor := func(s backend.Shape) backend.Tensor {
		data := make([]float32, s.Elements())
		for i := range data {
			data[i] = float32(rng.NormFloat64())
		}
		x, err := dev.FromFloat32(ctx, backend.F32, data, s)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	q := tensor(backend.Shape{batch, heads, seqQ, dim})
	k := tensor(backend.Shape{batch, kvHeads, seqK, dim})
	bias := tensor(backend.Shape{batch, 1, seqQ, seqK})
	bools := make([]bool, heads*seqK)
	for i := range bools {
		bools[i] = i%7 != 3
	}
	mask, err := backend.HostBool(bools, backend.Shape{1, heads, 1, seqK})
	if err != nil {
		t.Fatal(err)
	}
	blocks, err := backend.HostBool(bools[:32*19], backend.Shape{1, 1, 32, 19})
	if err != nil {
		t.Fatal(err)
	}
	halves := func(n, at int) []int32 {
		ids := make([]int32, n)
		for i := at; i < n; i++ {
			ids[i] = 1
		}
		return ids
	}
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
			RelativeBias: tensor(backend.Shape{1, heads, 1, seqQ + seqK - 1}), Align: LowerRight}},
		{"a bias of fewer keys", Options{Bias: tensor(backend.Shape{1, 1, seqQ, 70})}},
		{"rows of each batch at a place of their own", Options{Causal: true, Offsets: []int{-30, 20}}},
		{"slopes of each batch", Options{ALiBi: []float32{.5, .25, .125, .0625, 1, 2, 3, 4}}},
		{"prefix", Options{Causal: true, Prefix: []int{20, 99}}},
		{"segments", Options{QSegments: [][]int32{halves(seqQ, 130)}, KSegments: [][]int32{halves(seqK, 80)}}},
		{"dropout", Options{Dropout: backend.Dropout{P: 0.5, Seed: 4}, Causal: true}},
		{"window and block mask", Options{BlockMask: blocks, BlockSize: 10, Window: &Window{Left: 25, Right: 5}}},
		{"bias of each batch, softcap, scale", Options{Bias: bias, Softcap: 3, Scale: new(0.7), Causal: true}},
	} {
		opt := tt.opt
		opt.Weights = true
		r, err := dev.Attention(ctx, q, k, k, opt)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := dev.Float32s(ctx, r.Weights)
		if err != nil {
			t.Fatal(err)
		}
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
			if err != nil {
				t.Fatalf("%s %+v: %v", tt.name, part, err)
			}
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
	q, err := backend.HostF32(make([]float32, 24), backend.Shape{1, 2, 4, 3})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []WeightRange{{0, 0, [2]int{1, 1}, [2]int{0, 4}}, {0, 2, [2]int{0, 4}, [2]int{0, 4}}, {-1, 0, [2]int{0, 4}, [2]int{0, 4}}, {0, 0, [2]int{0, 4}, [2]int{0, 5}}} {
		err := dev.EachWeightRow(t.Context(), q, q, r, Options{}, func(int, int, []float32) { t.Errorf("%+v has weights", r) })
		if !errors.Is(err, backend.ErrShape) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}
