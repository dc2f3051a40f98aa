package fronttest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

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
