package kernels_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// noCopies is a backend without the copies that caches need.
type noCopies struct{ backend.Backend }

func TestCacheConfigs(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	good := kernels.CacheConfig{Batch: 2, KVHeads: 2, Dim: 8, Capacity: 16}
	with := func(f func(c *kernels.CacheConfig)) kernels.CacheConfig {
		c := good
		f(&c)
		return c
	}
	for _, c := range []struct {
		name   string
		be     backend.Backend
		config kernels.CacheConfig
		want   error
		says   string
	}{
		{"no head size", be, with(func(c *kernels.CacheConfig) { c.Dim = 0 }), backend.ErrOption, "Dim is 0, it must be 1 to"},
		{"negative heads", be, with(func(c *kernels.CacheConfig) { c.KVHeads = -1 }), backend.ErrOption, "KVHeads is -1"},
		{"no room", be, with(func(c *kernels.CacheConfig) { c.Capacity = 0 }), backend.ErrOption, "Capacity 0"},
		{"negative batch", be, with(func(c *kernels.CacheConfig) { c.Batch = -1 }), backend.ErrOption, "Batch is -1"},
		{"bools", be, with(func(c *kernels.CacheConfig) { c.DType = backend.Bool }), backend.ErrDType, "DType is bool"},
		{"q8 of odd size", be, with(func(c *kernels.CacheConfig) { c.DType, c.ValueDim = backend.Q8, 6 }), backend.ErrOption, "head sizes are 8 and 6, of q8 they must be multiples of 4"},
		{"window", be, with(func(c *kernels.CacheConfig) { c.Window = 9 }), backend.ErrOption, "with a Window of 9 it must be at least 18"},
		{"rope", be, with(func(c *kernels.CacheConfig) { c.RoPE = &kernels.RoPE{Dim: 10} }), backend.ErrOption, "10 of 8 elements of a head turn"},
		{"a backend without copies", noCopies{be}, good, backend.ErrUnsupported, "cpu has no copies"},
		{"more than there is", be, with(func(c *kernels.CacheConfig) { c.Batch, c.Capacity = 1<<20, 1<<28 }), backend.ErrMemory, ""},
	} {
		if _, err := kernels.NewCache(t.Context(), c.be, c.config); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, c.want, c.says)
		}
	}
	for _, c := range []struct {
		name   string
		config kernels.PagedConfig
		says   string
	}{
		{"no pages", kernels.PagedConfig{Dim: 8}, "0 Pages of 64 tokens"},
		{"negative pages", kernels.PagedConfig{Dim: 8, Pages: 3, PageSize: -1}, "3 Pages of -1 tokens"},
		{"too many tokens", kernels.PagedConfig{Dim: 8, Pages: 1 << 20, PageSize: 1 << 20}, "together at most"},
	} {
		if _, err := kernels.NewPagedCache(t.Context(), be, c.config); !errors.Is(err, backend.ErrOption) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, backend.ErrOption, c.says)
		}
	}
}

// TestCacheOptions shows what a call to a cache refuses.
func TestCacheOptions(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	ctx := t.Context()
	tokens := func(batch, heads, n int) backend.Tensor {
		x, err := backend.AllocHost(backend.F32, backend.Shape{batch, heads, n, 8})
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	mask, err := backend.AllocHost(backend.Bool, backend.Shape{1, 1, 1, 5})
	if err != nil {
		t.Fatal(err)
	}
	plain := kernels.CacheConfig{Batch: 2, Dim: 8, Capacity: 16}
	window := plain
	window.Window = 3
	type options = kernels.CacheOptions
	for _, c := range []struct {
		name   string
		config kernels.CacheConfig
		q      backend.Tensor
		opt    options
		want   error
		says   string
	}{
		{"batches", plain, tokens(1, 1, 1), options{}, backend.ErrShape, "q has shape [1 1 1 8], the cache has 2 sequences"},
		{"klen", plain, tokens(2, 1, 1), options{Options: kernels.Options{KLen: []int{1, 1}}}, backend.ErrOption, "KLen is set, which the cache knows itself"},
		{"align", plain, tokens(2, 1, 1), options{Options: kernels.Options{Align: kernels.LowerRight}}, backend.ErrOption, "Align is set"},
		{"offsets", plain, tokens(2, 1, 1), options{Options: kernels.Options{Offsets: []int{1, 1}}}, backend.ErrOption, "Offsets is set"},
		{"counts", plain, tokens(2, 1, 1), options{Count: []int{2, 1}}, backend.ErrOption, "count[0] is 2, q has 1 rows"},
		{"rows", plain, tokens(2, 1, 6), options{}, backend.ErrShape, "q has 6 rows for sequence 0, which has 5 tokens: append their keys first"},
		{"heads", plain, tokens(2, 1, 1), options{Options: kernels.Options{Sinks: []float32{1, 2}}}, backend.ErrShape, "sinks has 2 logits"},
		{"mask and window", window, tokens(2, 1, 1), options{Options: kernels.Options{Mask: mask}}, backend.ErrOption, "Mask is set, but the cache has a window"},
		{"window and window", window, tokens(2, 1, 1), options{Options: kernels.Options{Window: &kernels.Window{}}}, backend.ErrOption, "Window is set, but the cache has a window"},
	} {
		x, err := kernels.NewCache(ctx, be, c.config)
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Append(ctx, tokens(2, 1, 5), tokens(2, 1, 5), nil); err != nil {
			t.Fatal(err)
		}
		if _, err := x.Attention(ctx, c.q, c.opt); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, c.want, c.says)
		}
		x.Release()
	}
	empty, err := kernels.NewCache(ctx, be, plain)
	if err != nil {
		t.Fatal(err)
	}
	defer empty.Release()
	if _, err := empty.Attention(ctx, tokens(2, 1, 1), options{}); !errors.Is(err, backend.ErrShape) || !strings.Contains(err.Error(), "the cache is empty") {
		t.Errorf("empty: %v", err)
	}
	if err := empty.Rewind(2, 0); !errors.Is(err, backend.ErrOption) {
		t.Errorf("rewind of a sequence that is not there: %v", err)
	}
	if err := empty.Rewind(1, 1); !errors.Is(err, backend.ErrOption) {
		t.Errorf("rewind forward: %v", err)
	}
}

// TestCacheConcurrent lets sequences of one paged cache come, go, grow and attend from
// several goroutines.
func TestCacheConcurrent(t *testing.T) {
	be := cpu.New(cpu.Options{Threads: 2})
	defer be.Close()
	const pages = 64
	cache, err := kernels.NewPagedCache(t.Context(), be, kernels.PagedConfig{KVHeads: 2, Dim: 8, PageSize: 4, Pages: pages})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Release()
	x, err := backend.AllocHost(backend.F32, backend.Shape{1, 2, 5, 8})
	if err != nil {
		t.Fatal(err)
	}
	live := func(ctx context.Context) error {
		s, err := cache.NewSequence()
		if err != nil {
			return err
		}
		defer s.Free()
		for range 8 {
			if err := cache.Batch(s).Append(ctx, x, x, nil); err != nil {
				return err
			}
			f, err := s.Fork()
			if err != nil {
				return err
			}
			if err := cache.Batch(f).Append(ctx, x, x, []int{1}); err != nil {
				return err
			}
			r, err := cache.Batch(f).Attention(ctx, x, kernels.CacheOptions{})
			if err != nil {
				return err
			}
			r.Release()
			f.Free()
		}
		return nil
	}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if err := live(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if n := cache.FreePages(); n != pages {
		t.Errorf("%d of %d pages are free in the end", n, pages)
	}
}
