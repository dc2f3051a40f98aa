package nn_test

import (
	"bytes"
	"context"
	"math"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// smallLinear has a size of its own for each axis of its weights.
var smallLinear = nn.LinearConfig{Model: 10, KeyHeads: 2, ValueHeads: 4, KeyDim: 3, ValueDim: 5, Conv: 4, Gate: kernels.SiLU}

// linearFile returns a layer of smallLinear as the files of Qwen3-Next have it.
func linearFile() map[string]stored {
	return patterned(map[string][]int{"a.in_proj_qkvz.weight": {52, 10}, "a.in_proj_ba.weight": {8, 10}, "a.conv1d.weight": {32, 1, 4}, "a.A_log": {4}, "a.dt_bias": {4},
		"a.norm.weight": {5}, "a.out_proj.weight": {10, 20}})
}

// TestLinearWeights: the columns of Win are those of q, k, v, gates and β of all heads, and A is -exp(A_log).
func TestLinearWeights(t *testing.T) {
	file := linearFile()
	w := must.Get(read(smallLinear.LoadSafetensors, "a.", file))(t)
	in, qkvz, ba := must.Get(w.Win.Float32s())(t), file["a.in_proj_qkvz.weight"].data, file["a.in_proj_ba.weight"].data
	for _, c := range []struct {
		name        string
		column, row int
		file        []float32
	}{
		{"q of key head 1", 3 + 2, 26 + 2, qkvz}, {"k of key head 0", 6, 3, qkvz}, {"v of head 3", 12 + 15 + 1, 26 + 6 + 5 + 1, qkvz}, {"gates of head 1", 32 + 5 + 4, 16 + 5 + 4, qkvz}, {"β of head 2", 52 + 2, 4, ba},
	} {
		for m := range 10 {
			if got, want := in[m*56+c.column], c.file[c.row*10+m]; got != want {
				t.Fatalf("%s: win[%d] is %v, should be %v", c.name, m, got, want)
			}
		}
	}
	for m := range 10 {
		if got, want := must.Get(w.Wa.Float32s())(t)[m*4+3], ba[7*10+m]; got != want {
			t.Fatalf("decays of head 3: wa[%d] is %v, should be %v", m, got, want)
		}
	}
	for h, a := range file["a.A_log"].data {
		if got, want := must.Get(w.A.Float32s())(t)[h], -float32(math.Exp(float64(a))); got != want {
			t.Errorf("a of head %d is %v, should be %v", h, got, want)
		}
	}
}

// TestLinearBatches: a batch of sequences that go on through a state has the outputs of each one alone, and weights and
// inputs of 16 bits change them by their rounding.
func TestLinearBatches(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	apply := func(l *nn.LinearAttention, x kernels.Tensor, opt nn.LinearOptions) []float32 {
		y := must.Get(l.Apply(ctx, x, opt))(t)
		defer y.Release()
		if y.DType() != x.DType() {
			t.Errorf("y is %v, x is %v", y.DType(), x.DType())
		}
		return must.Get(dev.ToFloat32(ctx, y))(t)
	}
	x, c := random(t, dev, 1, 2, 1, 6, 10), smallLinear
	for _, conv := range []int{4, 1} { // width 1 has no rows of state
		file := linearFile()
		file["a.conv1d.weight"] = stored{"F32", []int{32, 1, conv}, file["a.conv1d.weight"].data[:32*conv]}
		c.Conv = conv
		l := must.Get(nn.NewLinearAttention(ctx, dev, c, must.Get(read(c.LoadSafetensors, "a.", file))(t)))(t)
		defer l.Release()
		want := apply(l, x, nn.LinearOptions{})
		for b := range 2 {
			one := must.Get(x.Slice(kernels.Batch, b, b+1))(t)
			if got := apply(l, one, nn.LinearOptions{}); !same([][]float32{got}, [][]float32{want[b*60 : b*60+60]}) {
				t.Errorf("width %d: sequence %d alone is %v, should be %v", conv, b, got, want[b*60:])
			}
		}
		config := l.StateConfig()
		config.Batch = 2
		state := must.Get(kvcache.NewStates(ctx, dev, config))(t)
		defer state.Release()
		first := apply(l, must.Get(x.Slice(kernels.Seq, 0, 4))(t), nn.LinearOptions{States: state})
		rest := apply(l, must.Get(x.Slice(kernels.Seq, 4, 6))(t), nn.LinearOptions{States: state})
		for b := range 2 {
			// The same sums in another order: four products of at most 20 terms below 8 have errors of 4·√20·8·u < 2^-16.
			for i, got := range append(first[b*40:b*40+40:b*40+40], rest[b*20:b*20+20]...) {
				if e := want[b*60+i]; math.Abs(float64(got-e)) > 0x1p-16 {
					t.Fatalf("width %d, sequence %d: y[%d] is %v, should be %v", conv, b, i, got, e)
				}
			}
		}
		config.Window = 2
		states := must.Get(kvcache.NewStates(ctx, dev, config))(t)
		defer states.Release()
		kept := apply(l, must.Get(x.Slice(kernels.Seq, 0, 4))(t), nn.LinearOptions{States: states})
		drafted := apply(l, must.Get(x.Slice(kernels.Seq, 4, 6))(t), nn.LinearOptions{States: states})
		for b := range 2 {
			must.Do(t, states.Rewind(b, 5))
		}
		again := apply(l, must.Get(x.Slice(kernels.Seq, 5, 6))(t), nn.LinearOptions{States: states})
		if !same([][]float32{kept, again[:10], again[10:]}, [][]float32{first, drafted[10:20], drafted[30:]}) {
			t.Errorf("width %d: a cache has %v and %v after a rewind, should be %v and the ends of %v", conv, kept, again, first, drafted)
		}
		padded := must.Get(dev.FromFloat32(ctx, kernels.F32, append(make([]float32, 30), must.Get(dev.ToFloat32(ctx, x))(t)[:60]...), kernels.Shape{1, 1, 9, 10}))(t)
		defer padded.Release()
		for i, got := range apply(l, padded, nn.LinearOptions{})[30:] {
			if e := want[i]; math.Abs(float64(got-e)) > 0x1p-16 {
				t.Fatalf("width %d, behind padding: y[%d] is %v, should be %v", conv, i, got, e)
			}
		}
	}
	// The numbers of linearFile have few bits: matrices in bf16 are the same. x is rounded first, and y last.
	half := must.Get(dev.Alloc(ctx, kernels.BF16, x.Shape()))(t)
	defer half.Release()
	must.Do(t, dev.Copy(ctx, []kernels.Tensor{half}, []kernels.Tensor{x}))
	rounded := must.Get(dev.FromFloat32(ctx, kernels.F32, must.Get(dev.ToFloat32(ctx, half))(t), x.Shape()))(t)
	defer rounded.Release()
	c.Conv = 4
	exact := must.Get(nn.NewLinearAttention(ctx, dev, c, must.Get(read(c.LoadSafetensors, "a.", linearFile()))(t)))(t)
	defer exact.Release()
	c.DType = kernels.BF16
	l := must.Get(nn.NewLinearAttention(ctx, dev, c, must.Get(read(c.LoadSafetensors, "a.", linearFile()))(t)))(t)
	defer l.Release()
	want := apply(exact, rounded, nn.LinearOptions{})
	for i, got := range apply(l, half, nn.LinearOptions{}) {
		if e := float64(want[i]); math.Abs(float64(got)-e) > math.Abs(e)*0x1p-8+0x1p-16 {
			t.Fatalf("bf16: y[%d] is %v, should be %v", i, got, e)
		}
	}
}

func TestLinearRefuses(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	with := func(change func(c *nn.LinearConfig)) nn.LinearConfig {
		c := smallLinear
		change(&c)
		return c
	}
	for _, c := range []struct {
		name, tensor string
		shape        []int // nil removes it
		want         error
		text         string
	}{
		{"a bias", "conv1d.bias", []int{1}, kernels.ErrFile, `would ignore ["a.conv1d.bias"]`},
		{"no decay", "A_log", nil, kernels.ErrFile, `there is no "a.A_log"`},
		{"no projection", "in_proj_ba.weight", nil, kernels.ErrFile, `there is no "a.in_proj_ba.weight"`},
		{"the names of Qwen3.5", "in_proj_qkvz.weight", nil, kernels.ErrFile, `would ignore ["a.in_proj_ba.weight"]`},
		{"axes", "conv1d.weight", []int{4, 1, 32}, kernels.ErrShape, "conv1d.weight: shape is [4 1 32], for the config it must be [32 4]"},
		{"heads", "dt_bias", []int{2}, kernels.ErrShape, "dt_bias: shape is [2], for the config it must be [4]"},
	} {
		file := linearFile()
		n := 1
		for _, l := range c.shape {
			n *= l
		}
		if file["a."+c.tensor] = (stored{"F32", c.shape, make([]float32, n)}); c.shape == nil {
			delete(file, "a."+c.tensor)
		}
		if c.name == "the names of Qwen3.5" {
			file["a.in_proj_qkv.weight"] = stored{"F32", []int{32, 10}, make([]float32, 320)}
		}
		must.Fail(t, c.name, must.Err(read(smallLinear.LoadSafetensors, "a.", file)), c.want, c.text)
	}
	w := must.Get(read(smallLinear.LoadSafetensors, "a.", linearFile()))(t)
	for _, c := range []struct {
		name   string
		config nn.LinearConfig
		want   error
		text   string
	}{
		{"no width", with(func(c *nn.LinearConfig) { c.Conv = 0 }), kernels.ErrOption, "config: Conv is 0, it must be 1 to 64"},
		{"negative rank", with(func(c *nn.LinearConfig) { c.Rank = -1 }), kernels.ErrOption, "Rank is -1, it must be 0 to"},
		{"heads", with(func(c *nn.LinearConfig) { c.KeyHeads = 3 }), kernels.ErrOption, "KeyHeads is 3, ValueHeads is 4: the key heads must divide the value heads"},
		{"bound", with(func(c *nn.LinearConfig) { c.LowerBound = 5 }), kernels.ErrOption, "LowerBound is 5, it must be negative"},
		{"gate", with(func(c *nn.LinearConfig) { c.Gate = kernels.Identity }), kernels.ErrOption, "Gate is 3, it must be SiLU or Sigmoid"},
		{"epsilon", with(func(c *nn.LinearConfig) { c.Epsilon = 2 }), kernels.ErrOption, "Epsilon of norms is 2"},
		{"type", with(func(c *nn.LinearConfig) { c.DType = kernels.Q8 }), kernels.ErrDType, "DType is q8"},
		{"another rank", with(func(c *nn.LinearConfig) { c.Rank = 3 }), kernels.ErrShape, "wz is missing"},
		{"another size", with(func(c *nn.LinearConfig) { c.ValueDim = 6 }), kernels.ErrShape, "norm has shape [1 1 1 5], it must be [1 1 1 6]"},
	} {
		must.Fail(t, c.name, must.Err(nn.NewLinearAttention(ctx, dev, c.config, w)), c.want, c.text)
		if c.want != kernels.ErrShape {
			must.Fail(t, c.name, must.Err(read(c.config.LoadSafetensors, "a.", linearFile())), c.want, c.text)
		}
	}
	must.Fail(t, "no projections", must.Err(nn.NewLinearAttention(ctx, kernels.NewDevice(plainBackend{dev.Backend()}), smallLinear, w)), kernels.ErrUnsupported, "no projections")
	l := must.Get(nn.NewLinearAttention(ctx, dev, smallLinear, w))(t)
	config := l.StateConfig()
	x, one := random(t, dev, 1, 2, 1, 3, 10), must.Get(kvcache.NewStates(ctx, dev, config))(t)
	defer one.Release()
	config.Batch = 2
	two := must.Get(kvcache.NewStates(ctx, dev, config))(t)
	defer two.Release()
	for _, a := range []struct {
		name string
		x    kernels.Tensor
		opt  nn.LinearOptions
		want error
		text string
	}{
		{"no x", kernels.Tensor{}, nn.LinearOptions{}, kernels.ErrShape, "x is missing"},
		{"model size", random(t, dev, 2, 2, 1, 3, 9), nn.LinearOptions{}, kernels.ErrShape, "x has shape [2 1 3 9], it must be [B, 1, S, 10]"},
		{"sequences", x, nn.LinearOptions{States: one}, kernels.ErrShape, "past state has shape [1 1 3 32], it must be [2 1 3 32]"},
		{"packed batches", x, nn.LinearOptions{CuQ: []int{0, 3}}, kernels.ErrShape, "there are 2 batches"},
		{"no sequences", x, nn.LinearOptions{CuQ: []int{}}, kernels.ErrShape, "batches"},
	} {
		must.Fail(t, a.name, must.Err(l.Apply(ctx, a.x, a.opt)), a.want, a.text, "linear attention layer: ")
	}
	states := must.Get(kvcache.NewStates(ctx, dev, kvcache.StateConfig{Batch: 2, KVHeads: 4, Dim: 4, ValueDim: 5, Channels: 32, Width: 4}))(t)
	defer states.Release()
	must.Fail(t, "another key size", must.Err(l.Apply(ctx, x, nn.LinearOptions{States: states})), kernels.ErrShape, "past state has shape [2 4 4 5]")
	must.Do(t, states.Rewind(0, 0))
	done, cancel := context.WithCancel(ctx)
	cancel()
	must.Fail(t, "cancelled", must.Err(l.Apply(done, x, nn.LinearOptions{})), context.Canceled)
	some := must.Get(l.Apply(ctx, x, nn.LinearOptions{States: two}))(t)
	some.Release()
	saved := func() []byte {
		var file bytes.Buffer
		must.Do(t, two.Save(ctx, 0, &file))
		return file.Bytes()
	}
	before := saved()
	if y := must.Get(l.Apply(ctx, must.Get(x.Slice(kernels.Seq, 0, 0))(t), nn.LinearOptions{States: two}))(t); y.Shape() != (kernels.Shape{2, 1, 0, 10}) || !bytes.Equal(before, saved()) {
		t.Errorf("without tokens y has shape %v, and the state changes", y.Shape())
	}
	l.Release()
	must.Fail(t, "released", must.Err(l.Apply(ctx, x, nn.LinearOptions{})), kernels.ErrReleased)
}
