package nn_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

func Example() {
	ctx := context.Background()
	dev, err := kernels.Open("auto") // a hardware GPU, else the CPU
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()

	// Eight query heads share two heads of keys and values, as in Llama.
	config := nn.MultiHeadConfig{Model: 64, Heads: 8, KVHeads: 2, RoPE: &nn.RoPE{}}
	weights, err := config.Initialise(nn.Initialiser{Seed: 1}) // or LoadSafetensors
	if err != nil {
		log.Fatal(err)
	}
	layer, err := nn.NewMultiHeadAttention(ctx, dev, config, weights)
	if err != nil {
		log.Fatal(err)
	}
	defer layer.Release()

	// Two sequences of 16 tokens.
	shape := kernels.Shape{2, 1, 16, 64}
	x, err := dev.FromFloat32(ctx, kernels.F32, make([]float32, shape.Elements()), shape)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Release()
	y, err := layer.Apply(ctx, x, nn.MultiHeadOptions{Options: kernels.Options{Causal: true}})
	if err != nil {
		log.Fatal(err)
	}
	defer y.Release()
	fmt.Println(y.O.Shape())
	// Output: [2 1 16 64]
}

// layerOf returns a layer with random weights.
func layerOf(t *testing.T, dev *kernels.Device, c nn.MultiHeadConfig) *nn.MultiHeadAttention {
	t.Helper()
	w := must.Get(c.Initialise(nn.Initialiser{Seed: 3}))(t)
	l := must.Get(nn.NewMultiHeadAttention(t.Context(), dev, c, w))(t)
	t.Cleanup(l.Release)
	return l
}

// TestLayersReleaseTheirMemory fails calls at each allocation in turn: earlier allocations are released.
func TestLayersReleaseTheirMemory(t *testing.T) {
	all := with(func(c *nn.MultiHeadConfig) { c.Norm, c.KeysAsValues = &nn.Norm{Values: true}, true })
	for _, c := range []struct {
		name      string
		config    nn.MultiHeadConfig
		backwards bool
		n         int // allocations of a call; 0 means any
	}{
		{"plain", nn.MultiHeadConfig{Model: 6, Heads: 3, RoPE: &nn.RoPE{}, Bias: true}, false, 9},                                     // q, k, v, cos, sin, joined, lse, weights, y
		{"norms, a gate, keys as values", all, false, 10},                                                                             // and the gate
		{"chunks, a temperature", nn.MultiHeadConfig{Model: 6, Heads: 3, Chunk: 2, Temperature: &nn.Temperature{Floor: 2}}, false, 8}, // factors, no cos and sin
		{"gradients", all, true, 0},
	} {
		dev := onCPU(t)
		be := dev.Backend()
		on := &lastAlloc{Backend: be, Projector: be.(backend.Projector), Rotator: be.(backend.Rotator), Normaliser: be.(backend.Normaliser),
			Gater: be.(backend.Gater), Copier: be.(backend.Copier), Differentiator: be.(backend.Differentiator), left: 13}
		l := layerOf(t, kernels.NewDevice(on), c.config)
		x := random(t, dev, 1, 2, 1, 5, 6)
		call := func() (r kernels.Result, err error) {
			if !c.backwards {
				return l.Apply(t.Context(), x, nn.MultiHeadOptions{Options: kernels.Options{LSE: true, Weights: true}})
			}
			pass, err := l.Forward(t.Context(), x, nn.MultiHeadOptions{})
			defer pass.Release()
			if err != nil {
				return r, err
			}
			g, err := l.Backward(t.Context(), pass, x)
			g.Release()
			return r, err
		}
		for n := 0; ; n++ {
			on.have, on.left = nil, n
			r, err := call()
			if err == nil {
				if n != c.n && c.n > 0 {
					t.Errorf("%s: a call allocates %d times, should be %d", c.name, n, c.n)
				}
				for _, out := range []kernels.Tensor{r.O, r.LSE, r.Weights} {
					if _, err := out.Float32s(); err != nil && !c.backwards {
						t.Errorf("%s: an output was released: %v", c.name, err)
					}
				}
				r.Release()
			} else if !errors.Is(err, kernels.ErrMemory) {
				t.Fatalf("%s: allocation %d fails: %v", c.name, n, err)
			}
			for i, held := range on.have {
				if _, err := held.Float32s(); !errors.Is(err, kernels.ErrReleased) {
					t.Errorf("%s: %d allocations, then %v: allocation %d is not released", c.name, n, err, i)
				}
			}
			if err == nil {
				break
			}
		}
	}
}

// lastAlloc has memory for so many more tensors.
type lastAlloc struct {
	backend.Backend
	backend.Projector
	backend.Rotator
	backend.Normaliser
	backend.Gater
	backend.Copier
	backend.Differentiator
	left int
	have []kernels.Tensor
}

