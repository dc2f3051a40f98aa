package nn_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

func ExampleMultiHeadAttention() {
	ctx := context.Background()
	dev, err := kernels.Open("auto") // a hardware GPU, else the CPU
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()

	// Eight query heads share two heads of keys and values, as in Llama.
	config := nn.MultiHeadConfig{Model: 64, Heads: 8, KVHeads: 2, RoPE: &nn.RoPE{}}
	weights, err := config.Initialise(nn.Initialiser{Seed: 1}) // or LoadWeights
	if err != nil {
		log.Fatal(err)
	}
	layer, err := nn.NewMultiHeadAttention(ctx, dev, config, weights)
	if err != nil {
		log.Fatal(err)
	}
	defer layer.Release()

	// Two sequences of 16 tokens.
	shape := backend.Shape{2, 1, 16, 64}
	x, err := dev.FromFloat32(ctx, backend.F32, make([]float32, shape.Elements()), shape)
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

// counting counts uploads and downloads.
type counting struct {
	backend.Backend
	backend.Projector
	backend.Rotator
	ups, downs, elements atomic.Int64
}

func count(dev *kernels.Device) *counting {
	be := dev.Backend()
	return &counting{Backend: be, Projector: be.(backend.Projector), Rotator: be.(backend.Rotator)}
}

func (c *counting) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
	c.ups.Add(1)
	c.elements.Add(int64(host.Shape().Elements()))
	return c.Backend.Upload(ctx, host)
}

func (c *counting) Download(ctx context.Context, host, src backend.Tensor) error {
	c.downs.Add(1)
	return c.Backend.Download(ctx, host, src)
}

// layerOf returns a layer with random weights.
func layerOf(t *testing.T, dev *kernels.Device, c nn.MultiHeadConfig) *nn.MultiHeadAttention {
	t.Helper()
	w, err := c.Initialise(nn.Initialiser{Seed: 3})
	if err != nil {
		t.Fatal(err)
	}
	l, err := nn.NewMultiHeadAttention(t.Context(), dev, c, w)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Release)
	return l
}

// TestLayersStayOnTheDevice: a layer downloads nothing and uploads only the angles, unless
// they are given.
func TestLayersStayOnTheDevice(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		on := count(dev)
		rope := &nn.RoPE{}
		l := layerOf(t, kernels.NewDevice(on), nn.MultiHeadConfig{Model: 32, Heads: 4, KVHeads: 2, Bias: true, RoPE: rope})
		x := random(t, dev, 1, 2, 1, 9, 32)
		z := random(t, dev, 2, 2, 1, 13, 32)
		angles := func(n int) kernels.Angles {
			a, err := rope.Angles(t.Context(), dev, 8, positionsOf(t, 0, n))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(a.Release)
			return a
		}
		q, k := angles(9), angles(13)
		var first, cross []float32
		for _, c := range []struct {
			name     string
			opt      nn.MultiHeadOptions
			ups      int64
			elements int64
			same     *[]float32 // results that must be equal
		}{
			{"self", nn.MultiHeadOptions{}, 2, 2 * 9 * 4, &first},
			{"self, angles given", nn.MultiHeadOptions{Angles: q}, 0, 0, &first},
			{"cross", nn.MultiHeadOptions{Memory: z}, 4, 2 * (9 + 13) * 4, &cross},
			{"cross, angles given", nn.MultiHeadOptions{Memory: z, Angles: q, MemoryAngles: k}, 0, 0, &cross},
			{"x as memory", nn.MultiHeadOptions{Memory: x, Angles: q, MemoryAngles: q}, 0, 0, &first},
		} {
			on.ups.Store(0)
			on.downs.Store(0)
			on.elements.Store(0)
			r, err := l.Apply(t.Context(), x, c.opt)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			if on.downs.Load() != 0 || on.ups.Load() != c.ups || on.elements.Load() != c.elements {
				t.Errorf("%s: %d downloads, %d uploads of %d elements, should be 0 and %d of %d", c.name, on.downs.Load(), on.ups.Load(), on.elements.Load(), c.ups, c.elements)
			}
			got, err := dev.Float32s(t.Context(), r.O)
			r.Release()
			if err != nil {
				t.Fatal(err)
			}
			if *c.same == nil {
				*c.same = got
			} else if !slices.Equal(got, *c.same) {
				t.Errorf("%s: the result differs", c.name)
			}
		}
		if slices.Equal(first, cross) {
			t.Error("the memory has no effect")
		}
	})
}

