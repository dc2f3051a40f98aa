package kernelstest

import (
	"bytes"
	"embed"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/safetensors"
)

// dims returns the lengths of a case.
func dims(b, h, kvh, sq, sk, d, dv int) kernels.Dims {
	return kernels.Dims{Batch: b, Heads: h, KVHeads: kvh, SeqQ: sq, SeqK: sk, Dim: d, ValueDim: dv}
}

// ids returns one list of n segment ids. ends has pairs of the end of a segment and its id.
func ids(n int, ends ...int) [][]int32 {
	list := make([]int32, 0, n)
	for i := 0; i < len(ends); i += 2 {
		for len(list) < ends[i] {
			list = append(list, int32(ends[i+1]))
		}
	}
	return [][]int32{list}
}

// Cases returns the named cases: each option alone and the combinations that affect each
// other. They run fused and by stages.
func Cases() []Case {
	plain := dims(2, 3, 3, 37, 41, 16, 16)
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	causal := kernels.Options{Causal: true}
	lower := kernels.Options{Causal: true, Align: kernels.LowerRight}
	window := func(l, r int) kernels.Options { return kernels.Options{Window: &kernels.Window{Left: l, Right: r}} }
	full := backend.Shape{2, 3, 37, 41}

	cases := []Case{
		{Name: "plain", Dims: plain},
		{Name: "one query", Dims: dims(2, 2, 2, 1, 77, 32, 32)},
		{Name: "one key", Dims: dims(2, 2, 2, 19, 1, 32, 32)},
		{Name: "one query, one key, one channel", Dims: dims(1, 1, 1, 1, 1, 1, 1)},
		{Name: "head size 1", Dims: dims(1, 2, 2, 33, 35, 1, 1)},
		{Name: "value head size larger", Dims: dims(1, 2, 2, 33, 35, 8, 24)},
		{Name: "value head size smaller", Dims: dims(1, 2, 2, 33, 35, 40, 3)},
		{Name: "several key blocks", Dims: dims(1, 1, 1, 65, 1031, 64, 64)},
		{Name: "several query blocks", Dims: dims(1, 1, 1, 517, 129, 32, 32)},
		{Name: "batches", Dims: dims(7, 1, 1, 9, 11, 8, 8)},

		{Name: "scale 1", Dims: plain, Options: kernels.Options{Scale: new(1.0)}},
		{Name: "scale 0", Dims: plain, Options: kernels.Options{Scale: new(0.0)}},
		{Name: "scale negative", Dims: plain, Options: kernels.Options{Scale: new(-0.3)}},
		{Name: "softcap", Dims: plain, Options: kernels.Options{Softcap: 2}},
		{Name: "softcap large logits", Dims: plain, Gain: 100, Options: kernels.Options{Softcap: 30}},
		{Name: "softcap tiny logits", Dims: plain, Gain: 1e-4, Options: kernels.Options{Softcap: 50}},
		{Name: "logits of 1e4", Dims: plain, Gain: 2500},
		{Name: "logits of 1e4, scale 1, causal", Dims: plain, Gain: 600, Options: kernels.Options{Scale: new(1.0), Causal: true}},
		{Name: "logits of 1e-4", Dims: plain, Gain: 1e-4},

		{Name: "grouped heads", Dims: dims(2, 6, 2, 21, 23, 16, 16)},
		{Name: "one kv head", Dims: dims(2, 5, 1, 21, 23, 16, 16)},

		{Name: "causal", Dims: plain, Options: causal},
		{Name: "causal, lower right", Dims: plain, Options: lower},
		{Name: "causal, more queries than keys", Dims: dims(1, 2, 2, 53, 17, 16, 16), Options: causal},
		{Name: "causal, lower right, more queries than keys (rows that see nothing)", Dims: dims(1, 2, 2, 53, 17, 16, 16), Options: lower},
		{Name: "causal, long", Dims: dims(1, 1, 1, 300, 300, 32, 32), Options: causal},
		{Name: "causal, offset 5", Dims: plain, Options: kernels.Options{Causal: true, Offset: []int{5}}},
		{Name: "causal, offset -9", Dims: plain, Options: kernels.Options{Causal: true, Offset: []int{-9}}},
		{Name: "causal, offset beyond the keys", Dims: plain, Options: kernels.Options{Causal: true, Offset: []int{1000}}},
		{Name: "causal, offset before the keys (nothing seen)", Dims: plain, Options: kernels.Options{Causal: true, Offset: []int{-1000}}},
		{Name: "window 4,3", Dims: plain, Options: window(4, 3)},
		{Name: "window 0,0 is the diagonal", Dims: plain, Options: window(0, 0)},
		{Name: "window without left limit", Dims: plain, Options: window(kernels.Unbounded, 2)},
		{Name: "window without right limit", Dims: plain, Options: window(2, kernels.Unbounded)},
		{Name: "window over long keys", Dims: dims(1, 1, 1, 260, 700, 16, 16), Options: kernels.Options{Window: &kernels.Window{Left: 40, Right: 7}, Offset: []int{200}}},
		{Name: "window, causal", Dims: plain, Options: kernels.Options{Causal: true, Window: &kernels.Window{Left: 6, Right: 9}}},
		{Name: "window, causal, lower right, offset", Dims: plain, Options: kernels.Options{Causal: true, Window: &kernels.Window{Left: 6, Right: 9}, Align: kernels.LowerRight, Offset: []int{-3}}},
		{Name: "klen", Dims: plain, Options: kernels.Options{KLen: []int{41, 13}}},
		{Name: "klen 0 (a batch that sees nothing)", Dims: plain, Options: kernels.Options{KLen: []int{0, 1}}},
		{Name: "klen, causal", Dims: plain, Options: kernels.Options{Causal: true, KLen: []int{7, 30}}},
		{Name: "klen, causal, lower right, window", Dims: plain, Options: kernels.Options{Causal: true, Align: kernels.LowerRight, Window: &kernels.Window{Left: 11}, KLen: []int{40, 12}}},

		{Name: "prefix, causal", Dims: plain, Options: kernels.Options{Causal: true, Prefix: []int{9, 30}}},
		{Name: "prefix of nothing and of all keys", Dims: plain, Options: kernels.Options{Causal: true, Prefix: []int{0, 41}}},
		{Name: "prefix, causal, lower right, klen inside it", Dims: plain, Options: kernels.Options{Causal: true, Align: kernels.LowerRight, Prefix: []int{20}, KLen: []int{11, 33}}},
		{Name: "prefix, window, offset", Dims: plain, Options: kernels.Options{Window: &kernels.Window{Left: 8, Right: 2}, Offset: []int{-6}, Prefix: []int{15}}},
		{Name: "prefix, window without right limit", Dims: plain, Options: kernels.Options{Window: &kernels.Window{Left: 3, Right: kernels.Unbounded}, Prefix: []int{15}}},
		{Name: "prefix over several key blocks", Dims: dims(1, 2, 1, 300, 600, 16, 16), Options: kernels.Options{Causal: true, Prefix: []int{270}, Offset: []int{130}}},
		{Name: "segments", Dims: plain, Options: kernels.Options{QSegments: ids(37, 10, 1, 20, 2, 37, 3), KSegments: ids(41, 5, 3, 6, 1, 41, 2)}},
		{Name: "segments of a query and a key each", Dims: dims(1, 1, 1, 9, 9, 8, 8), Options: kernels.Options{QSegments: [][]int32{{0, 1, 2, 3, 4, 5, 6, 7, 8}}}},
		{Name: "segments without keys (rows that see nothing)", Dims: plain, Options: kernels.Options{QSegments: ids(37, 10, 1, 20, 2, 37, 1), KSegments: ids(41, 41, 2)}},
		{Name: "segments, causal", Dims: dims(2, 2, 2, 40, 40, 16, 16), Options: kernels.Options{Causal: true, QSegments: [][]int32{ids(40, 3, 0, 28, 1, 40, 2)[0], ids(40, 40, 0)[0]}}},
		{Name: "segments, window, lower right, klen", Dims: plain, Options: kernels.Options{Window: &kernels.Window{Left: 9, Right: 4}, Align: kernels.LowerRight, KLen: []int{30, 2}, QSegments: ids(37, 12, 1, 37, 2), KSegments: ids(41, 17, 1, 41, 2)}},
		{Name: "segments, prefix, causal", Dims: plain, Options: kernels.Options{Causal: true, Prefix: []int{25, 8}, QSegments: ids(37, 12, 1, 37, 2), KSegments: ids(41, 17, 1, 41, 2)}},
		{Name: "segments, mask, bias", Dims: plain, MaskShape: full, BiasShape: backend.Shape{1, 3, 37, 41}, BiasHides: true, Options: kernels.Options{QSegments: ids(37, 12, 1, 37, 2), KSegments: ids(41, 17, 1, 41, 2)}},
		{Name: "mask shorter than the keys", Dims: plain, MaskShape: backend.Shape{2, 1, 37, 29}},
		{Name: "bias shorter than the keys", Dims: plain, BiasShape: backend.Shape{1, 3, 1, 29}},
		{Name: "mask and bias of other lengths, causal, lower right, klen", Dims: plain, MaskShape: backend.Shape{1, 1, 37, 35}, BiasShape: backend.Shape{2, 3, 37, 30}, Options: kernels.Options{Causal: true, Align: kernels.LowerRight, KLen: []int{33, 20}}},
		{Name: "NaN in keys that a short mask lacks", Dims: plain, MaskShape: backend.Shape{1, 1, 1, 29}, PoisonK: map[int]float32{29: nan}, PoisonV: map[int]float32{40: nan, 30: inf}},
		{Name: "NaN in another segment", Dims: plain, PoisonK: map[int]float32{20: nan}, PoisonV: map[int]float32{21: nan}, Options: kernels.Options{QSegments: ids(37, 12, 1, 37, 2), KSegments: ids(41, 17, 1, 41, 2)}},

		{Name: "mask full", Dims: plain, MaskShape: full},
		{Name: "mask shared by heads", Dims: plain, MaskShape: backend.Shape{2, 1, 37, 41}},
		{Name: "mask shared by batches", Dims: plain, MaskShape: backend.Shape{1, 3, 37, 41}},
		{Name: "mask shared by all", Dims: plain, MaskShape: backend.Shape{1, 1, 37, 41}},
		{Name: "mask of keys", Dims: plain, MaskShape: backend.Shape{2, 1, 1, 41}},
		{Name: "mask of queries", Dims: plain, MaskShape: backend.Shape{1, 1, 37, 1}},
		{Name: "mask that hides whole rows", Dims: plain, MaskShape: full, HideRows: true},
		{Name: "mask, causal, grouped", Dims: dims(2, 6, 2, 21, 23, 16, 16), Options: causal, MaskShape: backend.Shape{2, 1, 21, 23}},
		{Name: "mask, grouped, full", Dims: dims(2, 6, 2, 21, 23, 16, 16), MaskShape: backend.Shape{2, 6, 21, 23}},
		{Name: "mask, klen", Dims: plain, Options: kernels.Options{KLen: []int{5, 41}}, MaskShape: backend.Shape{1, 1, 37, 41}},
		{Name: "mask over several key blocks", Dims: dims(1, 2, 1, 40, 600, 16, 16), MaskShape: backend.Shape{1, 2, 40, 600}, HideRows: true},

		{Name: "bias full", Dims: plain, BiasShape: full},
		{Name: "bias shared by heads", Dims: plain, BiasShape: backend.Shape{2, 1, 37, 41}},
		{Name: "bias of keys", Dims: plain, BiasShape: backend.Shape{1, 3, 1, 41}},
		{Name: "bias one number", Dims: plain, BiasShape: backend.Shape{1, 1, 1, 1}},
		{Name: "bias f16", Dims: plain, BiasShape: full, BiasDType: backend.F16},
		{Name: "bias bf16", Dims: plain, BiasShape: full, BiasDType: backend.BF16},
		{Name: "bias that hides", Dims: plain, BiasShape: full, BiasHides: true},
		{Name: "bias f16 that hides", Dims: plain, BiasShape: full, BiasDType: backend.F16, BiasHides: true},
		{Name: "bias, softcap", Dims: plain, BiasShape: full, Options: kernels.Options{Softcap: 1.5}},
		{Name: "bias, mask, softcap", Dims: plain, BiasShape: backend.Shape{1, 3, 37, 41}, BiasHides: true, MaskShape: backend.Shape{2, 1, 37, 41}, HideRows: true, Options: kernels.Options{Softcap: 3}},
		{Name: "bias, causal, grouped", Dims: dims(2, 6, 2, 21, 23, 16, 16), Options: lower, BiasShape: backend.Shape{1, 6, 21, 23}},
		{Name: "softcap, causal", Dims: plain, Options: kernels.Options{Softcap: 2, Causal: true}},
		{Name: "softcap, mask", Dims: plain, Options: kernels.Options{Softcap: 2}, MaskShape: full},
		{Name: "everything at once", Dims: dims(2, 6, 2, 43, 150, 24, 20), MaskShape: backend.Shape{2, 1, 43, 150}, BiasShape: backend.Shape{1, 6, 43, 150}, BiasHides: true, BiasDType: backend.BF16,
			Options: kernels.Options{Scale: new(0.3), Softcap: 4, Causal: true, Window: &kernels.Window{Left: 60}, Align: kernels.LowerRight, Offset: []int{-2}, KLen: []int{150, 99}}},

		{Name: "NaN in hidden keys", Dims: plain, Options: kernels.Options{KLen: []int{20, 20}}, PoisonK: map[int]float32{20: nan, 31: inf, 40: -inf}},
		{Name: "NaN in hidden values", Dims: plain, Options: kernels.Options{KLen: []int{20, 20}}, PoisonV: map[int]float32{20: nan, 31: inf, 40: nan}},
		{Name: "NaN in keys that some rows see", Dims: plain, Options: causal, PoisonK: map[int]float32{17: nan}},
		{Name: "NaN in values that some rows see", Dims: plain, Options: causal, PoisonV: map[int]float32{17: nan}},
		{Name: "Inf in values that some rows see", Dims: plain, Options: causal, PoisonV: map[int]float32{17: inf}},
		{Name: "NaN in values that a window passes over", Dims: plain, Options: window(3, 3), PoisonV: map[int]float32{20: nan}, PoisonK: map[int]float32{30: nan}},
		{Name: "NaN and Inf under a mask", Dims: plain, MaskShape: full, PoisonK: map[int]float32{3: nan, 4: inf}, PoisonV: map[int]float32{5: nan}},
		{Name: "NaN under a bias of -Inf", Dims: plain, BiasShape: full, BiasHides: true, PoisonK: map[int]float32{3: nan}, PoisonV: map[int]float32{5: nan, 6: inf}},
		{Name: "NaN in visible keys", Dims: plain, PoisonK: map[int]float32{2: nan}},
		{Name: "NaN in visible values", Dims: plain, PoisonV: map[int]float32{2: nan, 40: nan}},
		{Name: "Inf in visible keys", Dims: plain, PoisonK: map[int]float32{2: inf}, Options: kernels.Options{Scale: new(0.0)}},
		{Name: "NaN far along the keys", Dims: dims(1, 2, 2, 40, 600, 16, 16), Options: lower, PoisonV: map[int]float32{590: nan}, PoisonK: map[int]float32{595: nan}},
	}
	for i := range cases {
		cases[i].Seed = uint64(i + 1)
	}
	// The same problem in every dtype and layout, with an option of each kind.
	mixed := Case{Name: "mixed", Dims: dims(2, 4, 2, 35, 39, 17, 19), MaskShape: backend.Shape{2, 1, 35, 39}, BiasShape: backend.Shape{1, 4, 35, 39}, Options: causal}
	for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		for _, layout := range []Layout{Contiguous, BSHD, Padded, Transposed} {
			c := mixed
			c.Name = "mixed " + dtype.String() + " " + layout.String()
			c.DType, c.BiasDType, c.Layout, c.Seed = dtype, dtype, layout, uint64(len(cases)+1)
			cases = append(cases, c)
			c.Name = "plain " + dtype.String() + " " + layout.String()
			c.MaskShape, c.BiasShape, c.Options = backend.Shape{}, backend.Shape{}, kernels.Options{}
			c.Dims = dims(1, 2, 2, 66, 130, 33, 31)
			cases = append(cases, c)
		}
	}
	return cases
}

