package fronttest

import (
	"cmp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestCheckBackward: gradients with every kind of option pass, and one element that is off by
// a thousandth is found in each of dq, dk and dv.
func TestCheckBackward(t *testing.T) {
	dev := onCPU(t)
	ctx := t.Context()
	const batch, heads, kvHeads, seqQ, seqK, dim, valueDim = 2, 4, 2, 13, 21, 8, 5
	tensor := func(seed uint64, s ...int) kernels.Tensor {
		shape := kernels.Shape(s)
		return upload(t, dev, normal(shape.Elements(), seed), shape)
	}
	seen := make([]bool, heads*4*6)
	for i := range seen {
		seen[i] = i%3 < 2
	}
	blocks := must.Get(kernels.HostBool(seen, kernels.Shape{1, heads, 4, 6}))(t)
	segments := func(n int) [][]int32 {
		ids := make([]int32, n)
		for i := range ids {
			ids[i] = int32(3 * i / n)
		}
		return [][]int32{ids}
	}
	for _, c := range []struct {
		name string
		opt  kernels.Options
		lse  bool    // the loss depends on lse
		gain float32 // of the first row of q; 0 is 1
	}{
		{"plain", kernels.Options{}, false, 0},
		{"scores of 2^40 in a row", kernels.Options{}, true, 0x1p40},
		{"causal with softcap", kernels.Options{Causal: true, Align: kernels.LowerRight, Softcap: 2}, true, 0},
		{"bias and relative bias", kernels.Options{Bias: tensor(5, 1, heads, seqQ, seqK), RelativeBias: tensor(6, 1, 1, 1, seqQ+seqK-1)}, true, 0},
		{"ALiBi, sinks and dropout", kernels.Options{ALiBi: []float32{1, .5, .25, .125}, Sinks: []float32{0, 1, -1, 2}, Dropout: kernels.Dropout{P: 0.25, Seed: 3}, Offset: []int{8}}, true, 0},
		{"blocks", kernels.Options{BlockMask: blocks, BlockSize: 4}, false, 0},
		{"segments and offsets", kernels.Options{QSegments: segments(seqQ), KSegments: segments(seqK), Offset: []int{0, 4}, Causal: true}, true, 0},
		{"key lengths", kernels.Options{KLen: []int{7, 0}}, false, 0},
		{"no keys in range", kernels.Options{KLen: []int{0, 0}}, true, 0},
	} {
		q, k, v := tensor(1, batch, heads, seqQ, dim), tensor(2, batch, kvHeads, seqK, dim), tensor(3, batch, kvHeads, seqK, valueDim)
		for i, x := range must.Get(q.Float32s())(t)[:dim] {
			must.Get(q.Float32s())(t)[i] = cmp.Or(c.gain, 1) * x
		}
		c.opt.LSE = true
		call := prepare(t, dev, q, k, v, c.opt)
		r := must.Get(call.Run(ctx))(must.In(t, "%s", c.name))
		grads := must.Get(call.AllocGradients(ctx, call.Gradients().Operands()))(must.In(t, "%s", c.name))
		d := kernels.Result{O: tensor(4, batch, heads, seqQ, valueDim)}
		if c.lse {
			d.LSE = tensor(7, batch, heads, seqQ, 1)
		}
		must.Do(must.In(t, "%s", c.name), call.Backward(ctx, grads, d, r))
		all := kernels.CheckOptions{Rows: 1000}
		const rows = batch * (heads*seqQ + kvHeads*seqK)
		if report, err := call.CheckBackward(ctx, grads, d, r, all); err != nil || !report.OK() || report.Rows != rows {
			t.Errorf("%s: %+v, %v, want %d rows that are right", c.name, report, err, rows)
		}
		if report, err := call.CheckBackward(ctx, kernels.Gradients{K: grads.K}, d, r, kernels.CheckOptions{Rows: 3}); err != nil || !report.OK() || report.Rows != 3 {
			t.Errorf("%s, dk alone: %+v, %v", c.name, report, err)
		}
		for name, g := range map[string]kernels.Tensor{"dq[1,": grads.Q, "dk[1,": grads.K, "dv[1,": grads.V} {
			x := must.Get(g.Float32s())(t)
			last := &x[len(x)-1]
			was := *last
			*last = was*1.001 + 1e-30 // some are 0
			if report, err := call.CheckBackward(ctx, grads, d, r, all); err != nil || report.OK() || !strings.HasPrefix(report.Worst, name) {
				t.Errorf("%s: a wrong element of %s...]: %+v, %v", c.name, name, report, err)
			}
			*last = was
		}
		r.Release()
		grads.Release()
	}
}
