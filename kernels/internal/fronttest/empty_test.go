package fronttest

import (
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestEmptySizes: calls without batches, heads, rows or keys return empty results, zeros and an
// LSE of -Inf or the sink, on every backend and in stages.
func TestEmptySizes(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		ctx := t.Context()
		inf := float32(math.Inf(-1))
		for _, c := range []struct {
			name string
			d    kernels.Dims
		}{
			{"no batches", kernels.Dims{Batch: 0, Heads: 4, KVHeads: 2, SeqQ: 3, SeqK: 5, Dim: 8, ValueDim: 6}},
			{"no heads", kernels.Dims{Batch: 2, Heads: 0, KVHeads: 0, SeqQ: 3, SeqK: 5, Dim: 8, ValueDim: 6}},
			{"no rows", kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 0, SeqK: 5, Dim: 8, ValueDim: 6}},
			{"no keys", kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 3, SeqK: 0, Dim: 8, ValueDim: 6}},
			{"no rows and keys", kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 0, SeqK: 0, Dim: 8, ValueDim: 6}},
		} {
			d := c.d
			rows := kernels.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim}
			// is fails unless x has shape and its elements are those of head h.
			is := func(what string, x kernels.Tensor, shape kernels.Shape, want func(h int) float32) {
				t.Helper()
				if x.Shape() != shape {
					t.Errorf("%s: %s has shape %v, should have %v", c.name, what, x.Shape(), shape)
					return
				}
				all, err := dev.ToFloat32(ctx, x)
				if err != nil || len(all) != shape.Elements() {
					t.Errorf("%s: %s has %d elements, %v", c.name, what, len(all), err)
				}
				for i, got := range all {
					if w := want(i / shape[3] / shape[2] % shape[1]); got != w {
						t.Errorf("%s: %s is %v, should be %v", c.name, what, got, w)
						return
					}
				}
			}
			zero := func(int) float32 { return 0 }
			hidden := func(int) float32 { return inf }
			for _, dtype := range []kernels.DType{kernels.F32, kernels.F16} {
				tensor := func(heads, seq, dim int) kernels.Tensor {
					s := kernels.Shape{d.Batch, heads, seq, dim}
					x := must.Get(dev.FromFloat32(ctx, dtype, normal(s.Elements(), 1), s))(must.In(t, "%s", c.name))
					t.Cleanup(x.Release)
					return x
				}
				q, k, v := tensor(d.Heads, d.SeqQ, d.Dim), tensor(d.KVHeads, d.SeqK, d.Dim), tensor(d.KVHeads, d.SeqK, d.ValueDim)
				sinks := make([]float32, d.Heads)
				for h := range sinks {
					sinks[h] = float32(h)
				}
				sink := func(h int) float32 { return float32(h) }
				sums, scores := rows, rows
				sums[3], scores[3] = 1, d.SeqK
				for name, o := range map[string]struct {
					opt kernels.Options
					lse func(h int) float32
				}{
					"plain":    {kernels.Options{LSE: true}, hidden},
					"causal":   {kernels.Options{Causal: true, Window: &kernels.Window{Left: 3}, LSE: true, KLen: make([]int, d.Batch)}, hidden},
					"weights":  {kernels.Options{LSE: true, Weights: true}, hidden},
					"sinks":    {kernels.Options{LSE: true, Sinks: sinks}, sink},
					"segments": {kernels.Options{LSE: true, QSegments: [][]int32{make([]int32, d.SeqQ)}, KSegments: [][]int32{make([]int32, d.SeqK)}}, hidden},
				} {
					call, err := dev.Prepare(q, k, v, o.opt)
					if err != nil {
						t.Errorf("%s, %s: %v", c.name, name, err)
						continue
					}
					must.Pass(t, fmt.Sprintf("%s, %s", c.name, name), call.Warmup(ctx))
					if p, err := call.Plan(ctx); err != nil || p.Pairs != 0 || p.Path != "none" {
						t.Errorf("%s, %s: plan %+v, %v", c.name, name, p, err)
					}
					r, err := call.Run(ctx)
					if err != nil {
						t.Errorf("%s, %s: %v", c.name, name, err)
						continue
					}
					is(name+" o", r.O, rows, zero)
					is(name+" lse", r.LSE, sums, o.lse)
					if o.opt.Weights {
						is(name+" weights", r.Weights, scores, zero)
					}
					check(t, c.name+", "+name, call, r, 0)
					r.Release()
				}
				// The stages.
				s, err := dev.QK(ctx, q, k)
				if err != nil {
					t.Errorf("%s: %v", c.name, err)
					continue
				}
				is("s", s, scores, zero)
				lse := must.Get(dev.Alloc(ctx, kernels.F32, sums))(t)
				must.Pass(t, c.name, dev.Softmax(ctx, s, lse, kernels.Options{Scale: new(1.0), Sinks: sinks}))
				if d.SeqK == 0 {
					is("lse of softmax", lse, sums, sink)
				}
				o, err := dev.PV(ctx, s, v)
				if err != nil {
					t.Errorf("%s: %v", c.name, err)
					continue
				}
				is("o of pv", o, rows, zero)
				biased, err := dev.Scores(ctx, q, k, kernels.Biased, kernels.Options{})
				if err != nil {
					t.Errorf("%s: %v", c.name, err)
				}
				is("scores", biased, scores, zero)
				if top, err := dev.TopWeights(ctx, q, k, 2, kernels.Options{}); err != nil || len(top.Keys) != 2*sums.Elements() || len(top.Keys) > 0 && top.Keys[0] != -1 {
					t.Errorf("%s: top weights %+v, %v", c.name, top, err)
				}
				for _, x := range []kernels.Tensor{s, lse, o, biased} {
					x.Release()
				}
				if d.Batch != 2 {
					continue
				}
				// Packed: two sequences that are both empty on this side.
				one := func(x kernels.Tensor) kernels.Tensor { return must.Get(x.Slice(kernels.Batch, 0, 1))(t) }
				r, err := dev.Attention(ctx, one(q), one(k), one(v), kernels.Options{CuQ: []int{0, 0, d.SeqQ}, CuK: []int{0, 0, d.SeqK}, LSE: true})
				if err != nil {
					t.Errorf("%s, packed: %v", c.name, err)
					continue
				}
				rows[0], sums[0] = 1, 1
				is("packed o", r.O, rows, zero)
				is("packed lse", r.LSE, sums, hidden)
				rows[0] = 2
				r.Release()
			}
		}
		if o, err := dev.AttentionFloat32(ctx, kernels.Dims{Heads: 2, Dim: 4}, kernels.BHSD, nil, nil, nil, kernels.Options{}); err != nil || len(o) != 0 {
			t.Errorf("slices: %v, %v", o, err)
		}
	})
}

