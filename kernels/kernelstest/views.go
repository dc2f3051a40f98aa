package kernelstest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// viewed runs an operation on tensors that are contiguous or drawn views of the same elements.
type viewed struct {
	testing.TB
	dev     *kernels.Device
	dtype   backend.DType // of operands that may have any
	numbers *rand.Rand    // of shapes and elements, the same in both runs
	places  *rand.Rand    // of views; nil means contiguous
	held    []flat
	outs    []flat
	got     [][]float32
	story   string
}

// some draws one of a few values, the same one in both runs.
func some[E any](v *viewed, of ...E) E { return of[v.numbers.IntN(len(of))] }

// length draws a length. Every other one is 1, whose stride places no element.
func (v *viewed) length() int { return some(v, 1, 1, 2, 3) }

// place puts o on the device: its axes in any order, half of the time sliced from longer ones. An axis that has length 1
// in once repeats by a stride of 0. Strides of axes of length 1 are arbitrary.
func (v *viewed) place(o operand, once backend.Shape) flat {
	if v.places == nil {
		return put(v, v.dev, o, Contiguous)
	}
	var st backend.Strides
	next, offset, size, gap := 1, v.places.IntN(6), 1, 1+2*v.places.IntN(2)
	for _, axis := range v.places.Perm(4) {
		switch n := o.shape[axis]; {
		case n == 1:
			st[axis] = []int{0, 1, 7, 1000}[v.places.IntN(4)]
		case once[axis] > 1:
			st[axis] = next
			size += (n - 1) * next
			next *= n + v.places.IntN(gap)
		}
	}
	v.story += fmt.Sprintf(" %v%v+%d", o.shape, st, offset)
	return putAt(v, v.dev, o, st, offset, offset+size)
}

// in returns an input of normal numbers. Some repeat along axes.
func (v *viewed) in(dtype backend.DType, shape ...int) backend.Tensor {
	full := backend.Shape(shape)
	once := full
	for axis := range once {
		if v.numbers.IntN(4) == 0 {
			once[axis] = 1
		}
	}
	few := drawn(v.numbers, once, dtype)
	o := filled(0, full, dtype)
	for i := range o.data {
		at := [4]int{i / full[3] / full[2] / full[1], i / full[3] / full[2] % full[1], i / full[3] % full[2], i % full[3]}
		o.data[i] = few.data[broadcastIndex(once, at[:]...)]
	}
	f := v.place(o, once)
	v.held = append(v.held, f)
	return f.view
}

// out returns an output, of normal numbers for operations that update it.
func (v *viewed) out(dtype backend.DType, shape ...int) backend.Tensor {
	o := drawn(v.numbers, backend.Shape(shape), dtype)
	f := v.place(o, o.shape)
	v.outs = append(v.outs, f)
	return f.view
}

// see reads results that the operation has allocated.
func (v *viewed) see(results ...backend.Tensor) {
	for _, t := range results {
		if !t.IsZero() {
			v.got = append(v.got, read(v, v.dev, t))
		}
	}
}

