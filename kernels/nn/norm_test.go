package nn_test

import (
	"bytes"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// whole is a layer with all weights that a layer can have.
var whole = nn.MultiHeadConfig{Model: 6, Heads: 2, KVHeads: 1, HeadDim: 4, Bias: true, RoPE: &nn.RoPE{}, Norm: &nn.Norm{}, Gate: nn.GateInQuery, Sinks: true}

// with returns whole after a change.
func with(change func(c *nn.MultiHeadConfig)) nn.MultiHeadConfig {
	c := whole
	change(&c)
	return c
}

func TestNormsAndGatesRefuse(t *testing.T) {
	type config = nn.MultiHeadConfig
	for _, c := range []struct {
		config config
		text   string
	}{
		{config{Model: 8, Norm: &nn.Norm{Norm: kernels.Norm{Epsilon: -1}}}, "Epsilon of norms is -1"},
		{config{Model: 8, Norm: &nn.Norm{Norm: kernels.Norm{Epsilon: math.NaN()}}}, "Epsilon of norms is NaN"},
		{config{Model: 8, Norm: &nn.Norm{Norm: kernels.Norm{Epsilon: 1e-40}}}, "Epsilon of norms is 1e-40"},
		{config{Model: 8, Norm: &nn.Norm{Norm: kernels.Norm{PlusOne: true}, Weightless: true}}, "PlusOne is set, but a Weightless norm has no weights"},
		{config{Model: 8, Norm: &nn.Norm{Mean: true, Projection: true}}, "Mean is set with Projection, Weightless, AfterRoPE or KeysAsValues"},
		{config{Model: 8, Norm: &nn.Norm{Mean: true, Weightless: true}}, "Mean is set with"},
		{config{Model: 8, Norm: &nn.Norm{Mean: true, AfterRoPE: true}}, "Mean is set with"},
		{config{Model: 8, Norm: &nn.Norm{Mean: true}, KeysAsValues: true}, "Mean is set with"},
		{config{Model: 8, Gate: -1}, "Gate is -1"},
		{config{Model: 8, Gate: nn.GateHeads + 1}, "Gate is 4, it must be one of GateNone to GateHeads"},
		{config{Model: 8, Gate: nn.GateInQuery, ValueDim: 4}, "ValueDim is 4, HeadDim 8: they must be equal with KeysAsValues and with GateInQuery"},
		{config{Model: 8, SharedKeys: true, KeysAsValues: true}, "SharedKeys and KeysAsValues are both set"},
		{config{Model: 8, Chunk: -1}, "Chunk is -1"},
		{config{Model: 8, Temperature: &nn.Temperature{}}, "Temperature is {Scale:0 Floor:0}"},
		{config{Model: 8, Temperature: &nn.Temperature{Scale: -1, Floor: 1}}, "Temperature is {Scale:-1 Floor:1}"},
		{config{Model: 8, Temperature: &nn.Temperature{Scale: math.NaN(), Floor: 1}}, "Temperature is {Scale:NaN Floor:1}"},
		{config{Model: 8, KeysAsValues: true, ValueDim: 4}, "ValueDim is 4, HeadDim 8: they must be equal with KeysAsValues"},
	} {
		must.Fail(t, c.text, must.Err(c.config.Initialise(nn.Initialiser{})), kernels.ErrOption, c.text)
	}

	dev, ctx := onCPU(t), t.Context()
	w := must.Get(whole.Initialise(nn.Initialiser{}))(t)
	gated, copied := config{Model: 8, Gate: nn.GateHeads}, config{Model: 8, KeysAsValues: true}
	turning := struct {
		backend.Backend
		backend.Projector
		backend.Rotator
	}{dev.Backend(), dev.Backend().(backend.Projector), dev.Backend().(backend.Rotator)}
	missing := w
	missing.QNorm = kernels.Tensor{}
	for _, c := range []struct {
		name   string
		dev    *kernels.Device
		config config
		w      nn.MultiHeadWeights
		want   error
		text   string
	}{
		{"no weight", dev, whole, missing, kernels.ErrShape, "qnorm is missing"},
		{"norm of the projection", dev, with(func(c *config) { c.Norm = &nn.Norm{Projection: true} }), w, kernels.ErrShape, "qnorm has shape [1 1 1 4], it must be [1 1 1 8]"},
		{"norm of each head with its mean", dev, with(func(c *config) { c.Norm = &nn.Norm{Mean: true} }), w, kernels.ErrShape, "qnorm has shape [1 1 1 4], it must be [1 2 1 4]"},
		{"no norm", dev, with(func(c *config) { c.Norm = nil }), w, kernels.ErrShape, "qnorm is present, but the config has no Norm with weights"},
		{"weightless", dev, with(func(c *config) { c.Norm = &nn.Norm{Weightless: true} }), w, kernels.ErrShape, "qnorm is present"},
		{"no sinks", dev, with(func(c *config) { c.Sinks = false }), w, kernels.ErrShape, "sinks is present, but the config has no Sinks"},
		{"no gate", dev, with(func(c *config) { c.Gate = nn.GateNone }), w, kernels.ErrShape, "wg is present, but the config has no Gate"},
		{"gate of heads", dev, with(func(c *config) { c.Gate = nn.GateHeads }), w, kernels.ErrShape, "wg has shape [1 1 6 8], it must be [1 1 6 2]"},
		{"no values", dev, with(func(c *config) { c.KeysAsValues = true }), w, kernels.ErrShape, "wv is present, but the config has no v projection"},
		{"shared keys", dev, with(func(c *config) { c.SharedKeys = true }), w, kernels.ErrShape, "wk is present, but the config has no k projection"},
		{"a device without norms", kernels.NewDevice(turning), whole, w, kernels.ErrUnsupported, "no norms"},
		{"a device without gates", kernels.NewDevice(turning), gated, must.Get(gated.Initialise(nn.Initialiser{}))(t), kernels.ErrUnsupported, "no gates"},
		{"a device without copies", kernels.NewDevice(turning), copied, must.Get(copied.Initialise(nn.Initialiser{}))(t), kernels.ErrUnsupported, "no copies"},
	} {
		must.Fail(t, c.name, must.Err(nn.NewMultiHeadAttention(ctx, c.dev, c.config, c.w)), c.want, c.text)
	}

	x := random(t, dev, 1, 1, 1, 5, 6)
	must.Fail(t, "sinks twice", must.Err(layerOf(t, dev, whole).Apply(ctx, x, nn.MultiHeadOptions{Options: kernels.Options{Sinks: []float32{1, 2}}})),
		kernels.ErrOption, "options Sinks is set, but the layer has its own")
	must.Fail(t, "gradients of a layer norm", must.Err(layerOf(t, dev, with(func(c *config) { c.Norm = &nn.Norm{Mean: true} })).Forward(ctx, x, nn.MultiHeadOptions{})),
		kernels.ErrUnsupported, "a Norm with Mean, which has no gradients")
	must.Fail(t, "shared keys without a cache", must.Err(layerOf(t, dev, config{Model: 6, SharedKeys: true}).Apply(ctx, x, nn.MultiHeadOptions{})),
		kernels.ErrOption, "the layer has SharedKeys, but options Cache is not set")
	must.Fail(t, "segments twice", must.Err(layerOf(t, dev, config{Model: 6, Chunk: 2}).Apply(ctx, x, nn.MultiHeadOptions{Options: kernels.Options{QSegments: [][]int32{{1, 1, 1, 1, 1}}}})),
		kernels.ErrOption, "the layer's Chunk sets the segments of x")
	cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{Batch: 1, KVHeads: 1, Dim: 4, Capacity: 9, RoPE: &nn.RoPE{}}))(t)
	defer cache.Release()
	late := layerOf(t, dev, with(func(c *config) { c.RoPE, c.Norm = nil, &nn.Norm{AfterRoPE: true} }))
	must.Fail(t, "norm after the cache's rotation", must.Err(late.Apply(ctx, x, nn.MultiHeadOptions{Cache: cache})),
		kernels.ErrOption, "give the layer the RoPE and the Cache none")
}

