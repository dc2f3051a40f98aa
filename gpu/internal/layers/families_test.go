package layers_test

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
	"github.com/seed90331342/attn/kernels/safetensors"
)

// TestFamilies compares the layers in kernels/nn/testdata/families, whose README says how they were made, with the
// outputs of a program in float64 that follows the families' own code: the whole sequence at once, and the last
// tokens one by one over a cache. Latent attention expands keys at once and absorbs them over a cache; its last tokens
// come together too, over pages.
//
// Four products follow each other between x and y. Each sum of at most 64 terms has an error of about √64·u
// times its magnitudes, which exceed the largest output less than 4 times: 4·8·4·u = 2^-17 of that output. Latent
// attention has six or seven products, and is within twice as much. The two forms differ by the sum of their errors.
// So has linear attention, whose sums have fewer terms.
func TestFamilies(t *testing.T) {
	folder := "../../../kernels/nn/testdata/families"
	files := must.Get(filepath.Glob(filepath.Join(folder, "*.safetensors")))(t)
	if len(files) != 28 {
		t.Fatalf("there are %d files, should be 28", len(files))
	}
	each(t, func(t *testing.T, dev *kernels.Device) {
		left := 0
		for n, file := range files {
			if testing.Short() && n%4 > 0 && strings.HasSuffix(t.Name(), "gpu") { // a driver compiles kernels for many of them
				left++
				continue
			}
			family := file[len(folder)+1 : len(file)-len(".safetensors")]
			model := must.Get(nn.ParseConfig(must.Get(os.ReadFile(filepath.Join(folder, family+".json")))(t)))(t)
			content := must.Get(os.ReadFile(file))(t)
			for i := range model.Layers {
				t.Run(fmt.Sprintf("%s/%d", family, i), func(t *testing.T) { testFamily(t, dev, model, i, content) })
			}
		}
		t.Logf("%d of %d families are left out", left, len(files))
	})
}

func testFamily(t *testing.T, dev *kernels.Device, m nn.ModelConfig, i int, content []byte) {
	layer := m.Layers[i]
	ctx, c, bound := t.Context(), layer.MultiHead, 0x1p-17
	r, size := bytes.NewReader(content), int64(len(content))
	in, want := numbersOf(t, content, "input", i), numbersOf(t, content, "output", i)
	if layer.Linear != nil {
		l := must.Get(nn.NewLinearAttention(ctx, dev, *layer.Linear, must.Get(layer.Linear.LoadSafetensors(r, size, layer.Prefix))(t)))(t)
		defer l.Release()
		compare(t, testLinear(t, dev, l, in, layer.Linear.Model), want, 0x1p-16)
		return
	}
	config := kvcache.Config{Batch: 1, KVHeads: c.KVHeads, Dim: cmp.Or(c.HeadDim, c.Model/max(c.Heads, 1))}
	model := c.Model
	angles := func(from, to int) (a kernels.Angles) { return a } // of tokens that have positions on several axes
	var forward func(x kernels.Tensor, opt nn.MultiHeadOptions) (kernels.Tensor, error)
	if latent := layer.Latent; latent != nil {
		l := must.Get(nn.NewLatentAttention(ctx, dev, *latent, must.Get(latent.LoadSafetensors(r, size, layer.Prefix))(t)))(t)
		defer l.Release()
		model, bound, config = latent.Model, 0x1p-16, kvcache.Config{Dim: latent.Rank + latent.RopeDim, Latent: latent.Rank}
		forward = func(x kernels.Tensor, opt nn.MultiHeadOptions) (kernels.Tensor, error) { return l.Apply(ctx, x, opt) }
	} else {
		if r := c.RoPE; r != nil && len(r.Sections) > 0 {
			positions := numbersOf(t, content, "positions", 0)
			angles = func(from, to int) kernels.Angles {
				var axes [][][]int
				for axis := range slices.Chunk(positions, len(positions)/3) {
					var at []int
					for _, p := range axis[from:to] {
						at = append(at, int(p))
					}
					axes = append(axes, [][]int{at})
				}
				return must.Get(r.AnglesOfAxes(ctx, dev, config.Dim, axes))(t)
			}
		} else if r != nil && r.Scaling != nil && r.Scaling.Kind == nn.ScalingLongRoPE {
			r.Scaling.Length = len(in) / model
		}
		l := must.Get(nn.NewMultiHeadAttention(ctx, dev, c, must.Get(c.LoadSafetensors(r, size, layer.Prefix))(t)))(t)
		defer l.Release()
		before := func(nn.MultiHeadOptions, int) {}
		if c.SharedKeys {
			from, in := m.Layers[layer.SharedWith], numbersOf(t, content, "input", layer.SharedWith)
			source := must.Get(nn.NewMultiHeadAttention(ctx, dev, from.MultiHead, must.Get(from.MultiHead.LoadSafetensors(r, size, from.Prefix))(t)))(t)
			defer source.Release()
			before = func(opt nn.MultiHeadOptions, rows int) {
				at := opt.Cache.Lens()[0]
				_, _, err := source.ApplyFloat32(ctx, in[at*c.Model:(at+rows)*c.Model], 1, opt)
				must.Do(t, err)
			}
		}
		forward = func(x kernels.Tensor, opt nn.MultiHeadOptions) (kernels.Tensor, error) {
			before(opt, x.Shape()[kernels.Seq])
			y, err := l.Apply(ctx, x, opt)
			return y.O, err
		}
	}
	tokens := len(in) / model
	x := must.Get(dev.FromFloat32(ctx, kernels.F32, in, kernels.Shape{1, 1, tokens, model}))(t)
	defer x.Release()
	// apply returns the output for some tokens. A cache has those before them.
	apply := func(from, to int, cache nn.KVCache) []float32 {
		opt := nn.MultiHeadOptions{Options: layer.Options, Cache: cache, Angles: angles(from, to)}
		defer opt.Angles.Release()
		if cache != nil {
			opt.Causal, opt.Window = false, nil // the cache has both
		}
		y := must.Get(forward(must.Get(x.Slice(kernels.Seq, from, to))(t), opt))(t)
		defer y.Release()
		return must.Get(dev.ToFloat32(ctx, y))(t)
	}
	config.Capacity = tokens
	if w := layer.Options.Window; w != nil {
		config.Window = w.Left + 1
	}
	cache := must.Get(kvcache.New(ctx, dev, config))(t)
	defer cache.Release()
	steps := apply(0, 6, cache)
	for i := 6; i < tokens; i++ {
		steps = append(steps, apply(i, i+1, cache)...)
	}
	results := map[string][]float32{"with a cache": steps}
	if c.SharedKeys { // which a layer needs a cache for
		config.Capacity *= 2
		cache := must.Get(kvcache.New(ctx, dev, config))(t)
		defer cache.Release()
		results["at once"] = apply(0, tokens, cache)
	} else {
		results["at once"] = apply(0, tokens, nil)
	}
	if layer.Latent != nil {
		pages := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: config.Dim, Latent: config.Latent, PageSize: 4, Pages: tokens}))(t)
		defer pages.Release()
		batch := pages.Batch(must.Get(pages.NewSequence())(t))
		results["in pages"] = append(apply(0, 3, batch), apply(3, tokens, batch)...)
	}
	compare(t, results, want, bound)
}