// viewOps are all operations on tensors.
var viewOps = []struct {
	name string
	run  func(v *viewed) error
}{
	{"transfer", func(v *viewed) error {
		host := func(f flat) backend.Tensor {
			all := must(backend.Host(f.before, backend.F32, f.all.Shape()))(v)
			return must(all.View(f.view.Shape(), f.view.Strides(), f.view.Offset()))(v)
		}
		b, h, s, d := v.length(), v.length(), v.length(), some(v, 1, 2, 5)
		x := v.in(backend.F32, b, h, s, d)
		on := must(v.dev.Upload(v.Context(), host(v.held[0])))(v)
		defer on.Release()
		v.out(backend.F32, b, h, s, d)
		back := host(v.outs[0])
		noError(v, v.dev.Download(v.Context(), back, on))
		again := must(v.dev.Upload(v.Context(), back))(v)
		defer again.Release()
		v.see(x, on, again)
		return nil
	}},
	{"copy", func(v *viewed) error {
		b, h, s, d := v.length(), v.length(), v.length(), some(v, 1, 2, 8)
		return v.dev.Copy(v.Context(), []backend.Tensor{v.out(v.dtype, b, h, s, d)}, []backend.Tensor{v.in(v.dtype, b, h, s, d)})
	}},
	{"project", func(v *viewed) error {
		b, h, s, m, n := v.length(), v.length(), v.length(), some(v, 1, 3, 8), some(v, 1, 4, 9)
		var bias backend.Tensor
		if some(v, true, false) {
			bias = v.in(v.dtype, 1, 1, 1, n)
		}
		return v.dev.Project(v.Context(), v.out(v.dtype, b, h, s, n), v.in(v.dtype, b, h, s, m), v.in(v.dtype, some(v, 1, b), some(v, 1, h), m, n), bias)
	}},
	{"rotate", func(v *viewed) error {
		b, h, s, d := v.length(), v.length(), v.length(), some(v, 2, 3, 8)
		angles := func() backend.Tensor { return v.in(backend.F32, some(v, 1, b), some(v, 1, h), some(v, 1, s), d/2) }
		return v.dev.Rotate(v.Context(), v.out(v.dtype, b, h, s, d), v.in(v.dtype, b, h, s, d), kernels.Angles{Cos: angles(), Sin: angles()})
	}},
	{"normalise", func(v *viewed) error {
		b, h, s, d := v.length(), v.length(), v.length(), some(v, 1, 3, 8)
		rows := func() backend.Tensor { return v.in(v.dtype, b, h, s, d) }
		var w, dw backend.Tensor
		if some(v, true, false) {
			w, dw = v.in(v.dtype, 1, some(v, 1, h), 1, d), v.out(backend.F32, b, h, s, d)
		}
		norm := kernels.Norm{PlusOne: some(v, true, false)}
		if err := v.dev.Normalise(v.Context(), v.out(v.dtype, b, h, s, d), rows(), w, norm); err != nil {
			return err
		}
		return v.dev.NormaliseBackward(v.Context(), v.out(v.dtype, b, h, s, d), dw, rows(), rows(), w, norm)
	}},
	{"gate", func(v *viewed) error {
		b, h, s, d := v.length(), v.length(), v.length(), some(v, 1, 3, 8)
		rows := func(n int) backend.Tensor { return v.in(v.dtype, b, h, s, n) }
		gate := rows(some(v, 1, d))
		if err := v.dev.Gate(v.Context(), v.out(v.dtype, b, h, s, d), rows(d), gate, kernels.Sigmoid); err != nil {
			return err
		}
		return v.dev.GateBackward(v.Context(), v.out(v.dtype, b, h, s, d), v.out(backend.F32, b, h, s, d), rows(d), rows(d), gate, kernels.Sigmoid)
	}},
	{"merge", func(v *viewed) error {
		b, h, s, d, f32 := v.length(), v.length(), v.length(), some(v, 1, 8), backend.F32
		return v.dev.Merge(v.Context(), kernels.Result{O: v.out(f32, b, h, s, d), LSE: v.out(f32, b, h, s, 1)},
			kernels.Result{O: v.in(f32, b, h, s, d), LSE: v.in(f32, b, h, s, 1)})
	}},
	{"stages", func(v *viewed) error {
		x, be := v.attention(v.dtype), v.dev.Backend()
		weights := v.out(backend.F32, x.Batch, x.Heads, x.SeqQ, x.SeqK)
		if err := be.QK(v.Context(), weights, x.q, x.k); err != nil {
			return err
		}
		if err := v.dev.Softmax(v.Context(), weights, v.out(backend.F32, x.Batch, x.Heads, x.SeqQ, 1), x.opt); err != nil {
			return err
		}
		return be.PV(v.Context(), v.out(x.q.DType(), x.Batch, x.Heads, x.SeqQ, x.ValueDim), weights, x.v)
	}},
	{"attention", func(v *viewed) error {
		x := v.attention(v.dtype)
		out := kernels.Result{O: v.out(x.q.DType(), x.Batch, x.Heads, x.SeqQ, x.ValueDim), LSE: v.out(backend.F32, x.Batch, x.Heads, x.SeqQ, 1)}
		if some(v, true, false) {
			out.Weights = v.out(backend.F32, x.Batch, x.Heads, x.SeqQ, x.SeqK)
		}
		return runInto(v.Context(), v.dev, out, x.q, x.k, x.v, x.opt)
	}},
	{"scores and top weights", func(v *viewed) error {
		x := v.attention(backend.F32)
		if implements[backend.Scorer](v.dev) {
			s := must(v.dev.Scores(v.Context(), x.q, x.k, backend.Biased, x.opt))(v)
			defer s.Release()
			v.see(s)
		}
		top, err := v.dev.TopWeights(v.Context(), x.q, x.k, 1, x.opt)
		v.got = append(v.got, top.Weights)
		return err
	}},
	{"gradients", func(v *viewed) error {
		if !implements[backend.Differentiator](v.dev) {
			return nil
		}
		x := v.attention(backend.F32)
		x.opt.LSE = true
		call, f32 := prepare(v, v.dev, x.q, x.k, x.v, x.opt), backend.F32
		r := kernels.Result{O: v.out(x.q.DType(), x.Batch, x.Heads, x.SeqQ, x.ValueDim), LSE: v.out(f32, x.Batch, x.Heads, x.SeqQ, 1)}
		noError(v, call.RunInto(v.Context(), r))
		like := func(t backend.Tensor) backend.Tensor {
			s := t.Shape()
			return v.out(f32, s[:]...)
		}
		g := kernels.Gradients{Q: like(x.q), K: like(x.k), V: like(x.v)}
		if !x.opt.Bias.IsZero() {
			g.Bias = like(x.opt.Bias)
		}
		d := kernels.Result{O: v.in(f32, x.Batch, x.Heads, x.SeqQ, x.ValueDim), LSE: v.in(f32, x.Batch, x.Heads, x.SeqQ, 1)}
		return call.Backward(v.Context(), g, d, r)
	}},
	{"caches", func(v *viewed) error {
		if !implements[backend.Copier](v.dev) {
			return nil
		}
		b, h, n, d, f32 := v.length(), v.length(), v.length(), 8, backend.F32
		var cache nn.KVCache
		if config := (kvcache.Config{Batch: b, KVHeads: h, Dim: d, Capacity: 8, RoPE: &nn.RoPE{}}); lacking(v.dev, "pages") || some(v, true, false) {
			c := must(kvcache.New(v.Context(), v.dev, config))(v)
			defer c.Release()
			cache = c
		} else {
			c := must(kvcache.NewPaged(v.Context(), v.dev, kvcache.PagedConfig{KVHeads: h, Dim: d, PageSize: some(v, 1, 4), Pages: 32, RoPE: config.RoPE}))(v)
			defer c.Release()
			var of []*kvcache.Sequence
			for range b {
				of = append(of, must(c.NewSequence())(v))
			}
			cache = c.Batch(of...)
		}
		for range 2 {
			noError(v, cache.Append(v.Context(), v.in(v.dtype, b, h, n, d), v.in(v.dtype, b, h, n, d), nil))
			out := kernels.Result{O: v.out(f32, b, 2*h, n, d), LSE: v.out(f32, b, 2*h, n, 1)}
			noError(v, cache.AttentionInto(v.Context(), out, v.in(f32, b, 2*h, n, d), kvcache.CallOptions{}))
		}
		return nil
	}},
	{"layers", func(v *viewed) error {
		if !implements[backend.Projector](v.dev) || !implements[backend.Rotator](v.dev) {
			return nil
		}
		b, s, f32 := v.length(), v.length(), backend.F32
		c := nn.MultiHeadConfig{Model: 16, Heads: some(v, 1, 2), HeadDim: 8, Bias: some(v, true, false)}
		var opt nn.MultiHeadOptions
		if some(v, true, false) {
			c.Memory = 5
			opt.Memory = v.in(f32, b, 1, v.length(), c.Memory)
		} else {
			c.RoPE = &nn.RoPE{}
		}
		l := must(nn.NewMultiHeadAttention(v.Context(), v.dev, c, must(c.Initialise(nn.Initialiser{Seed: 4}))(v)))(v)
		defer l.Release()
		p := must(l.Forward(v.Context(), v.in(f32, b, 1, s, 16), opt))(v)
		defer p.Release()
		v.see(p.O, p.LSE)
		if !implements[backend.Differentiator](v.dev) {
			return nil
		}
		g, err := l.Backward(v.Context(), p, v.in(f32, b, 1, s, 16))
		w := g.Weights
		v.see(g.X, g.Memory, w.Wq, w.Wk, w.Wv, w.Wo, w.Bq, w.Bk, w.Bv, w.Bo)
		g.Release()
		return err
	}},
}

