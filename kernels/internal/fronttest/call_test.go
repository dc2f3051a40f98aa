package fronttest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestPreparedCall: one call that is reset has the bits of a new call each time,
// whether one backend call computes it or several.
func TestPreparedCall(t *testing.T) {
	dev := onCPU(t)
	qs, ks := kernels.Shape{2, 4, 3, 16}, kernels.Shape{2, 2, 40, 16}
	for name, opt := range map[string]kernels.Options{
		"causal":   {Causal: true},
		"window":   {Causal: true, Window: &kernels.Window{Left: 5}},
		"prefix":   {Causal: true, Prefix: []int{7}},
		"spans":    {Causal: true, Window: &kernels.Window{Left: 2}, Spans: [][][2]int{{{3, 9}}}},
		"segments": {QSegments: [][]int32{{0, 1, 1}}, KSegments: [][]int32{append(make([]int32, 20), 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)}},
		"weights":  {Causal: true, Weights: true},
	} {
		opt.KLen, opt.Offset, opt.LSE = []int{3, 3}, []int{0, 0}, true
		var call *kernels.Call
		for step, lengths := range []struct{ klen, offsets []int }{
			{[]int{3, 3}, []int{0, 0}}, {[]int{10, 10}, []int{7, 7}}, {[]int{11, 25}, []int{8, 22}}, {[]int{40, 26}, []int{37, 23}},
		} {
			q, k, v := upload(t, dev, normal(qs.Elements(), uint64(step)), qs), upload(t, dev, normal(ks.Elements(), 10+uint64(step)), ks), upload(t, dev, normal(ks.Elements(), 20+uint64(step)), ks)
			opt.KLen, opt.Offset = lengths.klen, lengths.offsets
			if call == nil {
				call = prepare(t, dev, q, k, v, opt)
			} else if err := call.Reset(q, k, v, opt); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			got := must.Get(call.Run(t.Context()))(must.In(t, "%s", name))
			want := must.Get(dev.Attention(t.Context(), q, k, v, opt))(must.In(t, "%s", name))
			sameBits(t, name+": o", dev, got.O, want.O)
			sameBits(t, name+": lse", dev, got.LSE, want.LSE)
			if opt.Weights {
				sameBits(t, name+": weights", dev, got.Weights, want.Weights)
			}
			check(t, name, call, got, 24)
		}
		x := upload(t, dev, normal(qs.Elements(), 1), qs)
		opt.KLen = []int{41, 1}
		must.Fail(t, fmt.Sprintf("%s: more keys than there are", name), call.Reset(x, x, x, opt), kernels.ErrOption)
		if _, err := call.Run(t.Context()); err == nil {
			t.Errorf("%s: a call that could not be reset runs", name)
		}
	}
}

// afterAttention is a backend that calls a function after each Attention.
type afterAttention struct {
	backend.Backend
	then func(error) error
}

func (b afterAttention) Attention(ctx context.Context, calls ...*backend.Call) error {
	return b.then(b.Backend.Attention(ctx, calls...))
}

// TestWeightsFollowTheFusedCall: a call with weights runs the fused call first. It ends with
// its context between the two, and cannot be resumed.
func TestWeightsFollowTheFusedCall(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	s := kernels.Shape{1, 2, 8, 8}
	x := upload(t, kernels.NewDevice(be), normal(s.Elements(), 1), s)
	for _, weights := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		dev := kernels.NewDevice(afterAttention{be, func(err error) error { cancel(); return err }})
		r, err := dev.Attention(ctx, x, x, x, kernels.Options{Weights: weights})
		r.Release()
		if ended := errors.Is(err, context.Canceled); ended != weights {
			t.Errorf("cancelled after the fused call, weights %v: error is %v", weights, err)
		}
		dev = kernels.NewDevice(afterAttention{be, func(error) error {
			return &kernels.Interrupted{Partial: new(kernels.Partial), Err: kernels.ErrDeviceLost}
		}})
		_, err = dev.Attention(t.Context(), x, x, x, kernels.Options{Weights: weights})
		if _, resumable := errors.AsType[*kernels.Interrupted](err); resumable == weights || !errors.Is(err, kernels.ErrDeviceLost) {
			t.Errorf("interrupted, weights %v: error is %v", weights, err)
		}
	}
}

