package kernelstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// Memory configures [RunOutOfMemory].
type Memory struct {
	// Fail makes the nth request for memory from now on fail, or that and all later ones,
	// until stop, which returns the number of requests.
	Fail func(nth int) (stop func() int)
	// Held, unless nil, returns how much memory of the device is allocated.
	Held func() int
	// Elsewhere means that the backend may succeed with other memory.
	Elsewhere bool
}

// RunOutOfMemory makes each request for memory of each kind of work fail in turn, through
// calls, caches and layers. Each must end with ErrMemory and hold no memory of the device,
// and the same work must then have the bits that it had before. It closes be.
func RunOutOfMemory(t *testing.T, be backend.Backend, m Memory) {
	dev, refused := kernels.NewDevice(be), 0
	all := []backend.DType{backend.F32, backend.F16, backend.Q8}
	for _, w := range []struct {
		name   string
		dtypes []backend.DType
		do     func(x *worker)
	}{
		{"fused", all, func(x *worker) { x.attention(150, 300, kernels.Options{Causal: true, LSE: true}) }},
		{"weights", all[:2], func(x *worker) { x.attention(40, 70, kernels.Options{Weights: true, Softcap: 3}) }},
		{"one row of many keys", all, func(x *worker) { x.attention(1, 3000, kernels.Options{}) }},
		{"gradients", all[:2], (*worker).gradients},
		{"packed", all, func(x *worker) { x.attention(60, 60, kernels.Options{CuQ: []int{0, 7, 7, 60}}) }},
		{"slices", all, (*worker).slices},
		{"scores", all[:2], (*worker).scores},
		{"index", all[:2], (*worker).index},
		{"cache", all[:2], (*worker).contiguous},
		{"paged cache", all[:2], (*worker).paged},
		{"states", all[:2], (*worker).states},
		{"layer", all[:2], (*worker).layer},
	} {
		for _, dtype := range w.dtypes {
			if testing.Short() && dtype != backend.F16 {
				continue
			}
			t.Run(fmt.Sprintf("%s/%v", w.name, dtype), func(t *testing.T) { refused += m.walk(t, dev, dtype, w.do) })
		}
	}
	if refused == 0 {
		t.Error("no request ended the work")
	}
	if err := dev.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// walk does the work with each of its requests failing, with -short every second, and returns how many ended it.
func (m Memory) walk(t *testing.T, dev *kernels.Device, dtype backend.DType, do func(x *worker)) (refused int) {
	work := func() ([]float32, error) {
		x := &worker{ctx: t.Context(), dev: dev, dtype: dtype, rng: rand.New(rand.NewPCG(7, 7))}
		err := x.run(do)
		return x.out, err
	}
	want, err := work()
	if err == nil {
		want, err = work() // compiled and tuned
	}
	if err != nil {
		t.Fatal(err)
	}
	held := func() int {
		if m.Held == nil {
			return 0
		}
		return m.Held()
	}
	before := held()
	check := func(n int, what string, out []float32) {
		if !slices.EqualFunc(out, want, sameNumber) {
			t.Errorf("request %d refused: %s: other bits", n, what)
		}
	}
	step := 1
	if testing.Short() {
		step = 3
	}
	for n := 1; ; n += step {
		runtime.GC()
		runtime.GC() // twice, to empty the pools
		stop := m.Fail(n)
		out, err := work()
		requests := stop()
		switch {
		case errors.Is(err, backend.ErrMemory):
			refused++
		case err != nil:
			t.Errorf("request %d refused: %v, want ErrMemory", n, err)
		case requests >= n && !m.Elsewhere:
			t.Errorf("request %d refused: no error", n)
		default:
			check(n, "the work succeeds", out)
		}
		if now := held(); now != before {
			t.Errorf("request %d refused: %d is held, %d before", n, now, before)
			before = now
		}
		if !testing.Short() || n%2 == 0 || requests < n {
			if out, err = work(); err != nil {
				t.Fatalf("after request %d was refused: %v", n, err)
			}
			check(n, "the work after it", out)
		}
		if requests < n || t.Failed() {
			t.Logf("%d requests, %d ended the work", n-1, refused)
			return refused
		}
	}
}

// worker does a kind of work and collects the numbers that it yields. It panics with failed at its first error.
type worker struct {
	ctx   context.Context
	dev   *kernels.Device
	dtype backend.DType // of keys, values and weights
	rng   *rand.Rand
	held  []func()
	out   []float32
}

type failed struct{ err error }

// run calls do and releases the resources that x holds.
func (x *worker) run(do func(x *worker)) (err error) {
	defer func() {
		for _, f := range slices.Backward(x.held) {
			f()
		}
		if r := recover(); r != nil {
			f, ok := r.(failed)
			if !ok {
				panic(r)
			}
			err = f.err
		}
	}()
	do(x)
	return nil
}

func end(err error) {
	if err != nil {
		panic(failed{err})
	}
}

func try[T any](v T, err error) T {
	end(err)
	return v
}

// hold returns t, which is released in the end.
func (x *worker) hold(t backend.Tensor) backend.Tensor {
	x.held = append(x.held, t.Release)
	return t
}

func (x *worker) tensor(dtype backend.DType, shape backend.Shape) backend.Tensor {
	return x.hold(try(x.dev.FromFloat32(x.ctx, dtype, drawn(x.rng, shape, backend.F32).data, shape)))
}

// queries has the dtype of outputs, which is a float's.
func (x *worker) queries(shape backend.Shape) backend.Tensor {
	if x.dtype == backend.Q8 {
		return x.tensor(backend.F32, shape)
	}
	return x.tensor(x.dtype, shape)
}

// yield downloads tensors.
func (x *worker) yield(ts ...backend.Tensor) {
	for _, t := range ts {
		if !t.IsZero() {
			x.out = append(x.out, try(x.dev.ToFloat32(x.ctx, t))...)
		}
	}
}

// result yields the result of a call, which is released in the end.
func (x *worker) result(r kernels.Result, err error) kernels.Result {
	end(err)
	x.held = append(x.held, r.Release)
	x.yield(r.O, r.LSE, r.Weights)
	return r
}

const memoryHeads, memoryDim = 2, 16

// operands returns q, k and v.
func (x *worker) operands(sq, sk int) (q, k, v backend.Tensor) {
	kv := backend.Shape{1, 1, sk, memoryDim}
	return x.queries(backend.Shape{1, memoryHeads, sq, memoryDim}), x.tensor(x.dtype, kv), x.tensor(x.dtype, kv)
}

func (x *worker) attention(sq, sk int, opt kernels.Options) {
	q, k, v := x.operands(sq, sk)
	call := try(x.dev.Prepare(q, k, v, opt))
	r := x.result(call.Run(x.ctx))
	try(call.Check(x.ctx, r, kernels.CheckOptions{Rows: 3}))
}

func (x *worker) gradients() {
	q, k, v := x.operands(60, 130)
	call := try(x.dev.Prepare(q, k, v, kernels.Options{Causal: true, LSE: true, Sinks: []float32{0, 1}, ALiBi: []float32{1, 0.5}}))
	r := try(call.Run(x.ctx))
	defer r.Release()
	g := try(call.AllocGradients(x.ctx, call.Gradients()))
	defer g.Release()
	end(call.Backward(x.ctx, g, kernels.Result{O: r.O}, r))
	x.yield(g.Q, g.K, g.V, g.ALiBi, g.Sinks)
}

func (x *worker) slices() {
	const n = 33
	data := drawn(x.rng, backend.Shape{1, 1, n, memoryDim}, backend.F32).data
	x.out = try(x.dev.AttentionFloat32(x.ctx, kernels.Dims{SeqQ: n, Dim: memoryDim}, kernels.BHSD, data, data, data, kernels.Options{}))
	x.yield(x.tensor(x.dtype, backend.Shape{1, 1, n, memoryDim})) // where the slices are no Q8
}

func (x *worker) scores() {
	q, k, _ := x.operands(20, 30)
	x.yield(x.hold(try(x.dev.Scores(x.ctx, q, k, backend.Scaled, kernels.Options{}))))
	top := try(x.dev.TopWeights(x.ctx, q, k, 3, kernels.Options{Causal: true}))
	x.out = append(x.out, top.Weights...)
}

func (x *worker) index() {
	if !implements[backend.Indexer](x.dev) {
		return
	}
	q, k, v := x.operands(20, 300)
	lists := try(x.dev.Index(x.ctx, q, k, x.tensor(x.dtype, backend.Shape{1, 1, 20, memoryHeads}), 9, kernels.Options{Causal: true, Align: kernels.LowerRight}))
	x.yield(x.hold(lists.Tensor))
	if !lacking(x.dev, "key indices") {
		x.result(x.dev.Attention(x.ctx, q, k, v, kernels.Options{LSE: true, KeyIndices: lists}))
	}
}

// generate appends tokens to a cache and attends from them.
func (x *worker) generate(cache interface {
	nn.KVCache
	Attention(ctx context.Context, q backend.Tensor, opt kvcache.CallOptions) (kernels.Result, error)
}, tokens ...int) {
	for _, n := range tokens {
		kv := backend.Shape{2, 1, n, memoryDim}
		k, v, q := x.tensor(x.dtype, kv), x.tensor(x.dtype, kv), x.queries(backend.Shape{2, memoryHeads, n, memoryDim})
		end(cache.Append(x.ctx, k, v, nil))
		x.result(cache.Attention(x.ctx, q, kvcache.CallOptions{}))
	}
}

func (x *worker) contiguous() {
	c := try(kvcache.New(x.ctx, x.dev, kvcache.Config{Batch: 2, KVHeads: 1, Dim: memoryDim, DType: x.dtype, Capacity: 20, RoPE: &nn.RoPE{}}))
	defer c.Release()
	x.generate(c, 5, 1)
}

func (x *worker) paged() {
	c := try(kvcache.NewPaged(x.ctx, x.dev, kvcache.PagedConfig{KVHeads: 1, Dim: memoryDim, DType: x.dtype, PageSize: 4, Pages: 8}))
	defer c.Release()
	x.generate(c.Batch(try(c.NewSequence()), try(c.NewSequence())), 6, 1)
}

func (x *worker) states() {
	if !implements[backend.LinearAttender](x.dev) || !implements[backend.Convolver](x.dev) {
		return
	}
	const n = 3
	c := try(kvcache.NewStates(x.ctx, x.dev, kvcache.StateConfig{Batch: 2, Dim: memoryDim, Channels: memoryDim, Width: 3, Window: n}))
	defer c.Release()
	in, out, w := x.tensor(x.dtype, backend.Shape{2, 1, n, memoryDim}), x.tensor(x.dtype, backend.Shape{2, 1, n, memoryDim}), x.tensor(x.dtype, backend.Shape{1, 1, 3, memoryDim})
	for b := range 2 {
		end(c.CausalConv(x.ctx, kernels.CausalConv{X: in, Y: out, W: w}))
		x.yield(out)
		end(c.LinearAttention(x.ctx, kernels.LinearAttention{Q: in, K: in, V: in, O: out}))
		x.yield(out)
		end(c.Rewind(b, c.Lens()[b]-1))
	}
	var file bytes.Buffer
	end(c.Save(x.ctx, 0, &file))
	end(c.Load(x.ctx, 1, bytes.NewReader(file.Bytes()), int64(file.Len())))
}

func (x *worker) layer() {
	cfg := nn.MultiHeadConfig{Model: 2 * memoryDim, Heads: memoryHeads, Bias: true, RoPE: &nn.RoPE{}, DType: x.dtype}
	w := try(cfg.Initialise(nn.Initialiser{Seed: 1}))
	var file bytes.Buffer
	end(w.WriteSafetensors(&file))
	w = try(cfg.LoadSafetensors(bytes.NewReader(file.Bytes()), int64(file.Len()), ""))
	l := try(nn.NewMultiHeadAttention(x.ctx, x.dev, cfg, w))
	defer l.Release()
	in := x.tensor(x.dtype, backend.Shape{1, 1, 9, cfg.Model})
	x.result(l.Apply(x.ctx, in, nn.MultiHeadOptions{Options: kernels.Options{Causal: true, LSE: true}}))
}