// attended are the operands and options of an attention call.
type attended struct {
	kernels.Dims
	q, k, v backend.Tensor
	opt     kernels.Options
}

func (v *viewed) attention(dtype backend.DType) (x attended) {
	kv, d := v.length(), some(v, 1, 8) // a GPU compiles kernels for each head size
	x.Dims = dims(v.length(), kv*v.length(), kv, v.length(), some(v, 1, 2, 9), d, d)
	x.q, x.k, x.v = v.in(dtype, x.Batch, x.Heads, x.SeqQ, x.Dim), v.in(dtype, x.Batch, kv, x.SeqK, x.Dim), v.in(dtype, x.Batch, kv, x.SeqK, x.ValueDim)
	shape := []int{some(v, 1, x.Batch), some(v, 1, x.Heads), some(v, 1, x.SeqQ), some(v, 1, x.SeqK)}
	switch some(v, "", "bias", "causal") {
	case "bias":
		if !lacking(v.dev, "bias") {
			x.opt.Bias = v.in(v.dtype, shape...)
		}
	case "causal":
		x.opt.Causal = true
	}
	x.opt.Scale = new(0.5)
	return x
}

// testViews runs each operation on n drawn views and on contiguous copies of their elements: the
// results have the same bits, and gaps do not change.
func testViews(t *testing.T, dev *kernels.Device, n int) {
	for _, o := range viewOps {
		t.Run(o.name, func(t *testing.T) {
			for seed := range uint64(n) {
				dtype := [4]backend.DType{backend.F32, backend.F32, backend.F16, backend.BF16}[seed%4]
				var got [2][][]float32
				story := ""
				for i, places := range []*rand.Rand{nil, rand.New(rand.NewPCG(seed, 0x706c6163))} {
					v := &viewed{TB: t, dev: dev, dtype: dtype, numbers: rand.New(rand.NewPCG(seed, 0x76696577)), places: places}
					err := o.run(v)
					for _, f := range v.outs {
						v.got = append(v.got, f.get(t, dev, "output"))
					}
					for _, f := range slices.Concat(v.held, v.outs) {
						f.release()
					}
					if err != nil {
						t.Fatalf("seed %d:%s: %v", seed, v.story, err)
					}
					got[i], story = v.got, v.story
				}
				for i, want := range got[0] {
					if !slices.EqualFunc(want, got[1][i], sameNumber) {
						t.Fatalf("seed %d:%s: result %d is %v, of contiguous tensors %v", seed, story, i, got[1][i], want)
					}
				}
			}
		})
	}
}