// numbersOf returns the tensor name.i of a file, which is F32.
func numbersOf(t *testing.T, content []byte, name string, i int) []float32 {
	header := must.Get(safetensors.ReadHeader(bytes.NewReader(content), int64(len(content))))(t)
	h := must.Get(header.Tensor(fmt.Sprintf("%s.%d", name, i)))(t)
	data := make([]float32, h.Shape[0]*h.Shape[1])
	h.Float32s(data, content[h.Start:][:4*len(data)])
	return data
}

// compare compares results with what they should be, up to a part of the largest number.
func compare(t *testing.T, results map[string][]float32, want []float32, bound float64) {
	largest := 0.0
	for _, y := range want {
		largest = max(largest, math.Abs(float64(y)))
	}
	for name, got := range results {
		if len(got) != len(want) {
			t.Fatalf("%s: there are %d numbers, should be %d", name, len(got), len(want))
		}
		for i, y := range want {
			if e := math.Abs(float64(got[i]) - float64(y)); !(e <= bound*largest) {
				t.Fatalf("%s: y[%d] is %v, should be %v, the largest is %v", name, i, got[i], y, largest)
			}
		}
	}
}

// testLinear returns the outputs of a layer of linear attention for a sequence at once, in pieces and then token after
// token through a state, and in a packed batch behind its own first tokens.
func testLinear(t *testing.T, dev *kernels.Device, l *nn.LinearAttention, in []float32, model int) map[string][]float32 {
	ctx, tokens := t.Context(), len(in)/model
	apply := func(rows []float32, opt nn.LinearOptions) []float32 {
		x := must.Get(dev.FromFloat32(ctx, kernels.F32, rows, kernels.Shape{1, 1, len(rows) / model, model}))(t)
		defer x.Release()
		y := must.Get(l.Apply(ctx, x, opt))(t)
		defer y.Release()
		return must.Get(dev.ToFloat32(ctx, y))(t)
	}
	config := l.StateConfig()
	state := must.Get(kvcache.NewStates(ctx, dev, config))(t)
	defer state.Release()
	var pieces []float32
	for from, to := 0, 5; from < tokens; from, to = to, to+max(7-to, 1) {
		pieces = append(pieces, apply(in[from*model:to*model], nn.LinearOptions{States: state})...)
	}
	config.Batch = 2
	both := must.Get(kvcache.NewStates(ctx, dev, config))(t)
	defer both.Release()
	const first = 4 // the second sequence has its other tokens in a second call, in which the first one has none
	packed := apply(append(slices.Clone(in), in[:first*model]...), nn.LinearOptions{States: both, CuQ: []int{0, tokens, tokens + first}})
	rest := apply(in[first*model:], nn.LinearOptions{States: both, CuQ: []int{0, 0, tokens - first}})
	return map[string][]float32{"at once": apply(in, nn.LinearOptions{}), "with a state": pieces, "packed": packed[:len(in)], "packed, then the rest": append(packed[len(in):], rest...)}
}
