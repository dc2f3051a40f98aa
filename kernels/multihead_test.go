package kernels_test

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
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

func ExampleMultiHeadAttention() {
	ctx := context.Background()
	be, err := backend.Open("auto") // a GPU when there is one, else the CPU
	if err != nil {
		log.Fatal(err)
	}
	defer be.Close()

	// Eight query heads share two heads of keys and values, as in Llama.
	config := kernels.MultiHeadConfig{Model: 64, Heads: 8, KVHeads: 2, RoPE: &kernels.RoPE{}}
	weights, err := config.Initialise(kernels.Initialiser{Seed: 1}) // or config.LoadWeights("layer.npz")
	if err != nil {
		log.Fatal(err)
	}
	layer, err := kernels.NewMultiHeadAttention(ctx, be, config, weights)
	if err != nil {
		log.Fatal(err)
	}
	defer layer.Release()

	// Two sequences of 16 tokens.
	shape := backend.Shape{2, 1, 16, 64}
	x, err := kernels.FromFloat32(ctx, be, backend.F32, make([]float32, shape.Elements()), shape)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Release()
	y, err := layer.Apply(ctx, x, kernels.MultiHeadOptions{Options: kernels.Options{Causal: true}})
	if err != nil {
		log.Fatal(err)
	}
	defer y.Release()
	fmt.Println(y.O.Shape())
	// Output: [2 1 16 64]
}

// counting counts what goes over to the device and what comes back, and what was
// allocated there and not released.
type counting struct {
	backend.Backend
	backend.Projector
	backend.Rotator
	ups, downs, elements atomic.Int64
}

func count(be backend.Backend) *counting {
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

// layerOf returns a layer with drawn weights.
func layerOf(t *testing.T, be backend.Backend, c kernels.MultiHeadConfig) *kernels.MultiHeadAttention {
	t.Helper()
	w, err := c.Initialise(kernels.Initialiser{Seed: 3})
	if err != nil {
		t.Fatal(err)
	}
	l, err := kernels.NewMultiHeadAttention(t.Context(), be, c, w)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Release)
	return l
}

// TestLayersStayOnTheDevice: nothing comes back, and nothing goes over but the
// angles, and not even those when they are given.
func TestLayersStayOnTheDevice(t *testing.T) {
	each(t, func(t *testing.T, be backend.Backend) {
		on := count(be)
		rope := &kernels.RoPE{}
		l := layerOf(t, on, kernels.MultiHeadConfig{Model: 32, Heads: 4, KVHeads: 2, Bias: true, RoPE: rope})
		x := upload(t, be, normal(2*9*32, 1), backend.Shape{2, 1, 9, 32})
		z := upload(t, be, normal(2*13*32, 2), backend.Shape{2, 1, 13, 32})
		angles := func(n int) kernels.Angles {
			a, err := rope.Angles(t.Context(), be, 8, kernels.Positions(0, n))
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
			opt      kernels.MultiHeadOptions
			ups      int64
			elements int64
			same     *[]float32 // results that must be equal
		}{
			{"self", kernels.MultiHeadOptions{}, 2, 2 * 9 * 4, &first},
			{"self, angles given", kernels.MultiHeadOptions{Angles: q}, 0, 0, &first},
			{"cross", kernels.MultiHeadOptions{Memory: z}, 4, 2 * (9 + 13) * 4, &cross},
			{"cross, angles given", kernels.MultiHeadOptions{Memory: z, Angles: q, MemoryAngles: k}, 0, 0, &cross},
			{"x as memory", kernels.MultiHeadOptions{Memory: x, Angles: q, MemoryAngles: q}, 0, 0, &first},
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
			got, err := kernels.Float32s(t.Context(), be, r.O)
			r.Release()
			if err != nil {
				t.Fatal(err)
			}
			if *c.same == nil {
				*c.same = got
			} else if !slices.Equal(got, *c.same) {
				t.Errorf("%s: another result", c.name)
			}
		}
		if slices.Equal(first, cross) {
			t.Error("what is attended to changes nothing")
		}
	})
}

// TestLayersReleaseTheirMemory fails calls at each allocation in turn: what was
// allocated before is released.
func TestLayersReleaseTheirMemory(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	on := &lastAlloc{counting: count(be), left: 8}
	l := layerOf(t, on, kernels.MultiHeadConfig{Model: 12, Heads: 3, RoPE: &kernels.RoPE{}, Bias: true})
	x := upload(t, be, normal(2*5*12, 1), backend.Shape{2, 1, 5, 12})
	opt := kernels.MultiHeadOptions{Options: kernels.Options{LSE: true, Weights: true}}
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
				t.Errorf("%d allocations, then %v: number %d is still there", n, err, i)
			}
		}
		if err == nil {
			return
		}
	}
}