// TestNormsAndGatesAreRead reads all weights of a layer from a file of Qwen3-Next's form with sinks, in which a
// number tells its place, and from the file that they are written to.
func TestNormsAndGatesAreRead(t *testing.T) {
	// element i of a tensor is first + i.
	numbered := func(first int, shape ...int) stored {
		n := 1
		for _, l := range shape {
			n *= l
		}
		s := stored{"F32", shape, make([]float32, n)}
		for i := range s.data {
			s.data[i] = float32(first + i)
		}
		return s
	}
	tensors := map[string]stored{
		"q_proj.weight": numbered(0, 16, 6), "q_proj.bias": numbered(100, 16), "k_proj.weight": numbered(200, 4, 6), "v_proj.weight": numbered(300, 4, 6),
		"o_proj.weight": numbered(400, 6, 8), "q_norm.weight": numbered(500, 4), "k_norm.weight": numbered(600, 4), "sinks": numbered(700, 2),
	}
	w := must.Get(read(whole.LoadSafetensors, "", tensors))(t)
	for name, c := range map[string]struct {
		t    kernels.Tensor
		want []float32
	}{
		// Rows 0 to 3 and 8 to 11 of q_proj are the queries of two heads; a column of Wq is a row.
		"wq":    {w.Wq, []float32{0, 6, 12, 18, 48, 54, 60, 66, 1, 7, 13, 19, 49, 55, 61, 67}},
		"wg":    {w.Wg, []float32{24, 30, 36, 42, 72, 78, 84, 90, 25, 31, 37, 43, 73, 79, 85, 91}},
		"bq":    {w.Bq, []float32{100, 101, 102, 103, 108, 109, 110, 111}},
		"bg":    {w.Bg, []float32{104, 105, 106, 107, 112, 113, 114, 115}},
		"qnorm": {w.QNorm, []float32{500, 501, 502, 503}},
		"knorm": {w.KNorm, []float32{600, 601, 602, 603}},
		"sinks": {w.Sinks, []float32{700, 701}},
	} {
		if got := must.Get(c.t.Float32s())(t); !slices.Equal(got[:len(c.want)], c.want) {
			t.Errorf("%s begins with %v, should be %v", name, got[:len(c.want)], c.want)
		}
	}
	file := written(t, w)
	again := must.Get(whole.LoadSafetensors(bytes.NewReader(file), int64(len(file)), ""))(t)
	if !same(numbers(t, again), numbers(t, w)) || again.Wg.Shape() != w.Wg.Shape() || again.Sinks.Shape() != w.Sinks.Shape() {
		t.Errorf("read %v, wrote %v", again, w)
	}

	change := func(name string, s stored) map[string]stored {
		tensors := maps.Clone(tensors)
		if tensors[name] = s; s.data == nil {
			delete(tensors, name)
		}
		return tensors
	}
	packed := map[string]stored{"qkv_proj.weight": numbered(0, 24, 6), "o_proj.weight": numbered(0, 6, 8)}
	for _, c := range []struct {
		name    string
		config  nn.MultiHeadConfig
		tensors map[string]stored
		want    error
		text    string
	}{
		{"no norm in the config", with(func(c *nn.MultiHeadConfig) { c.Norm = nil }), tensors, kernels.ErrFile, `would ignore ["k_norm.weight" "q_norm.weight"]`},
		{"no norm in the file", whole, change("k_norm.weight", stored{}), kernels.ErrFile, `the config has Norm with weights, but there is no "k_norm.weight"`},
		{"another norm", with(func(c *nn.MultiHeadConfig) { c.Norm = &nn.Norm{Projection: true} }), tensors, kernels.ErrShape, "q_norm.weight: shape is [4], for the config it must be [8]"},
		{"no sinks in the config", with(func(c *nn.MultiHeadConfig) { c.Sinks = false }), tensors, kernels.ErrFile, `would ignore ["sinks"]`},
		{"no sinks in the file", whole, change("sinks", stored{}), kernels.ErrFile, `the config has Sinks, but there is no "sinks"`},
		{"no gate in the query", whole, change("q_proj.weight", numbered(0, 8, 6)), kernels.ErrShape, "q_proj.weight: shape is [8 6], for the config it must be [16 6]"},
		{"two gates", whole, change("g_proj.weight", numbered(0, 8, 6)), kernels.ErrFile, `would ignore ["g_proj.weight"]`},
		{"a gate of heads", with(func(c *nn.MultiHeadConfig) { c.Gate = nn.GateHeads }), change("q_proj.weight", numbered(0, 8, 6)), kernels.ErrShape, "q_proj.bias: shape is [16]"},
		{"no gate in the file", with(func(c *nn.MultiHeadConfig) { c.Gate, c.Bias = nn.GateElements, false }), map[string]stored{"q_proj.weight": numbered(0, 8, 6),
			"k_proj.weight": tensors["k_proj.weight"], "v_proj.weight": tensors["v_proj.weight"], "o_proj.weight": tensors["o_proj.weight"],
			"q_norm.weight": tensors["q_norm.weight"], "k_norm.weight": tensors["k_norm.weight"], "sinks": tensors["sinks"]}, kernels.ErrFile, `the config has Gate, but there is no "g_proj.weight"`},
		{"values of their own", with(func(c *nn.MultiHeadConfig) { c.KeysAsValues = true }), tensors, kernels.ErrFile, `would ignore ["v_proj.weight"]`},
		{"a gate in packed rows", whole, packed, kernels.ErrUnsupported, `"qkv_proj.weight" has the weights of q, k and v, which is not read with GateInQuery`},
	} {
		must.Fail(t, c.name, must.Err(read(c.config.LoadSafetensors, "", c.tensors)), c.want, c.text)
	}
}

// TestNormsAndGatesInitialise: new norms and sinks change nothing but the length of queries and keys.
func TestNormsAndGatesInitialise(t *testing.T) {
	for plus, want := range map[bool]float32{false: 1, true: 0} {
		w := must.Get(with(func(c *nn.MultiHeadConfig) { c.Norm = &nn.Norm{Norm: kernels.Norm{PlusOne: plus}} }).Initialise(nn.Initialiser{}))(t)
		for name, c := range map[string]struct {
			t    kernels.Tensor
			want []float32
		}{"qnorm": {w.QNorm, []float32{want, want, want, want}}, "knorm": {w.KNorm, []float32{want, want, want, want}}, "sinks": {w.Sinks, []float32{0, 0}}} {
			if got, err := c.t.Float32s(); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("with PlusOne %v, %s is %v, %v, should be %v", plus, name, got, err, c.want)
			}
		}
		wq, wg := must.Get(w.Wq.Float32s())(t), must.Get(w.Wg.Float32s())(t)
		if slices.Equal(wg, wq) || !slices.ContainsFunc(wg, func(x float32) bool { return x != 0 }) {
			t.Errorf("wg is %v, wq %v", wg, wq)
		}
	}
}
