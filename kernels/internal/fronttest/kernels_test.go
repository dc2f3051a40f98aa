// Package fronttest has the tests of package kernels that open devices, on the CPU and on the
// GPU. They are apart because go mod tidy loads what the tests of an imported package import: a
// program that uses kernels and cpu must not download the WebGPU libraries.
package fronttest

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// each runs f on the CPU and on the GPU. It skips the GPU without an adapter, except under CI.
func each(t *testing.T, f func(t *testing.T, dev *kernels.Device)) {
	for _, name := range []string{"cpu", "gpu"} {
		t.Run(name, func(t *testing.T) {
			dev, err := kernels.Open(name)
			if errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true" {
				t.Skipf("no WebGPU adapter: %v", err)
			}
			must.Do(t, err)
			defer dev.Close()
			f(t, dev)
		})
	}
}

// onCPU returns a device that the test closes.
func onCPU(t *testing.T) *kernels.Device {
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	t.Cleanup(func() { dev.Close() })
	return dev
}

// check checks a number of rows of a result; 0 is the default.
func check(t *testing.T, what string, call *kernels.Call, r kernels.Result, rows int) {
	t.Helper()
	report, err := call.Check(t.Context(), r, kernels.CheckOptions{Rows: rows, Seed: 5})
	if err != nil || !report.OK() || rows > 0 && report.Rows != rows {
		t.Errorf("%s: check: %+v, %v", what, report, err)
	}
}

// prepare returns a prepared call.
func prepare(t testing.TB, dev *kernels.Device, q, k, v kernels.Tensor, opt kernels.Options) *kernels.Call {
	t.Helper()
	return must.Get(dev.Prepare(q, k, v, opt))(t)
}

func normal(n int, seed uint64) []float32 {
	rng := rand.New(rand.NewPCG(seed, 1))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return x
}

func upload(t *testing.T, dev *kernels.Device, x []float32, s kernels.Shape) kernels.Tensor {
	t.Helper()
	y := must.Get(dev.FromFloat32(t.Context(), kernels.F32, x, s))(t)
	t.Cleanup(y.Release)
	return y
}

// TestAttentionFloat32TakesHostMasks: AttentionFloat32 uploads masks, and a bias of -Inf hides
// the same keys as a false mask.
func TestAttentionFloat32TakesHostMasks(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		d := kernels.Dims{Heads: 2, SeqQ: 5, SeqK: 7, Dim: 4}
		q, k, v := normal(2*5*4, 1), normal(2*7*4, 2), normal(2*7*4, 3)
		bools := make([]bool, 5*7)
		floats := make([]float32, 5*7)
		for i := range bools {
			bools[i] = i%3 != 0
			if !bools[i] {
				floats[i] = float32(math.Inf(-1))
			}
		}
		mask := must.Get(kernels.HostBool(bools, kernels.Shape{1, 1, 5, 7}))(t)
		bias := must.Get(kernels.HostF32(floats, kernels.Shape{1, 1, 5, 7}))(t)
		one := must.Get(dev.AttentionFloat32(t.Context(), d, kernels.BHSD, q, k, v, kernels.Options{Mask: mask}))(t)
		two := must.Get(dev.AttentionFloat32(t.Context(), d, kernels.BHSD, q, k, v, kernels.Options{Bias: bias}))(t)
		if !slices.Equal(one, two) {
			t.Errorf("mask gives %v, bias of -Inf gives %v", one, two)
		}
		must.Fail(t, "one element short", must.Err(dev.AttentionFloat32(t.Context(), d, kernels.BHSD, q[1:], k, v, kernels.Options{})), kernels.ErrShape, "q: data has 39 elements, shape [1 2 5 4] needs 40")
	})
}

// TestCheck: a correct result passes in every output, and Check names a wrong element of a row that it recomputes.
func TestCheck(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		s := kernels.Shape{2, 4, 40, 16}
		kv := kernels.Shape{2, 2, 50, 16}
		q, k, v := upload(t, dev, normal(s.Elements(), 1), s), upload(t, dev, normal(kv.Elements(), 2), kv), upload(t, dev, normal(kv.Elements(), 3), kv)
		opt := kernels.Options{Causal: true, Align: kernels.LowerRight, LSE: true, Weights: true}
		r := must.Get(dev.Attention(t.Context(), q, k, v, opt))(t)
		defer r.Release()
		call := prepare(t, dev, q, k, v, opt)
		report, err := call.Check(t.Context(), r, kernels.CheckOptions{Rows: 60, Seed: 4})
		if err != nil || !report.OK() || report.Rows != 60 {
			t.Errorf("a right result: %+v, %v", report, err)
		}
		all, err := call.Check(t.Context(), r, kernels.CheckOptions{Rows: 1e6})
		if err != nil || !all.OK() || all.Rows != 2*4*40 {
			t.Errorf("all rows: %+v, %v", all, err)
		}
		wrong := must.Get(dev.ToFloat32(t.Context(), r.O))(t)
		wrong[((1*4+2)*40+39)*16+7] += 0.01
		bad := kernels.Result{O: upload(t, dev, wrong, s)}
		report, err = call.Check(t.Context(), bad, kernels.CheckOptions{Rows: 320})
		if err != nil || report.OK() || !strings.Contains(report.Worst, "o[1,2,39,7]") {
			t.Errorf("a wrong number: %+v, %v", report, err)
		}
	})
}

// TestPlanOfWeights: the plan of a call with weights is that of the call without, and names the
// stages that follow and O(S²) memory.
func TestPlanOfWeights(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		m := must.Get(kernels.Meta(kernels.F32, kernels.Shape{1, 2, 4096, 64}))(t)
		fused := must.Get(prepare(t, dev, m, m, m, kernels.Options{}).Plan(t.Context()))(t)
		both := must.Get(prepare(t, dev, m, m, m, kernels.Options{Weights: true}).Plan(t.Context()))(t)
		weights := int64(2 * 4096 * 4096 * 4)
		if both.Bytes != fused.Bytes+3*weights || both.Scratch != fused.Scratch || both.Chunks != fused.Chunks+2 || !strings.HasPrefix(both.Why, fused.Why) ||
			!strings.Contains(both.Why, "O(S²)") || both.Path != fused.Path+", QK and Softmax for weights" {
			t.Errorf("plan with weights: %+v", both)
		}
		if fused.FLOPs != 4*2*4096*4096*64 || fused.Scratch > 64<<20 {
			t.Errorf("fused plan: %+v", fused)
		}
	})
}

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
