package kvcache_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestFactors shows that factors of a tensor, of heads and of elements change no result of a cache in f32, and that a
// cache in f8 stores quotients: it has the results of one without factors whose keys and values are divided, and whose
// queries and outputs are multiplied. The factors are powers of two, so that bits are compared.
func TestFactors(t *testing.T) {
	const hkv, h, n, d, dv = 2, 4, 11, 8, 4
	dev := onCPU(t, cpu.Options{})
	rng := rand.New(rand.NewPCG(8, 3))
	draw := func(shape kernels.Shape) []float32 {
		x := make([]float32, shape.Elements())
		for i := range x {
			x[i] = float32(1000 * rng.NormFloat64())
		}
		return x
	}
	up := func(x []float32, shape kernels.Shape) kernels.Tensor {
		return must.Get(dev.FromFloat32(t.Context(), kernels.F32, x, shape))(t)
	}
	ks, vs, qs, os := kernels.Shape{1, hkv, n, d}, kernels.Shape{1, hkv, n, dv}, kernels.Shape{1, h, 2, d}, kernels.Shape{1, h, 2, dv}
	k, v, q := draw(ks), draw(vs), draw(qs)
	for _, c := range []struct {
		name         string
		k, v         kernels.Shape
		rope, spread bool
	}{
		{"tensor", kernels.Shape{1, 1, 1, 1}, kernels.Shape{1, 1, 1, 1}, true, false},
		{"heads", kernels.Shape{1, hkv, 1, 1}, kernels.Shape{1, hkv, 1, 1}, true, true},
		{"elements", kernels.Shape{1, 1, 1, d}, kernels.Shape{1, 1, 1, dv}, false, false},
		{"elements of heads", kernels.Shape{1, hkv, 1, d}, kernels.Shape{1, hkv, 1, dv}, false, true},
		{"keys", kernels.Shape{1, hkv, 1, d}, kernels.Shape{}, false, false},
		{"values", kernels.Shape{}, kernels.Shape{1, 1, 1, dv}, true, false},
	} {
		// factors returns powers of two, and those of element i of a row of a head.
		factors := func(s kernels.Shape) (kernels.Tensor, func(head, i int) float32) {
			if s.Elements() == 0 {
				return kernels.Tensor{}, func(int, int) float32 { return 1 }
			}
			x := make([]float32, s.Elements())
			for i := range x {
				x[i] = float32(math.Ldexp(1, 6+3*i%7))
			}
			return up(x, s), func(head, i int) float32 { return x[head%s[1]*s[3]+i%s[3]] }
		}
		kf, ofK := factors(c.k)
		vf, ofV := factors(c.v)
		// times multiplies rows by factors or their inverses, those of query heads by those of their group.
		times := func(x []float32, s kernels.Shape, of func(head, i int) float32, inverse bool) []float32 {
			y := slices.Clone(x)
			for i := range y {
				f := of(i/s[3]/s[2]%s[1]*hkv/s[1], i%s[3])
				if inverse {
					f = 1 / f
				}
				y[i] *= f
			}
			return y
		}
		run := func(dtype kernels.DType, paged, plain bool, kf, vf kernels.Tensor, k, v, q []float32) []float32 {
			t.Helper()
			var rope kvcache.Rotary
			if c.rope && !plain {
				rope = &nn.RoPE{}
			}
			spread := c.spread && !plain
			attend := func(batch cache) []float32 {
				must.Do(t, batch.Append(t.Context(), up(k, ks), up(v, vs), nil))
				r := must.Get(batch.Attention(t.Context(), up(q, qs), kvcache.CallOptions{Options: kernels.Options{Scale: new(0x1p-20)}}))(t)
				return must.Get(dev.ToFloat32(t.Context(), r.O))(t)
			}
			if !paged {
				x := must.Get(kvcache.New(t.Context(), dev, kvcache.Config{KVHeads: hkv, Dim: d, ValueDim: dv, DType: dtype, Capacity: 16, KScale: kf, VScale: vf, RoPE: rope, Hadamard: spread}))(t)
				defer x.Release()
				return attend(x)
			}
			x := must.Get(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: hkv, Dim: d, ValueDim: dv, DType: dtype, PageSize: 4, Pages: 4, KScale: kf, VScale: vf, RoPE: rope, Hadamard: spread}))(t)
			defer x.Release()
			return attend(x.Batch(must.Get(x.NewSequence())(t)))
		}
		for _, paged := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, pages %v", c.name, paged), func(t *testing.T) {
				none := kernels.Tensor{}
				if got, want := run(kernels.F32, paged, false, kf, vf, k, v, q), run(kernels.F32, paged, false, none, none, k, v, q); !slices.Equal(got, want) {
					t.Errorf("f32: %v, without factors %v", got, want)
				}
				got := run(kernels.F8, paged, true, kf, vf, k, v, q)
				want := times(run(kernels.F8, paged, true, none, none, times(k, ks, ofK, true), times(v, vs, ofV, true), times(q, qs, ofK, false)), os, ofV, false)
				if !slices.Equal(got, want) {
					t.Errorf("f8: %v, of quotients %v", got, want)
				}
			})
		}
	}
}