// TestWeightsOverlap: weights must not share memory with any operand or other output, also
// one that the stages do not read.
func TestWeightsOverlap(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		s := kernels.Shape{1, 2, 8, 8}
		fresh := func() kernels.Tensor { return upload(t, dev, normal(s.Elements(), 1), s) }
		for _, name := range []string{"q", "k", "v", "bias", "o", "nothing"} {
			at := map[string]kernels.Tensor{"q": fresh(), "k": fresh(), "v": fresh(), "bias": fresh(), "o": fresh(), "nothing": fresh()}
			call := prepare(t, dev, at["q"], at["k"], at["v"], kernels.Options{Bias: at["bias"]})
			err := call.RunInto(t.Context(), kernels.Result{O: at["o"], Weights: at[name]})
			if overlap := errors.Is(err, kernels.ErrOverlap); overlap != (name != "nothing") || err != nil && !overlap {
				t.Errorf("weights in the memory of %s: error is %v", name, err)
			}
		}
	})
}

// signing is a backend that keeps the signature of the last call and computes nothing.
type signing struct {
	backend.Backend
	last string
}

func (b *signing) Attention(_ context.Context, calls ...*backend.Call) error {
	b.last = calls[0].Signature()
	return nil
}

// TestResumeOfAnotherCall: a call continues from a Partial of its own; one of a call with other
// options, shapes or types is refused before anything runs.
func TestResumeOfAnotherCall(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		ctx := t.Context()
		s := kernels.Shape{1, 2, 8, 8}
		x := upload(t, dev, normal(s.Elements(), 1), s)
		short := must.Get(x.Slice(kernels.Seq, 0, 7))(t)
		half := must.Get(dev.FromFloat32(ctx, kernels.F16, normal(s.Elements(), 1), s))(t)
		defer half.Release()
		be := &signing{Backend: dev.Backend()}
		r := must.Get(kernels.NewDevice(be).Attention(ctx, x, x, x, kernels.Options{}))(t)
		r.Release()
		o := must.Get(kernels.AllocHost(kernels.F32, s))(t)
		own := &kernels.Partial{Call: be.last, O: o}
		blocks := must.Get(kernels.HostBool([]bool{true}, kernels.Shape{1, 1, 1, 1}))(t)
		blocks = must.Get(dev.Upload(ctx, blocks))(t)
		defer blocks.Release()
		want := must.Get(dev.Attention(ctx, x, x, x, kernels.Options{}))(t)
		defer want.Release()
		call := prepare(t, dev, x, x, x, kernels.Options{})
		got := must.Get(call.Alloc(ctx))(t)
		defer got.Release()
		must.Do(must.In(t, "its own Partial"), call.Resume(ctx, got, own))
		sameBits(t, "o", dev, got.O, want.O)
		resume := func(name string, call *kernels.Call, from *kernels.Partial, want error, text string) {
			t.Helper()
			out := must.Get(call.Alloc(ctx))(t)
			defer out.Release()
			if err := call.Resume(ctx, out, from); !errors.Is(err, want) || !strings.Contains(fmt.Sprint(err), text) {
				t.Errorf("%s: error is %v", name, err)
			}
		}
		for name, other := range map[string]struct {
			q, k kernels.Tensor
			opt  kernels.Options
		}{
			"scale": {x, x, kernels.Options{Scale: new(2.0)}}, "softcap": {x, x, kernels.Options{Softcap: 3}}, "causal": {x, x, kernels.Options{Causal: true}},
			"slopes": {x, x, kernels.Options{ALiBi: []float32{1, 2}}}, "sinks": {x, x, kernels.Options{Sinks: []float32{1, 2}}},
			"dropout": {x, x, kernels.Options{Dropout: kernels.Dropout{P: 0.5}}}, "blocks": {x, x, kernels.Options{BlockMask: blocks, BlockSize: 8}},
			"a bias": {x, x, kernels.Options{Bias: upload(t, dev, normal(8, 1), kernels.Shape{1, 1, 1, 8})}}, "a mask": {x, x, kernels.Options{Mask: blocks}},
			"a bias by distance": {x, x, kernels.Options{RelativeBias: upload(t, dev, normal(15, 1), kernels.Shape{1, 1, 1, 15})}},
			"lse":                {x, x, kernels.Options{LSE: true}}, "fewer keys": {x, short, kernels.Options{}}, "fewer rows": {short, x, kernels.Options{}}, "f16": {half, half, kernels.Options{}},
		} {
			resume(name, prepare(t, dev, other.q, other.k, other.k, other.opt), own, kernels.ErrOption, "is of another call")
		}
		resume("an empty Partial", call, new(kernels.Partial), kernels.ErrOption, "the partial result is empty")
		divided := prepare(t, dev, x, x, x, kernels.Options{Causal: true, Prefix: []int{3}})
		resume("a call of parts", divided, own, kernels.ErrUnsupported, "cannot be resumed")
		packed := must.Get(dev.FromFloat32(ctx, kernels.F32, normal(16, 1), kernels.Shape{1, 2, 1, 8}))(t)
		defer packed.Release()
		resume("packed sequences", prepare(t, dev, packed, packed, packed, kernels.Options{CuQ: []int{0, 1}}), own, kernels.ErrUnsupported, "cannot be resumed")
		resume("weights", prepare(t, dev, x, x, x, kernels.Options{Weights: true}), own, kernels.ErrUnsupported, "cannot be resumed")
	})
}