// lastAlloc has memory for a number of tensors.
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
	be := cpu.New(cpu.Options{})
	defer be.Close()
	ctx := t.Context()
	type config = kernels.MultiHeadConfig
	for _, c := range []struct {
		name   string
		config config
		want   error
		says   string
	}{
		{"no model", config{}, backend.ErrOption, "Model is 0"},
		{"negative heads", config{Model: 8, Heads: -2}, backend.ErrOption, "Heads is -2"},
		{"head size", config{Model: 8, Heads: 3}, backend.ErrOption, "Model is 8, which 3 heads do not divide: set HeadDim"},
		{"kv heads", config{Model: 8, Heads: 4, KVHeads: 3}, backend.ErrOption, "KVHeads is 3, Heads is 4"},
		{"type", config{Model: 8, DType: backend.Bool}, backend.ErrDType, "DType is bool"},
		{"rope", config{Model: 6, Heads: 2, RoPE: &kernels.RoPE{}}, backend.ErrOption, "3 of 3 elements of a head turn"},
		{"too large", config{Model: 1 << 30, HeadDim: 1 << 30, Heads: 1 << 30}, backend.ErrOption, "wq would have shape"},
	} {
		if _, err := c.config.Initialise(kernels.Initialiser{}); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, c.want, c.says)
		}
	}

	c := config{Model: 8, Heads: 2, Memory: 6, Bias: true}
	fresh := func(c config) kernels.MultiHeadWeights {
		w, err := c.Initialise(kernels.Initialiser{})
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
		be     backend.Backend
		config config
		w      kernels.MultiHeadWeights
		want   error
		says   string
	}{
		{"no weights", be, c, kernels.MultiHeadWeights{}, backend.ErrShape, "wq is missing (the zero Tensor), it must have shape [1 1 8 8]"},
		{"no biases", be, c, without, backend.ErrShape, "bq is missing"},
		{"biases too many", be, noBias, fresh(c), backend.ErrShape, "bq is there, but the config has no Bias"},
		{"rows", be, c, wide, backend.ErrShape, "wk has shape [1 1 8 8], it must be [1 1 6 8]"},
		{"type", be, c, half, backend.ErrDType, "wv is f16"},
		{"no memory", be, c, nowhere, backend.ErrDevice, "bo is not in host memory"},
		{"strides", be, c, turned, backend.ErrShape, "wq has strides"},
		{"no projections", plainBackend{be}, c, fresh(c), backend.ErrUnsupported, "no projections"},
	} {
		if _, err := kernels.NewMultiHeadAttention(ctx, w.be, w.config, w.w); !errors.Is(err, w.want) || !strings.Contains(err.Error(), w.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", w.name, err, w.want, w.says)
		}
	}

	l := layerOf(t, be, c)
	x, z := upload(t, be, normal(2*5*8, 1), backend.Shape{2, 1, 5, 8}), upload(t, be, normal(2*7*6, 2), backend.Shape{2, 1, 7, 6})
	short, err := kernels.RoPE{}.Angles(ctx, be, 4, kernels.Positions(0, 4))
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []struct {
		name string
		x    backend.Tensor
		opt  kernels.MultiHeadOptions
		want error
		says string
	}{
		{"no x", backend.Tensor{}, kernels.MultiHeadOptions{}, backend.ErrShape, "x is missing"},
		{"model size", z, kernels.MultiHeadOptions{Memory: z}, backend.ErrShape, "x has shape [2 1 7 6], it must be [B, 1, S, 8]"},
		{"memory size", x, kernels.MultiHeadOptions{}, backend.ErrShape, "memory has shape [2 1 5 8], it must be [2, 1, Sk, 6]"},
		{"memory type", x, kernels.MultiHeadOptions{Memory: meta(t, backend.F16, 2, 1, 7, 6)}, backend.ErrDType, "x is f32, memory is f16"},
		{"batches", x, kernels.MultiHeadOptions{Memory: meta(t, backend.F32, 1, 1, 7, 6)}, backend.ErrShape, "memory has shape [1 1 7 6]"},
		{"an option", x, kernels.MultiHeadOptions{Memory: z, Options: kernels.Options{Softcap: -1}}, backend.ErrOption, "softcap is -1"},
		{"angles for one", x, kernels.MultiHeadOptions{Memory: z, Angles: short}, backend.ErrOption, "give Angles and MemoryAngles"},
		{"angles too few", x, kernels.MultiHeadOptions{Memory: z, Angles: short, MemoryAngles: short}, backend.ErrShape, "q: rotate: cos: shape [1 1 4 2] does not broadcast to [2 2 5 2]"},
	} {
		if _, err := l.Apply(ctx, a.x, a.opt); !errors.Is(err, a.want) || !strings.Contains(err.Error(), a.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", a.name, err, a.want, a.says)
		}
	}
	done, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := l.Apply(done, x, kernels.MultiHeadOptions{Memory: z}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	l.Release()
	if _, err := l.Apply(ctx, x, kernels.MultiHeadOptions{Memory: z}); !errors.Is(err, backend.ErrReleased) {
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