func TestFactorsRefuse(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	f := func(shape kernels.Shape, x ...float32) kernels.Tensor {
		return must.Get(dev.FromFloat32(t.Context(), kernels.F32, x, shape))(t)
	}
	one := kernels.Shape{1, 1, 1, 1}
	for _, c := range []struct {
		config kvcache.Config
		want   error
		text   string
	}{
		{kvcache.Config{KScale: f(kernels.Shape{1, 3, 1, 1}, 1, 2, 3)}, kernels.ErrShape, "KScale has shape [1 3 1 1]"},
		{kvcache.Config{VScale: f(kernels.Shape{1, 1, 1, 2}, 1, 2)}, kernels.ErrShape, "VScale has shape [1 1 1 2]"},
		{kvcache.Config{KScale: must.Get(dev.Alloc(t.Context(), kernels.Bool, one))(t)}, kernels.ErrDType, "KScale is bool"},
		{kvcache.Config{VScale: f(one, 0)}, kernels.ErrOption, "VScale has a factor of 0"},
		{kvcache.Config{KScale: f(one, -1)}, kernels.ErrOption, "KScale has a factor of -1"},
		{kvcache.Config{KScale: f(one, float32(math.NaN()))}, kernels.ErrOption, "KScale has a factor of NaN"},
		{kvcache.Config{KScale: f(one, 1), Latent: 4}, kernels.ErrOption, "KScale, VScale or Hadamard is set with Latent"},
	} {
		c.config.KVHeads, c.config.Dim, c.config.Capacity = 2, 8, 4
		must.Fail(t, c.text, must.Err(kvcache.New(t.Context(), dev, c.config)), c.want, c.text)
	}
	x := must.Get(kvcache.New(t.Context(), dev, kvcache.Config{KVHeads: 2, Dim: 8, Capacity: 4, KScale: f(one, 2)}))(t)
	defer x.Release()
	kv := must.Get(dev.Alloc(t.Context(), kernels.F32, kernels.Shape{1, 2, 1, 8}))(t)
	must.Do(t, x.Append(t.Context(), kv, kv, nil))
	q := must.Get(dev.Alloc(t.Context(), kernels.F32, kernels.Shape{1, 3, 1, 8}))(t)
	must.Fail(t, "heads", must.Err(x.Attention(t.Context(), q, kvcache.CallOptions{})), kernels.ErrShape, "q has 3 heads, they must be a multiple of the cache's 2")
}

// TestHadamardRefuses checks the error of head sizes without a matrix.
func TestHadamardRefuses(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	for size, c := range map[string]kvcache.Config{
		"48":   {Dim: 48, ValueDim: 64},
		"80":   {Dim: 64, ValueDim: 80},
		"8192": {Dim: 8192},
	} {
		c.Capacity, c.Hadamard = 4, true
		must.Fail(t, size, must.Err(kvcache.New(t.Context(), dev, c)), kernels.ErrOption, "head size "+size+" has no Hadamard matrix, it must be a power of two up to 4096")
	}
}
