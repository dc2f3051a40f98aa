package run

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/attn/internal/call"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
	"github.com/seed90331342/attn/kernels/npy"
)

// computation is a call with its tensors on the device.
type computation struct {
	*Command
	*call.Operands
	dev     *kernels.Device
	files   *output.Set
	traced  bool         // anyone sees the progress
	done    atomic.Int64 // the progress of attend in percent
	printed string       // by the current step

	call   *kernels.Call
	result kernels.Result
}

// rotate applies the rotary embedding to queries and keys. Positions start at 0 in each packed sequence.
func (r *computation) rotate(ctx context.Context) error {
	if r.RoPE.Base == nil {
		return nil
	}
	rope := &nn.RoPE{Base: *r.RoPE.Base, Dim: r.RoPE.Dim, Interleaved: r.RoPE.Interleaved}
	cuK := r.Options.CuK
	if cuK == nil {
		cuK = r.Options.CuQ
	}
	for i, t := range []*kernels.Tensor{&r.Q, &r.K} {
		positions, err := nn.Positions(0, t.Shape()[kernels.Seq])
		if err != nil {
			return err
		}
		cu := [][]int{r.Options.CuQ, cuK}[i]
		for n := range max(len(cu)-1, 0) {
			for row := cu[n]; row < cu[n+1]; row++ {
				positions[0][row] = row - cu[n]
			}
		}
		angles, err := rope.Angles(ctx, r.dev, t.Shape()[kernels.Dim], positions)
		if err != nil {
			return err
		}
		defer angles.Release()
		from := *t // may lie in the file itself
		if *t, err = r.Alloc(ctx, from.Shape()); err == nil {
			err = r.dev.Rotate(ctx, *t, from, angles)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// percent returns the progress of the current step, if it is known.
func (r *computation) percent() string {
	if p := r.done.Load(); p > 0 {
		return fmt.Sprintf(", %d%%", p)
	}
	return ""
}

// attend computes the call.
func (r *computation) attend(ctx context.Context) error {
	opt := r.Options // without LSE and Weights for the other outputs
	opt.LSE, opt.Weights = r.LSE != "" || r.DO != "", r.Weights != ""
	prepared, err := r.dev.Prepare(r.Q, r.K, r.V, opt)
	if err != nil {
		return err
	}
	r.call = prepared
	if r.traced {
		defer r.done.Store(0)
		ctx = kernels.WithTrace(ctx, &kernels.Trace{Progress: func(done, total float64) { r.done.Store(int64(100 * done / total)) }})
	}
	r.result, err = prepared.Run(ctx)
	return err
}

// check checks the result.
func (r *computation) check(ctx context.Context) error {
	if !r.Check {
		return nil
	}
	report, err := r.call.Check(ctx, r.result, kernels.CheckOptions{})
	if err != nil {
		return err
	}
	return r.checked("rows", report)
}

// checked prints a report of rows, or returns an error when one is wrong.
func (r *computation) checked(rows string, report kernels.CheckReport) error {
	if !report.OK() {
		return fmt.Errorf("check failed, nothing was written: %s, an error of %.3g above the bound of %.3g (%d %s against float64)",
			report.Worst, report.MaxError, report.Bound, report.Rows, rows)
	}
	if report.Rows == 0 {
		r.printed = fmt.Sprintf("check: there are no %s\n", rows)
		return nil
	}
	r.printed = fmt.Sprintf("check: %d %s against float64: largest error %.3g, bound %.3g (%s)\n", report.Rows, rows, report.MaxError, report.Bound, report.Worst)
	return nil
}

// writeRows writes the output, and the results with numbers for each row.
func (r *computation) writeRows(ctx context.Context) error {
	o, err := r.BHSD(r.result.O) // in the order of the files again
	if err == nil {
		err = r.write(ctx, "out", o, r.FileShape(r.result.O.Shape()))
	}
	if err != nil {
		return err
	}
	lse := []int{r.Dims.Batch, r.Dims.Heads, r.Dims.SeqQ}
	if r.Options.CuQ != nil {
		lse = lse[1:]
	}
	if err := r.write(ctx, "lse", r.result.LSE, lse); err != nil {
		return err
	}
	return r.write(ctx, "weights", r.result.Weights, r.pairs())
}

// pairs is the shape of an output with an element for each query and key.
func (r *computation) pairs() []int {
	d := r.Dims
	return []int{d.Batch, d.Heads, d.SeqQ, d.SeqK}
}

// writePairs computes and writes scores, largest weights and the mask of dropout.
func (r *computation) writePairs(ctx context.Context) error {
	d := r.Dims
	if r.Scores != "" {
		at := map[string]kernels.ScorePoint{"scaled": kernels.Scaled, "capped": kernels.Capped, "biased": kernels.Biased}[r.ScoresAt]
		s, err := r.dev.Scores(ctx, r.Q, r.K, at, r.Options)
		if err != nil {
			return err
		}
		defer s.Release()
		if err := r.write(ctx, "scores", s, r.pairs()); err != nil {
			return err
		}
	}
	if r.TopK > 0 {
		top, err := r.dev.TopWeights(ctx, r.Q, r.K, r.TopK, r.Options)
		if err != nil {
			return err
		}
		shape := []int{d.Batch, d.Heads, d.SeqQ, r.TopK}
		err = r.files.Write(ctx, "--topk-keys", func(w io.Writer) error { return npy.Write(w, "<i4", shape, top.Keys) })
		if err == nil {
			err = r.files.Write(ctx, "--topk-weights", func(w io.Writer) error { return npy.Write(w, "<f4", shape, top.Weights) })
		}
		if err != nil {
			return err
		}
	}
	if r.KeepMask != "" {
		keep, err := kernels.AllocHost(kernels.Bool, kernels.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
		if err != nil {
			return err
		}
		kept, err := keep.Bools()
		if err != nil {
			return err
		}
		for n := range kept {
			i := n / d.SeqK
			if n%d.SeqK == 0 && ctx.Err() != nil {
				return ctx.Err()
			}
			kept[n] = r.Options.Dropout.Keeps(i/d.SeqQ/d.Heads, i/d.SeqQ%d.Heads, i%d.SeqQ, n%d.SeqK)
		}
		return r.write(ctx, "keep-mask", keep, r.pairs())
	}
	return nil
}

// write writes a tensor to the file of a flag, if it is given.
func (r *computation) write(ctx context.Context, flag string, t kernels.Tensor, shape []int) error {
	return r.files.Write(ctx, "--"+flag, func(w io.Writer) error {
		if !t.OnHost() || !t.IsContiguous() {
			host, err := kernels.AllocHost(t.DType(), t.Shape())
			if err != nil {
				return err
			}
			if err := r.dev.Download(ctx, host, t); err != nil {
				return err
			}
			t = host
		}
		return array.WriteTensor(ctx, w, t, shape)
	})
}
