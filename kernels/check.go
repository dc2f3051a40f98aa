package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/kernels/internal/check"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// CheckOptions choose the rows that [Call.Check] recomputes.
type CheckOptions struct {
	Rows int    // number of random query rows; 0 means 16
	Seed uint64 // of their choice
}

// CheckReport compares a result with float64.
type CheckReport struct {
	Rows int // that were recomputed: all, if there are fewer than requested
	// MaxError is |o - ref| of the element that is worst relative to its bound, and Bound is
	// that bound, which package oracle derives. Worst describes the element.
	MaxError, Bound float64
	// Off is MaxError/Bound; at most 1 is correct. It is +Inf for an element that is wrongly NaN or wrongly not NaN.
	Off   float64
	Worst string
}

// OK reports whether every recomputed value is within its bound.
func (r CheckReport) OK() bool { return r.Off <= 1 }

// Check recomputes random rows of the call in float64 and compares them with out, the result of a run: out.O, and
// out.LSE and out.Weights unless they are the zero Tensor. It downloads the keys and values of the rows' heads, O(Sk)
// memory for a head. A wrong result is not an error, see [CheckReport.OK].
func (c *Call) Check(ctx context.Context, out Result, opt CheckOptions) (report CheckReport, err error) {
	defer op.Annotate(&err, "check")
	if err := c.checkOutputs(out); err != nil {
		return CheckReport{}, err
	}
	defer c.bindOutputs(Result{})
	c.bindOutputs(out)
	subs, err := c.checked(ctx)
	if err != nil {
		return CheckReport{}, err
	}
	if region.Empty(c.dims) { // rows without keys
		subs = []check.Sub{{Box: region.WholeRegion(c.dims).Box, Call: c.all(out)}}
	}
	r, err := check.Results(ctx, c.dev.ToFloat32, c.dims, subs, out.Weights, check.Sample(opt))
	return CheckReport(r), err
}

// checked returns the backend calls of c for a comparison with float64.
func (c *Call) checked(ctx context.Context) ([]check.Sub, error) {
	subs := make([]check.Sub, len(c.subs))
	for i := range subs {
		subs[i] = check.Sub{Box: c.subs[i].Box, Call: c.calls[i], ByRow: c.subs[i].byRow}
		if lists := c.calls[i].Lists; !lists.IsZero() {
			keys, err := c.dev.ToInt32(ctx, lists)
			if err == nil {
				subs[i].Call, err = c.calls[i].ListKeys(keys)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	return subs, nil
}

// verify returns ErrVerify when one of so many random rows of out is wrong, see [Device.SetVerify].
func (c *Call) verify(ctx context.Context, out Result, rows int) error {
	report, err := c.Check(ctx, out, CheckOptions{Rows: rows, Seed: c.dev.verified.Add(1) - 1})
	if err == nil && !report.OK() {
		err = fmt.Errorf("verify: %s: off by %.3g, bound %.3g: %w", report.Worst, report.MaxError, report.Bound, ErrVerify)
	}
	return err
}

// CheckBackward compares gradients that [Call.Backward] wrote, with the same arguments, with
// float64: those of random rows of q, and of as many random rows of k and v. Gradients of
// options are not compared. The report counts all these rows.
//
// A row of dq is computed from the operands alone. A row of dk or dv is a sum over all query rows; it is computed from
// result, which [Call.Check] checks, and takes O(Sq) operations for each query head that shares the key head.
func (c *Call) CheckBackward(ctx context.Context, grads Gradients, d, result Result, opt CheckOptions) (report CheckReport, err error) {
	defer op.Annotate(&err, "check")
	if err := c.checkBackward(&grads, d, result); err != nil {
		return CheckReport{}, err
	}
	subs, err := c.checked(ctx)
	if err != nil {
		return CheckReport{}, err
	}
	for i := range subs {
		part := c.gradients(&c.subs[i], &grads, d, result)
		subs[i].Call, subs[i].Gradients = &part.Call, &part
	}
	r, err := check.Gradients(ctx, c.dev.ToFloat32, c.dims, subs, [3]Tensor{grads.Q, grads.K, grads.V}, check.Sample(opt))
	return CheckReport(r), err
}