func (l *lastAlloc) give(t kernels.Tensor, err error) (kernels.Tensor, error) {
	if err == nil {
		l.have = append(l.have, t)
	}
	return t, err
}

func (l *lastAlloc) Alloc(ctx context.Context, dtype kernels.DType, s kernels.Shape) (kernels.Tensor, error) {
	if l.left--; l.left < 0 {
		return kernels.Tensor{}, kernels.ErrMemory
	}
	return l.give(l.Backend.Alloc(ctx, dtype, s))
}

func (l *lastAlloc) Upload(ctx context.Context, host kernels.Tensor) (kernels.Tensor, error) {
	if l.left--; l.left < 0 {
		return kernels.Tensor{}, kernels.ErrMemory
	}
	return l.give(l.Backend.Upload(ctx, host))
}

func TestLayerRefuses(t *testing.T) {
	dev := onCPU(t)
	ctx := t.Context()
	type config = nn.MultiHeadConfig
	for _, c := range []struct {
		name   string
		config config
		want   error
		text   string
	}{
		{"no model", config{}, kernels.ErrOption, "Model is 0"},
		{"negative heads", config{Model: 8, Heads: -2}, kernels.ErrOption, "Heads is -2"},
		{"head size", config{Model: 8, Heads: 3}, kernels.ErrOption, "Model is 8, which 3 heads do not divide: set HeadDim"},
		{"kv heads", config{Model: 8, Heads: 4, KVHeads: 3}, kernels.ErrOption, "KVHeads is 3, Heads is 4"},
		{"type", config{Model: 8, DType: kernels.Bool}, kernels.ErrDType, "DType is bool"},
		{"rope", config{Model: 6, Heads: 2, RoPE: &nn.RoPE{}}, kernels.ErrOption, "dim is 3, it must be even"},
		{"too large", config{Model: 1 << 30, HeadDim: 1 << 30, Heads: 1 << 30}, kernels.ErrOption, "wq would have shape"},
	} {
		must.Fail(t, c.name, must.Err(c.config.Initialise(nn.Initialiser{})), c.want, c.text)
	}

	c := config{Model: 8, Heads: 2, Memory: 6, Bias: true}
	fresh := func(c config) nn.MultiHeadWeights {
		return must.Get(c.Initialise(nn.Initialiser{}))(t)
	}
	square := fresh(config{Model: 8, Bias: true})
	without := fresh(config{Model: 8, Memory: 6})
	wide := fresh(c)
	wide.Wk = square.Wk
	half := fresh(c)
	half.Wv = meta(t, kernels.F16, 1, 1, 6, 8)
	nowhere := fresh(c)
	nowhere.Bo = meta(t, kernels.F32, 1, 1, 1, 8)
	turned := fresh(c)
	turned.Wq = must.Get(turned.Wq.Swap(kernels.Seq, kernels.Dim))(t)
	noBias := c
	noBias.Bias = false
	for _, w := range []struct {
		name   string
		dev    *kernels.Device
		config config
		w      nn.MultiHeadWeights
		want   error
		text   string
	}{
		{"no weights", dev, c, nn.MultiHeadWeights{}, kernels.ErrShape, "wq is missing (the zero Tensor), it must have shape [1 1 8 8]"},
		{"no biases", dev, c, without, kernels.ErrShape, "bq is missing"},
		{"biases too many", dev, noBias, fresh(c), kernels.ErrShape, "bq is present, but the config has no Bias"},
		{"rows", dev, c, wide, kernels.ErrShape, "wk has shape [1 1 8 8], it must be [1 1 6 8], the shape for the config"},
		{"type", dev, c, half, kernels.ErrDType, "wv is f16"},
		{"no memory", dev, c, nowhere, kernels.ErrDevice, "bo is not in host memory"},
		{"strides", dev, c, turned, kernels.ErrShape, "wq has strides"},
		{"no projections", kernels.NewDevice(plainBackend{dev.Backend()}), c, fresh(c), kernels.ErrUnsupported, "no projections"},
	} {
		must.Fail(t, w.name, must.Err(nn.NewMultiHeadAttention(ctx, w.dev, w.config, w.w)), w.want, w.text)
	}

	l := layerOf(t, dev, c)
	x, z := random(t, dev, 1, 2, 1, 5, 8), random(t, dev, 2, 2, 1, 7, 6)
	short := must.Get((&nn.RoPE{}).Angles(ctx, dev, 4, positionsOf(t, 0, 4)))(t)
	for _, a := range []wrongCall{
		{"no x", kernels.Tensor{}, nn.MultiHeadOptions{}, kernels.ErrShape, "x is missing"},
		{"model size", z, nn.MultiHeadOptions{Memory: z}, kernels.ErrShape, "x has shape [2 1 7 6], it must be [B, 1, S, 8]"},
		{"memory size", x, nn.MultiHeadOptions{}, kernels.ErrShape, "has shape [2 1 5 8], it must be [2, 1, Sk, 6]"},
		{"memory type", x, nn.MultiHeadOptions{Memory: meta(t, kernels.F16, 2, 1, 7, 6)}, kernels.ErrDType, "x is f32, memory is f16"},
		{"batches", x, nn.MultiHeadOptions{Memory: meta(t, kernels.F32, 1, 1, 7, 6)}, kernels.ErrShape, "has shape [1 1 7 6]"},
		{"an option", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{Softcap: -1}}, kernels.ErrOption, "softcap is -1"},
		{"packed", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{CuQ: []int{0, 5}}}, kernels.ErrUnsupported, "CuQ is set, but a layer computes"},
		{"packed keys", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{CuK: []int{0, 5}}}, kernels.ErrUnsupported, "CuK is set, but a layer computes"},
		{"pages", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{Pages: new(kernels.Pages)}}, kernels.ErrUnsupported, "Pages is set, but a layer computes"},
		{"angles for one", x, nn.MultiHeadOptions{Memory: z, Angles: short}, kernels.ErrOption, "only one of Angles and MemoryAngles is set"},
		{"angles too few", x, nn.MultiHeadOptions{Memory: z, Angles: short, MemoryAngles: short}, kernels.ErrShape, "q: rotate: cos: shape [1 1 4 2] does not broadcast to [2 2 5 2]"},
	} {
		a.refused(t, must.Err(l.Apply(ctx, a.x, a.opt)))
	}
	done, cancel := context.WithCancel(ctx)
	cancel()
	must.Fail(t, "cancelled", must.Err(l.Apply(done, x, nn.MultiHeadOptions{Memory: z})), context.Canceled)
	l.Release()
	must.Fail(t, "released", must.Err(l.Apply(ctx, x, nn.MultiHeadOptions{Memory: z})), kernels.ErrReleased)
}