// TestListsOnDevice: lists go from Index to a prepared call on the device, in which many heads read the keys of one. On
// the CPU the second run has other lists in the same memory.
func TestListsOnDevice(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		const rows, keys, heads = 3, 60, 40
		ctx, rng := t.Context(), rand.New(rand.NewPCG(5, 6))
		tensor := func(s ...int) kernels.Tensor {
			x := make([]float32, kernels.Shape(s).Elements())
			for i := range x {
				x[i] = float32(rng.NormFloat64())
			}
			return must.Get(dev.FromFloat32(ctx, kernels.F32, x, kernels.Shape(s)))(t)
		}
		opt := kernels.Options{Causal: true, Align: kernels.LowerRight, LSE: true}
		w := tensor(1, 1, rows, 2)
		index := must.Get(dev.Index(ctx, tensor(1, 2, rows, 8), tensor(1, 1, keys, 8), w, 9, kernels.Options{Causal: true, Align: kernels.LowerRight}))(t)
		chosen := must.Get(dev.ToInt32(ctx, index.Tensor))(t)
		for n, key := range chosen {
			if key < 0 || int(key) > keys-rows+n/9 {
				t.Fatalf("index %d of [%d, 9] is %d, which the row does not see", n, rows, key)
			}
		}
		opt.KeyIndices = index
		if dev.Info().Name == "cpu" { // its tensors are host memory
			host := must.Get(kernels.Host(chosen, kernels.I32, kernels.Shape{1, 1, rows, 9}))(t)
			opt.KeyIndices = &kernels.KeyIndices{Tensor: host}
		}
		call := must.Get(dev.Prepare(tensor(1, heads, rows, 24), tensor(1, 1, keys, 24), tensor(1, 1, keys, 16), opt))(t)
		for run := range 2 {
			plan := must.Get(call.Plan(ctx))(t)
			if pairs := int64(heads * rows * 9); plan.Pairs != pairs {
				t.Errorf("run %d: the plan has %d pairs, want %d", run, plan.Pairs, pairs)
			}
			must.Do(t, call.Warmup(ctx))
			r := must.Get(call.Run(ctx))(t)
			check(t, fmt.Sprintf("run %d", run), call, r, heads*rows)
			r.Release()
			for i := range chosen { // not the lists of a GPU
				chosen[i] = (chosen[i] + 7) % keys
			}
		}
	})
}