// TestLayersReleaseTheirMemory fails calls at each allocation in turn: earlier allocations
// are released.
func TestLayersReleaseTheirMemory(t *testing.T) {
	dev := onCPU(t)
	on := &lastAlloc{counting: count(dev), left: 8}
	l := layerOf(t, kernels.NewDevice(on), nn.MultiHeadConfig{Model: 12, Heads: 3, RoPE: &nn.RoPE{}, Bias: true})
	x := random(t, dev, 1, 2, 1, 5, 12)
	opt := nn.MultiHeadOptions{Options: kernels.Options{LSE: true, Weights: true}}
	for n := 0; ; n++ {
		on.have, on.left = nil, n
		r, err := l.Apply(t.Context(), x, opt)
		if err == nil {
			if n != 9 { // q, k, v, cos, sin, joined, lse, weights, y
				t.Errorf("a call allocates %d times, should be 9", n)
			}
			for _, out := range []backend.Tensor{r.O, r.LSE, r.Weights} {
				if _, err := out.Float32s(); err != nil {
					t.Errorf("an output was released: %v", err)
				}
			}
			r.Release()
		} else if !errors.Is(err, backend.ErrMemory) {
			t.Fatalf("allocation %d fails: %v", n, err)
		}
		for i, held := range on.have {
			if _, err := held.Float32s(); !errors.Is(err, backend.ErrReleased) {
				t.Errorf("%d allocations, then %v: allocation %d is not released", n, err, i)
			}
		}
		if err == nil {
			return
		}
	}
}

// lastAlloc has memory for so many more tensors.
type lastAlloc struct {
	*counting
	left int
	have []backend.Tensor
}

func (l *lastAlloc) give(t backend.Tensor, err error) (backend.Tensor, error) {
	if err == nil {
		l.have = append(l.have, t)
	}
	return t, err
}

func (l *lastAlloc) Alloc(ctx context.Context, dtype backend.DType, s backend.Shape) (backend.Tensor, error) {
	if l.left--; l.left < 0 {
		return backend.Tensor{}, backend.ErrMemory
	}
	return l.give(l.counting.Alloc(ctx, dtype, s))
}