// models has queries, keys and values of trained models, which [Recorder] wrote. The
// README next to the files describes them.
//
//go:embed testdata/models/*.safetensors
var models embed.FS

// recorded has the elements of q, k and v of an attention layer, row by row.
type recorded struct{ q, k, v []float32 }

// modelCases returns cases of each layer of the recorded models: as one call, and the last
// query alone. Each layer of stories260K has another dtype and layout in addition.
func modelCases(t *testing.T) (cases []Case) {
	f16, q8 := backend.F16, backend.Q8
	variants := []Case{
		{DType: backend.F16, Layout: BSHD}, {DType: backend.BF16, Layout: Padded}, {Keys: &f16, Layout: Transposed},
		{Keys: &q8}, {PageSize: 16},
	}
	stories, transliterate := load(t, "stories260K"), load(t, "aren-transliteration")
	for i := range 5 {
		layer := stories(fmt.Sprintf("layer-%d", i+1))
		layer.Options.Causal = true
		variant := layer
		variant.DType, variant.Layout, variant.Keys, variant.PageSize = variants[i].DType, variants[i].Layout, variants[i].Keys, variants[i].PageSize
		variant.Name += ", stored otherwise"
		cases = append(cases, layer, variant, layer.last())
	}
	for i := range 6 {
		decoder := transliterate(fmt.Sprintf("decoder-%d", i+1))
		decoder.Options.Causal = true
		cross := transliterate(fmt.Sprintf("cross-%d", i+1))
		cases = append(cases, transliterate(fmt.Sprintf("encoder-%d", i+1)), decoder, decoder.last(), cross, cross.last())
	}
	return cases
}