// TestSlicesRefuse: AttentionFloat32 names the argument and what to give instead.
func TestSlicesRefuse(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		x := make([]float32, 4)
		must.Fail(t, "without Dim", must.Err(dev.AttentionFloat32(t.Context(), kernels.Dims{SeqQ: 2}, kernels.BHSD, x, x, x, kernels.Options{})), kernels.ErrShape, "Dims.Dim is 0")
		meta := must.Get(backend.NewTensor(backend.NewMemory(new(int), "another device", 1<<20, nil, nil), kernels.Bool, kernels.Shape{1, 1, 2, 2}))(t)
		must.Fail(t, "a mask in device memory", must.Err(dev.AttentionFloat32(t.Context(), kernels.Dims{SeqQ: 2, Dim: 2}, kernels.BHSD, x, x, x, kernels.Options{Mask: meta})), kernels.ErrDevice, "mask: the tensor is not in host memory")
	})
}

// TestEmptyOperations: operations on tensors and layers take tensors without batches, heads
// or rows, and refuse rows without elements.
func TestEmptyOperations(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		ctx := t.Context()
		tensor := func(b, h, s, d int) kernels.Tensor {
			shape := kernels.Shape{b, h, s, d}
			return upload(t, dev, normal(shape.Elements(), 1), shape)
		}
		w, part := tensor(1, 1, 8, 4), tensor(1, 1, 3, 8)
		for _, l := range [][3]int{{0, 2, 3}, {2, 0, 3}, {2, 2, 0}, {0, 0, 0}} {
			of := func(d int) kernels.Tensor { return tensor(l[0], l[1], l[2], d) }
			to := tensor(1, 1, 3, 8)
			for name, err := range map[string]error{
				"Copy": dev.Copy(ctx, []kernels.Tensor{of(8), to}, []kernels.Tensor{of(8), part}), "Project": dev.Project(ctx, of(4), of(8), w, tensor(1, 1, 1, 4)),
				"Rotate":    dev.Rotate(ctx, of(8), of(8), kernels.Angles{Cos: of(4), Sin: of(4)}),
				"Merge":     dev.Merge(ctx, kernels.Result{O: of(8), LSE: of(1)}, kernels.Result{O: of(8), LSE: of(1)}),
				"Normalise": dev.Normalise(ctx, of(8), of(8), kernels.Tensor{}, kernels.Norm{}), "Gate": dev.Gate(ctx, of(8), of(8), of(1), kernels.Sigmoid),
				"NormaliseBackward": dev.NormaliseBackward(ctx, of(8), of(8), of(8), of(8), tensor(1, 1, 1, 8), kernels.Norm{}),
				"GateBackward":      dev.GateBackward(ctx, of(8), of(8), of(8), of(8), of(8), kernels.Sigmoid),
			} {
				if err != nil {
					t.Errorf("%s of %v: %v", name, l, err)
				}
			}
			sameBits(t, "the other tensor of Copy", dev, to, part)
		}
		for name, err := range map[string]error{
			"Copy": dev.Copy(ctx, []kernels.Tensor{tensor(1, 1, 3, 0)}, []kernels.Tensor{tensor(1, 1, 3, 0)}), "Project": dev.Project(ctx, tensor(1, 1, 3, 4), tensor(1, 1, 3, 0), tensor(1, 1, 0, 4), kernels.Tensor{}),
			"Rotate":    dev.Rotate(ctx, tensor(1, 1, 3, 0), tensor(1, 1, 3, 0), kernels.Angles{Cos: w, Sin: w}),
			"Merge":     dev.Merge(ctx, kernels.Result{O: tensor(1, 1, 3, 0), LSE: tensor(1, 1, 3, 1)}, kernels.Result{O: tensor(1, 1, 3, 0), LSE: tensor(1, 1, 3, 1)}),
			"Normalise": dev.Normalise(ctx, tensor(1, 1, 3, 0), tensor(1, 1, 3, 0), kernels.Tensor{}, kernels.Norm{}),
			"Gate":      dev.Gate(ctx, tensor(1, 1, 3, 0), tensor(1, 1, 3, 0), tensor(1, 1, 3, 0), kernels.Sigmoid),
		} {
			must.Fail(t, fmt.Sprintf("%s of rows without elements", name), err, kernels.ErrShape)
		}
		config := nn.MultiHeadConfig{Model: 8, Heads: 2, Bias: true, RoPE: &nn.RoPE{}}
		weights := must.Get(config.Initialise(nn.Initialiser{Seed: 1}))(t)
		bias := must.Get(weights.Bo.Float32s())(t)
		for i := range bias {
			bias[i] = float32(i + 1)
		}
		layer := must.Get(nn.NewMultiHeadAttention(ctx, dev, config, weights))(t)
		defer layer.Release()
		for _, l := range []struct{ batch, rows, memory int }{{0, 3, 3}, {2, 0, 0}, {2, 0, 5}, {2, 3, 0}} {
			opt := nn.MultiHeadOptions{Memory: tensor(l.batch, 1, l.memory, 8)}
			if l.memory == l.rows {
				opt.Memory = kernels.Tensor{}
			}
			opt.LSE, opt.Weights = true, true
			r, err := layer.Apply(ctx, tensor(l.batch, 1, l.rows, 8), opt)
			if err != nil {
				t.Errorf("layer of %+v: %v", l, err)
				continue
			}
			defer r.Release()
			if o, sums, pairs := r.O.Shape(), r.LSE.Shape(), r.Weights.Shape(); o != (kernels.Shape{l.batch, 1, l.rows, 8}) || sums != (kernels.Shape{l.batch, 2, l.rows, 1}) || pairs != (kernels.Shape{l.batch, 2, l.rows, l.memory}) {
				t.Errorf("layer of %+v: shapes %v, %v, %v", l, o, sums, pairs)
			}
			// Without keys the output is the bias.
			out := must.Get(dev.ToFloat32(ctx, r.O))(t)
			for i, x := range out {
				if x != bias[i%8] {
					t.Fatalf("layer of %+v: o[%d] is %v, should be %v", l, i, x, bias[i%8])
				}
			}
		}
	})
}

// TestBlocksOfAnySize: a block mask with blocks larger than the call is one element.
func TestBlocksOfAnySize(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		ctx := t.Context()
		x := upload(t, dev, normal(5*4, 1), kernels.Shape{1, 1, 5, 4})
		host := must.Get(kernels.HostBool([]bool{true}, kernels.Shape{1, 1, 1, 1}))(t)
		mask := must.Get(dev.Upload(ctx, host))(t)
		defer mask.Release()
		for _, size := range []int{5, 6, 1 << 32, math.MaxInt - 1, math.MaxInt} {
			call := prepare(t, dev, x, x, x, kernels.Options{BlockMask: mask, BlockSize: size})
			r := must.Get(call.Run(ctx))(must.In(t, "blocks of %d", size))
			check(t, fmt.Sprintf("blocks of %d", size), call, r, 0)
			r.Release()
		}
	})
}