func (l *lastAlloc) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
	if l.left--; l.left < 0 {
		return backend.Tensor{}, backend.ErrMemory
	}
	return l.give(l.counting.Upload(ctx, host))
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
		{"no model", config{}, backend.ErrOption, "Model is 0"},
		{"negative heads", config{Model: 8, Heads: -2}, backend.ErrOption, "Heads is -2"},
		{"head size", config{Model: 8, Heads: 3}, backend.ErrOption, "Model is 8, which 3 heads do not divide: set HeadDim"},
		{"kv heads", config{Model: 8, Heads: 4, KVHeads: 3}, backend.ErrOption, "KVHeads is 3, Heads is 4"},
		{"type", config{Model: 8, DType: backend.Bool}, backend.ErrDType, "DType is bool"},
		{"rope", config{Model: 6, Heads: 2, RoPE: &nn.RoPE{}}, backend.ErrOption, "dim is 3, it must be even"},
		{"too large", config{Model: 1 << 30, HeadDim: 1 << 30, Heads: 1 << 30}, backend.ErrOption, "wq would have shape"},
	} {
		if _, err := c.config.Initialise(nn.Initialiser{}); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error is %v, should be %v and contain %q", c.name, err, c.want, c.text)
		}
	}

	c := config{Model: 8, Heads: 2, Memory: 6, Bias: true}
	fresh := func(c config) nn.MultiHeadWeights {
		w, err := c.Initialise(nn.Initialiser{})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	square := fresh(config{Model: 8, Bias: true})
	without := fresh(config{Model: 8, Memory: 6})
	wide := fresh(c)
	wide.Wk = square.Wk
	half := fresh(c)
	half.Wv = meta(t, backend.F16, 1, 1, 6, 8)
	nowhere := fresh(c)
	nowhere.Bo = meta(t, backend.F32, 1, 1, 1, 8)
	turned := fresh(c)
	var err error
	if turned.Wq, err = turned.Wq.Swap(backend.Seq, backend.Dim); err != nil {
		t.Fatal(err)
	}
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
		{"no weights", dev, c, nn.MultiHeadWeights{}, backend.ErrShape, "wq is missing (the zero Tensor), it must have shape [1 1 8 8]"},
		{"no biases", dev, c, without, backend.ErrShape, "bq is missing"},
		{"biases too many", dev, noBias, fresh(c), backend.ErrShape, "bq is present, but the config has no Bias"},
		{"rows", dev, c, wide, backend.ErrShape, "wk has shape [1 1 8 8], it must be [1 1 6 8], the shape for the config"},
		{"type", dev, c, half, backend.ErrDType, "wv is f16"},
		{"no memory", dev, c, nowhere, backend.ErrDevice, "bo is not in host memory"},
		{"strides", dev, c, turned, backend.ErrShape, "wq has strides"},
		{"no projections", kernels.NewDevice(plainBackend{dev.Backend()}), c, fresh(c), backend.ErrUnsupported, "no projections"},
	} {
		if _, err := nn.NewMultiHeadAttention(ctx, w.dev, w.config, w.w); !errors.Is(err, w.want) || !strings.Contains(err.Error(), w.text) {
			t.Errorf("%s: error is %v, should be %v and contain %q", w.name, err, w.want, w.text)
		}
	}

	l := layerOf(t, dev, c)
	x, z := random(t, dev, 1, 2, 1, 5, 8), random(t, dev, 2, 2, 1, 7, 6)
	short, err := (&nn.RoPE{}).Angles(ctx, dev, 4, positionsOf(t, 0, 4))
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []struct {
		name string
		x    backend.Tensor
		opt  nn.MultiHeadOptions
		want error
		text string
	}{
		{"no x", backend.Tensor{}, nn.MultiHeadOptions{}, backend.ErrShape, "x is missing"},
		{"model size", z, nn.MultiHeadOptions{Memory: z}, backend.ErrShape, "x has shape [2 1 7 6], it must be [B, 1, S, 8]"},
		{"memory size", x, nn.MultiHeadOptions{}, backend.ErrShape, "has shape [2 1 5 8], it must be [2, 1, Sk, 6]"},
		{"memory type", x, nn.MultiHeadOptions{Memory: meta(t, backend.F16, 2, 1, 7, 6)}, backend.ErrDType, "x is f32, memory is f16"},
		{"batches", x, nn.MultiHeadOptions{Memory: meta(t, backend.F32, 1, 1, 7, 6)}, backend.ErrShape, "has shape [1 1 7 6]"},
		{"an option", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{Softcap: -1}}, backend.ErrOption, "softcap is -1"},
		{"packed", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{CuQ: []int{0, 5}}}, backend.ErrUnsupported, "CuQ is set, but a layer computes"},
		{"packed keys", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{CuK: []int{0, 5}}}, backend.ErrUnsupported, "CuK is set, but a layer computes"},
		{"pages", x, nn.MultiHeadOptions{Memory: z, Options: kernels.Options{Pages: new(backend.Pages)}}, backend.ErrUnsupported, "Pages is set, but a layer computes"},
		{"angles for one", x, nn.MultiHeadOptions{Memory: z, Angles: short}, backend.ErrOption, "only one of Angles and MemoryAngles is set"},
		{"angles too few", x, nn.MultiHeadOptions{Memory: z, Angles: short, MemoryAngles: short}, backend.ErrShape, "q: rotate: cos: shape [1 1 4 2] does not broadcast to [2 2 5 2]"},
	} {
		if _, err := l.Apply(ctx, a.x, a.opt); !errors.Is(err, a.want) || !strings.Contains(err.Error(), a.text) {
			t.Errorf("%s: error is %v, should be %v and contain %q", a.name, err, a.want, a.text)
		}
	}
	done, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := l.Apply(done, x, nn.MultiHeadOptions{Memory: z}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	l.Release()
	if _, err := l.Apply(ctx, x, nn.MultiHeadOptions{Memory: z}); !errors.Is(err, backend.ErrReleased) {
		t.Errorf("released: %v", err)
	}
}

func meta(t *testing.T, dtype backend.DType, s ...int) backend.Tensor {
	t.Helper()
	x, err := backend.Meta(dtype, backend.Shape(s))
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// plainBackend has none of the optional interfaces.
type plainBackend struct{ backend.Backend }