// load returns a function that returns the layers of a model.
func load(t *testing.T, model string) func(layer string) Case {
	raw := must(models.ReadFile("testdata/models/" + model + ".safetensors"))(t)
	h := must(safetensors.ReadHeader(bytes.NewReader(raw), int64(len(raw))))(t)
	return func(layer string) Case {
		read := func(name string) (data []float32, shape []int) {
			x := must(h.Tensor(layer + "." + name))(t)
			data = make([]float32, x.Count)
			x.Float32s(data, raw[x.Start:])
			return data, x.Shape
		}
		q, sq := read("q")
		k, sk := read("k")
		v, sv := read("v")
		return Case{Name: model + " " + layer, recorded: &recorded{q, k, v}, Dims: dims(sq[0], sq[1], sk[1], sq[2], sk[2], sq[3], sv[3])}
	}
}

// last returns c with its last query alone.
func (c Case) last() Case {
	r := recorded{k: c.recorded.k, v: c.recorded.v}
	for head := range slices.Chunk(c.recorded.q, c.SeqQ*c.Dim) {
		r.q = append(r.q, head[len(head)-c.Dim:]...)
	}
	c.Name, c.recorded, c.SeqQ, c.Options.Align = c.Name+", last query", &r, 1, kernels.LowerRight
	return c
}

// testModels runs the cases of trained models, fused and by stages.
func testModels(t *testing.T, dev *kernels.Device, h Harness) {
	for n, c := range modelCases(t) {
		if h.takes(n) {
			t.Run(c.Name, func(t *testing.T) {
				needs(t, dev, c)
				testCase(t, dev, c, new(digests))
			})
		}
	}
}