// warmer records the calls of Warmup.
type warmer struct {
	differentiator
	calls     []backend.Call
	weights   []bool
	gradients []backend.Gradients
	err       error
}

type differentiator interface {
	backend.Backend
	backend.Differentiator
}

func (w *warmer) WarmupBackward(_ context.Context, g *backend.Gradients) error {
	w.gradients = append(w.gradients, *g)
	return w.err
}

func (w *warmer) Warmup(_ context.Context, weights bool, calls ...*backend.Call) error {
	for _, c := range calls {
		w.calls, w.weights = append(w.calls, *c), append(w.weights, weights)
	}
	return w.err
}

func TestWarmup(t *testing.T) {
	dev := onCPU(t)
	meta := func(heads, seq, dim int) kernels.Tensor {
		return must.Get(kernels.Meta(kernels.F16, kernels.Shape{2, heads, seq, dim}))(t)
	}
	q, k, v := meta(4, 3, 8), meta(2, 9, 8), meta(2, 9, 5)
	must.Pass(t, "a backend that has nothing to compile", prepare(t, dev, q, k, v, kernels.Options{}).Warmup(t.Context()))
	done, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", prepare(t, dev, q, k, v, kernels.Options{}).Warmup(done), context.Canceled)
	w := &warmer{differentiator: dev.Backend().(differentiator)}
	warm := kernels.NewDevice(w)
	if _, err := warm.Prepare(q, v, k, kernels.Options{}); !errors.Is(err, kernels.ErrShape) || len(w.calls) > 0 {
		t.Errorf("shapes that do not fit: %v after %d calls", err, len(w.calls))
	}
	for _, opt := range []kernels.Options{{Causal: true, LSE: true}, {Weights: true}} {
		must.Do(t, prepare(t, warm, q, k, v, opt).Warmup(t.Context()))
		n := len(w.calls) - 1
		c := w.calls[n]
		if c.O.Shape() != (kernels.Shape{2, 4, 3, 5}) || c.O.DType() != kernels.F16 || c.LSE.IsZero() == opt.LSE || w.weights[n] != opt.Weights {
			t.Errorf("%+v: warmed o %v %v, lse %v, weights %v", opt, c.O.DType(), c.O.Shape(), c.LSE.Shape(), w.weights[n])
		}
	}
	if w.calls[0].Visible.Right != 0 {
		t.Errorf("the call that was warmed up is not causal: %+v", w.calls[0].Visible)
	}
	call := prepare(t, warm, q, k, v, kernels.Options{Sinks: make([]float32, 4), LSE: true})
	for _, want := range []kernels.Gradients{call.Gradients().Operands(), call.Gradients()} {
		must.Do(t, call.WarmupBackward(t.Context(), want))
		g := w.gradients[len(w.gradients)-1]
		if g.DQ.DType() != kernels.F16 || g.DV.Shape() != v.Shape() || g.DSinks.IsZero() != want.Sinks.IsZero() || g.LSE.IsZero() || g.DO.Shape() != g.O.Shape() || g.Add {
			t.Errorf("%+v: warmed %+v", want, g)
		}
	}
	plain := prepare(t, dev, q, k, v, kernels.Options{})
	must.Pass(t, "gradients on a backend that has nothing to compile", plain.WarmupBackward(t.Context(), plain.Gradients()))
	w.err = kernels.ErrUnsupported
	must.Fail(t, "the backend's error", prepare(t, warm, q, k, v, kernels.Options{}).Warmup(t.Context()), kernels.ErrUnsupported)
	must.Fail(t, "the backend's error for gradients", prepare(t, warm, q, k, v, kernels.Options{}).WarmupBackward(t.Context(), plain.Gradients().Operands()), kernels.ErrUnsupported)
}
