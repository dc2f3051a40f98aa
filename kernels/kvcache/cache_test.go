package kvcache_test

import (
	"context"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// noCopies is a backend that cannot copy tensors, as caches need.
type noCopies struct{ backend.Backend }

// onCPU returns a device that the test closes.
func onCPU(t *testing.T, opt cpu.Options) *kernels.Device {
	t.Helper()
	dev := kernels.NewDevice(cpu.New(opt))
	t.Cleanup(func() { dev.Close() })
	return dev
}

func TestConfigs(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	good := kvcache.Config{Batch: 2, KVHeads: 2, Dim: 8, Capacity: 16}
	with := func(f func(c *kvcache.Config)) kvcache.Config {
		c := good
		f(&c)
		return c
	}
	for _, c := range []struct {
		name   string
		dev    *kernels.Device
		config kvcache.Config
		want   error
		text   string
	}{
		{"no head size", dev, with(func(c *kvcache.Config) { c.Dim = 0 }), kernels.ErrOption, "Dim is 0, it must be 1 to"},
		{"negative heads", dev, with(func(c *kvcache.Config) { c.KVHeads = -1 }), kernels.ErrOption, "KVHeads is -1"},
		{"no room", dev, with(func(c *kvcache.Config) { c.Capacity = 0 }), kernels.ErrOption, "Capacity is 0"},
		{"negative batch", dev, with(func(c *kvcache.Config) { c.Batch = -1 }), kernels.ErrOption, "Batch is -1"},
		{"bools", dev, with(func(c *kvcache.Config) { c.DType = kernels.Bool }), kernels.ErrDType, "DType is bool"},
		{"q8 of odd size", dev, with(func(c *kvcache.Config) { c.DType, c.ValueDim = kernels.Q8, 6 }), kernels.ErrOption, "head sizes are 8 and 6, they must be multiples of 4 for q8"},
		{"q4 of odd size", dev, with(func(c *kvcache.Config) { c.DType, c.ValueDim = kernels.Q4, 48 }), kernels.ErrOption, "head sizes are 8 and 48, they must be multiples of 32 for q4"},
		{"f8 of odd size", dev, with(func(c *kvcache.Config) { c.DType, c.Dim = kernels.F8, 6 }), kernels.ErrOption, "head sizes are 6 and 6, they must be multiples of 4 for f8"},
		{"window", dev, with(func(c *kvcache.Config) { c.Window = 9 }), kernels.ErrOption, "with a Window of 9 it must be at least 18"},
		{"rope", dev, with(func(c *kvcache.Config) { c.RoPE = &nn.RoPE{Dim: 10} }), kernels.ErrOption, "rope: dim is 10, it must be even and 2 to the head size 8"},
		{"latent beyond the key", dev, with(func(c *kvcache.Config) { c.Latent = 9 }), kernels.ErrOption, "Latent is 9, it must be 1 to Dim, which is 8"},
		{"negative latent", dev, with(func(c *kvcache.Config) { c.Latent = -1 }), kernels.ErrOption, "Latent is -1"},
		{"latent and values", dev, with(func(c *kvcache.Config) { c.Latent, c.ValueDim = 4, 5 }), kernels.ErrOption, "ValueDim is 5 and Latent is 4"},
		{"latent in q8", dev, with(func(c *kvcache.Config) { c.Latent, c.DType = 4, kernels.Q8 }), kernels.ErrUnsupported, "DType is q8, elements of such a key are not a value"},
		{"latent and rope", dev, with(func(c *kvcache.Config) { c.Latent, c.RoPE = 4, &nn.RoPE{} }), kernels.ErrOption, "RoPE and Latent are both set"},
		{"latent and hadamard", dev, with(func(c *kvcache.Config) { c.Latent, c.Hadamard = 4, true }), kernels.ErrOption, "Hadamard is set with Latent"},
		{"a backend without copies", kernels.NewDevice(noCopies{dev.Backend()}), good, kernels.ErrUnsupported, "cpu has no copies"},
		{"more than there is", dev, with(func(c *kvcache.Config) { c.Batch, c.Capacity = 1<<20, 1<<28 }), kernels.ErrMemory, ""},
	} {
		must.Fail(t, c.name, must.Err(kvcache.New(t.Context(), c.dev, c.config)), c.want, c.text)
	}
	for _, c := range []struct {
		name   string
		config kvcache.PagedConfig
		text   string
	}{
		{"no pages", kvcache.PagedConfig{Dim: 8}, "Pages is 0 and PageSize is 64"},
		{"negative pages", kvcache.PagedConfig{Dim: 8, Pages: 3, PageSize: -1}, "Pages is 3 and PageSize is -1"},
		{"too many tokens", kvcache.PagedConfig{Dim: 8, Pages: 1 << 20, PageSize: 1 << 20}, "their product at most"},
	} {
		must.Fail(t, c.name, must.Err(kvcache.NewPaged(t.Context(), dev, c.config)), kernels.ErrOption, c.text)
	}
}

// TestOptionsOfTheTable: caches refuse every option that the table of options refuses for them,
// with the table's error, and take Verify.
func TestOptionsOfTheTable(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	ctx := t.Context()
	tokens := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{2, 1, 4, 8}))(t)
	last := must.Get(tokens.Slice(kernels.Seq, 3, 4))(t)
	paged := func(window int) cache {
		p := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: 8, PageSize: 2, Pages: 8, Window: window}))(t)
		a := must.Get(p.NewSequence())(t)
		b := must.Get(p.NewSequence())(t)
		return p.Batch(a, b)
	}
	contiguous := func(window int) cache {
		return must.Get(kvcache.New(ctx, dev, kvcache.Config{Batch: 2, Dim: 8, Capacity: 16, Window: window}))(t)
	}
	for _, c := range []struct {
		name  string
		cache cache
		share bool
		path  op.Path
	}{
		{"cache", contiguous(0), false, op.CachePath},
		{"cache with a window", contiguous(3), false, op.CachePath | op.WindowPath},
		{"pages", paged(0), false, op.CachePath},
		{"pages with a window", paged(3), false, op.CachePath | op.WindowPath},
		{"shared pages", paged(0), true, op.CachePath | op.SharedPath},
	} {
		must.Do(t, c.cache.Append(ctx, tokens, tokens, nil))
		refused := 0
		for _, f := range reflect.VisibleFields(reflect.TypeFor[kernels.Options]()) {
			var opt kernels.Options
			switch field := reflect.ValueOf(&opt).Elem().FieldByIndex(f.Index); field.Interface().(type) {
			case kernels.Tensor:
				field.Set(reflect.ValueOf(tokens))
			case kernels.Dropout:
				opt.Dropout.P = 0.5
			default:
				switch field.Kind() {
				case reflect.Bool:
					field.SetBool(true)
				case reflect.Int:
					field.SetInt(1)
				case reflect.Float64:
					field.SetFloat(1)
				case reflect.Slice:
					field.Set(reflect.MakeSlice(field.Type(), 2, 2))
				case reflect.Pointer:
					field.Set(reflect.New(field.Type().Elem()))
				default:
					t.Fatalf("Options.%s is of kind %v", f.Name, field.Kind())
				}
			}
			want := op.CheckPath(opt.Set(), c.path)
			if want == nil {
				continue
			}
			refused++
			r, err := c.cache.Attention(ctx, last, kvcache.CallOptions{Options: opt, SharePrefix: c.share})
			if err == nil || !strings.Contains(err.Error(), f.Name+" is set, but") || !strings.HasSuffix(err.Error(), want.Error()) {
				t.Errorf("%s with %s: error is %v, should be %v", c.name, f.Name, err, want)
			}
			r.Release()
		}
		if refused < 5 {
			t.Errorf("%s: refuses %d options", c.name, refused)
		}
		if c.share {
			continue
		}
		dev.SetVerify(2)
		r, err := c.cache.Attention(ctx, last, kvcache.CallOptions{})
		dev.SetVerify(0)
		if err != nil {
			t.Errorf("%s, verified: %v", c.name, err)
		}
		r.Release()
	}
}

