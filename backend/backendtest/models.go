package backendtest

import (
	"bytes"
	"embed"
	"fmt"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/safetensors"
)

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
		if n%max(1, h.PairsEvery) == 0 {
			t.Run(c.Name, func(t *testing.T) {
				needs(t, dev, c)
				testCase(t, dev, c, new(digests))
			})
		}
	}
}