func meta(t *testing.T, dtype kernels.DType, s ...int) kernels.Tensor {
	t.Helper()
	return must.Get(kernels.Meta(dtype, kernels.Shape(s)))(t)
}

// plainBackend has none of the optional interfaces.
type plainBackend struct{ backend.Backend }

func TestLayerGradientsRefuse(t *testing.T) {
	dev := onCPU(t)
	l := layerOf(t, dev, nn.MultiHeadConfig{Model: 8, Heads: 2})
	must.Fail(t, "no pass", must.Err(l.Backward(t.Context(), nil, kernels.Tensor{})), kernels.ErrOption)
	x := random(t, dev, 1, 1, 1, 3, 8)
	pass := must.Get(l.Forward(t.Context(), x, nn.MultiHeadOptions{}))(t)
	defer pass.Release()
	must.Fail(t, "dy of another shape", must.Err(l.Backward(t.Context(), pass, random(t, dev, 1, 1, 1, 4, 8))), kernels.ErrShape)
	y := must.Get(l.Apply(t.Context(), x, nn.MultiHeadOptions{}))(t)
	defer y.Release()
	a, _ := dev.ToFloat32(t.Context(), y.O)
	if b, err := dev.ToFloat32(t.Context(), pass.O); err != nil || !slices.Equal(a, b) {
		t.Errorf("Forward gives %v, Apply %v, %v", b, a, err)
	}
}

// onCPU returns a device that the test closes.
func onCPU(t *testing.T) *kernels.Device {
	t.Helper()
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	t.Cleanup(func() { dev.Close() })
	return dev
}

// random returns a tensor of normal numbers that the test releases.
func random(t *testing.T, dev *kernels.Device, seed uint64, shape ...int) kernels.Tensor {
	t.Helper()
	s := kernels.Shape(shape)
	data, rng := make([]float32, s.Elements()), rand.New(rand.NewPCG(seed, 1))
	for i := range data {
		data[i] = float32(rng.NormFloat64())
	}
	x := must.Get(dev.FromFloat32(t.Context(), kernels.F32, data, s))(t)
	t.Cleanup(x.Release)
	return x
}

// wrongCall is a call of a layer that is refused.
type wrongCall struct {
	name string
	x    kernels.Tensor
	opt  nn.MultiHeadOptions
	want error
	text string
}

// refused checks the error of the call.
func (c wrongCall) refused(t *testing.T, err error) {
	t.Helper()
	must.Fail(t, c.name, err, c.want, c.text)
}