// TestCallOptions lists options that a call to a cache refuses.
func TestCallOptions(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	ctx := t.Context()
	tokens := func(batch, heads, n int) kernels.Tensor {
		return must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{batch, heads, n, 8}))(t)
	}
	mask := must.Get(kernels.AllocHost(kernels.Bool, kernels.Shape{1, 1, 1, 5}))(t)
	plain := kvcache.Config{Batch: 2, Dim: 8, Capacity: 16}
	rotary := plain
	rotary.RoPE = &nn.RoPE{}
	window := plain
	window.Window = 3
	type options = kvcache.CallOptions
	only := func(o kernels.Options) options { return options{Options: o} }
	for _, c := range []struct {
		name   string
		config kvcache.Config
		q      kernels.Tensor
		opt    options
		want   error
		text   string
	}{
		{"batches", plain, tokens(1, 1, 1), options{}, kernels.ErrShape, "q has shape [1 1 1 8], it must have one batch for each of 2 sequences"},
		{"klen", plain, tokens(2, 1, 1), only(kernels.Options{KLen: []int{1, 1}}), kernels.ErrOption, "KLen is set, but the cache sets it itself"},
		{"align", plain, tokens(2, 1, 1), only(kernels.Options{Align: kernels.LowerRight}), kernels.ErrOption, "Align is set"},
		{"offsets", plain, tokens(2, 1, 1), only(kernels.Options{Offset: []int{1, 1, 1}}), kernels.ErrShape, "offset has 3 elements"},
		{"lists of positions", plain, tokens(2, 1, 1), options{Positions: make([][]int, 3)}, kernels.ErrShape, "positions has 3 lists, it must have 1 or one for each of 2 sequences"},
		{"positions", plain, tokens(2, 1, 1), options{Positions: [][]int{{1}, {1, 2}}}, kernels.ErrShape, "positions[1] has 2 numbers, it must have one for each of the 1 rows of q"},
		{"position", rotary, tokens(2, 1, 1), options{Positions: [][]int{{1 << 40}}}, kernels.ErrOption, "rope: position 0 of batch 0 is 1099511627776"},
		{"counts", plain, tokens(2, 1, 1), options{Count: []int{2, 1}}, kernels.ErrOption, "count[0] is 2, q has 1 rows"},
		{"rows", plain, tokens(2, 1, 6), options{}, kernels.ErrShape, "q has 6 rows for sequence 0, which has 5 tokens: append their keys first"},
		{"a span that began before", plain, tokens(2, 1, 2), only(kernels.Options{Spans: [][][2]int{{{2, 5}}}}), kernels.ErrOption, "spans: the tokens 2 to 4 of sequence 0 are a span, and q has rows for 3 to 4: append all tokens"},
		{"a span that goes on", plain, tokens(2, 1, 2), only(kernels.Options{Spans: [][][2]int{{{1, 2}}, {{4, 6}}}}), kernels.ErrOption, "the tokens 4 to 5 of sequence 1 are a span"},
		{"lists of spans", plain, tokens(2, 1, 2), only(kernels.Options{Spans: make([][][2]int, 3)}), kernels.ErrShape, "spans has 3 elements"},
		{"heads", plain, tokens(2, 1, 1), only(kernels.Options{Sinks: []float32{1, 2}}), kernels.ErrShape, "sinks has 2 elements"},
		{"mask and window", window, tokens(2, 1, 1), only(kernels.Options{Mask: mask}), kernels.ErrOption, "Mask is set, but the cache has a window"},
		{"packed", plain, tokens(2, 1, 1), only(kernels.Options{CuQ: []int{0, 1}}), kernels.ErrOption, "CuQ is set, but the cache sets it itself"},
		{"window and window", window, tokens(2, 1, 1), only(kernels.Options{Window: &kernels.Window{}}), kernels.ErrOption, "Window is set, but the cache has a window"},
	} {
		x := must.Get(kvcache.New(ctx, dev, c.config))(t)
		must.Do(t, x.Append(ctx, tokens(2, 1, 5), tokens(2, 1, 5), nil))
		must.Fail(t, c.name, must.Err(x.Attention(ctx, c.q, c.opt)), c.want, c.text)
		x.Release()
	}
	empty := must.Get(kvcache.New(ctx, dev, plain))(t)
	defer empty.Release()
	for want, opt := range map[string]options{"which has 0 tokens: append their keys first": {}, "the cache is empty": {Bidirectional: true}} {
		must.Fail(t, "empty", must.Err(empty.Attention(ctx, tokens(2, 1, 1), opt)), kernels.ErrShape, want)
	}
	must.Fail(t, "positions of an append", empty.AppendAt(ctx, tokens(2, 1, 3), tokens(2, 1, 3), nil, [][]int{{1}}), kernels.ErrShape, "append: positions[0] has 1 numbers, it must have one for each of the 3 rows of k")
	must.Fail(t, "rewind of a sequence that does not exist", empty.Rewind(2, 0), kernels.ErrOption)
	must.Fail(t, "rewind forward", empty.Rewind(1, 1), kernels.ErrOption)
}

