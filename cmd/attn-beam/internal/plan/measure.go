package plan

import (
	"context"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Speed measures what dev computes in a second, in FLOP, of attention with the heads and head
// sizes of d and data of the given type. It computes 2,048 rows over 8,192 keys of one key
// head four times, 4 GFLOP each for one query head of 64, and returns the speed of the
// fastest of the last three: the first one compiles and allocates.
func Speed(ctx context.Context, dev *kernels.Device, d kernels.Dims, dtype backend.DType) (float64, error) {
	d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK = 1, d.Heads/max(1, d.KVHeads), 1, 2048, 8192
	var tensors [3]backend.Tensor
	for i, shape := range []backend.Shape{{1, d.Heads, d.SeqQ, d.Dim}, {1, 1, d.SeqK, d.Dim}, {1, 1, d.SeqK, d.ValueDim}} {
		data := make([]float32, shape.Elements())
		for j := range data {
			data[j] = float32(j%17-8) / 8
		}
		var err error
		if tensors[i], err = dev.FromFloat32(ctx, dtype, data, shape); err != nil {
			return 0, err
		}
		defer tensors[i].Release()
	}
	call, err := dev.Prepare(tensors[0], tensors[1], tensors[2], kernels.Options{LSE: true})
	if err != nil {
		return 0, err
	}
	out, err := call.Alloc(ctx)
	if err != nil {
		return 0, err
	}
	defer out.Release()
	best := time.Duration(0)
	for n := range 4 {
		start := time.Now()
		if err := call.RunInto(ctx, out); err != nil {
			return 0, err
		}
		if err := dev.Wait(ctx); err != nil {
			return 0, err
		}
		if took := max(time.Since(start), 1); n > 0 && (best == 0 || took < best) {
			best = took
		}
	}
	flops := 2 * float64(d.Heads*d.SeqQ) * float64(d.SeqK) * float64(d.Dim+d.ValueDim)
	return flops / best.Seconds(), nil
}