// TestConcurrent creates, forks, grows, frees and attends to sequences of one paged cache from several goroutines.
func TestConcurrent(t *testing.T) {
	dev := onCPU(t, cpu.Options{Threads: 2})
	const pages = 64
	cache := must.Get(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: 2, Dim: 8, PageSize: 4, Pages: pages}))(t)
	defer cache.Release()
	x := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{1, 2, 5, 8}))(t)
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
			r, err := cache.Batch(f).Attention(ctx, x, kvcache.CallOptions{})
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

// TestSharePrefixOutputs: calls with a shared prefix check their outputs like others.
func TestSharePrefixOutputs(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	ctx := t.Context()
	host := func(dtype kernels.DType, s ...int) kernels.Tensor {
		return must.Get(kernels.AllocHost(dtype, kernels.Shape(s)))(t)
	}
	c := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: 8, PageSize: 4, Pages: 8}))(t)
	defer c.Release()
	one := must.Get(c.NewSequence())(t)
	f32, f16 := kernels.F32, kernels.F16
	x := host(f32, 1, 1, 9, 8)
	must.Do(t, c.Batch(one).Append(ctx, x, x, nil))
	two := must.Get(one.Fork())(t)
	good, q := host(f16, 2, 2, 1, 8), host(f16, 2, 2, 1, 8)
	for _, o := range []struct {
		name string
		out  kernels.Result
		want error
	}{
		{"as q", kernels.Result{O: good, LSE: host(f32, 2, 2, 1, 1)}, nil},
		{"f32", kernels.Result{O: host(f32, 2, 2, 1, 8)}, nil},
		{"no o", kernels.Result{}, kernels.ErrShape},
		{"shape of o", kernels.Result{O: host(f16, 2, 2, 1, 4)}, kernels.ErrShape},
		{"shape of o, f32", kernels.Result{O: host(f32, 2, 1, 1, 8)}, kernels.ErrShape},
		{"type of o", kernels.Result{O: host(kernels.BF16, 2, 2, 1, 8)}, kernels.ErrDType},
		{"shape of lse", kernels.Result{O: good, LSE: host(f32, 2, 1, 1, 1)}, kernels.ErrShape},
		{"type of lse", kernels.Result{O: good, LSE: host(f16, 2, 2, 1, 1)}, kernels.ErrDType},
		{"weights", kernels.Result{O: good, Weights: host(f32, 2, 2, 1, 9)}, kernels.ErrOption},
	} {
		must.Fail(t, o.name, c.Batch(one, two).AttentionInto(ctx, o.out, q, kvcache.CallOptions{SharePrefix: true}), o.want)
	}
}
