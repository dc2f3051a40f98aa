package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Call is a prepared attention call: validated once, run any number of times. It is
// for one goroutine at a time.
type Call struct {
	d       *Device
	q, k, v backend.Tensor
	opt     Options
	dims    Dims
}

// Prepare validates a call and returns it. q, k and v may be [backend.Meta] tensors,
// which Plan and Warmup take. Errors as for [Device.Attention].
func (d *Device) Prepare(q, k, v backend.Tensor, opt Options) (*Call, error) {
	c := &Call{d: d, q: q, k: k, v: v, opt: opt}
	var err error
	if c.packed() {
		_, _, err = plannedVarlen(q, k, v, opt.CuQ, opt.CuK, &opt)
	} else {
		_, _, _, err = planned(q, k, v, &opt)
	}
	if err != nil {
		return nil, fmt.Errorf("attention: %w", err)
	}
	c.dims, err = pagedDims(q, k, v, opt.Pages)
	return c, err
}

func (c *Call) packed() bool { return c.opt.CuQ != nil || c.opt.CuK != nil }

// Dims returns the lengths of the call.
func (c *Call) Dims() Dims { return c.dims }

// Plan returns how the device would run the call.
func (c *Call) Plan(ctx context.Context) (backend.Plan, error) {
	if c.packed() {
		return PlanVarlen(c.d.be, c.q, c.k, c.v, c.opt.CuQ, c.opt.CuK, c.opt)
	}
	return Plan(c.d.be, c.q, c.k, c.v, c.opt)
}

// Warmup compiles what the call needs and runs nothing.
func (c *Call) Warmup(ctx context.Context) error {
	if c.packed() {
		return WarmupVarlen(ctx, c.d.be, c.q, c.k, c.v, c.opt.CuQ, c.opt.CuK, c.opt)
	}
	return Warmup(ctx, c.d.be, c.q, c.k, c.v, c.opt)
}

// Run computes the call and allocates the result, for the caller to Release.
func (c *Call) Run(ctx context.Context) (Result, error) {
	return c.d.Attention(ctx, c.q, c.k, c.v, c.opt)
}

// RunInto computes the call into preallocated outputs: out.O, of q's dtype or F32, and
// out.LSE and out.Weights unless they are the zero Tensor. It does not allocate.
func (c *Call) RunInto(ctx context.Context, out Result) error {
	if c.packed() {
		_, calls, _, err := varlen(out, c.q, c.k, c.v, c.opt.CuQ, c.cuK(), &c.opt)
		if err != nil {
			return err
		}
		return attendAll(ctx, c.d.be, calls)
	}
	return AttentionInto(ctx, c.d.be, out, c.q, c.k, c.v, c.opt)
}

func (c *Call) cuK() []int {
	if c.opt.CuK == nil {
		return c.opt.CuQ
	}
	return c.opt.CuK
}

// Check recomputes rows of out, a result of the call, in float64.
func (c *Call) Check(ctx context.Context, out Result, opt CheckOptions) (CheckReport, error) {
	if c.packed() {
		return CheckVarlen(ctx, c.d.be, c.q, c.k, c.v, c.opt.CuQ, c.opt.CuK, out, c.opt, opt)
	}
	return Check(ctx, c.d.be, c.q, c.k, c.v, out, c.opt, opt)
}

// Rebind gives the call other operands of the same shapes, strides and dtypes.
func (c *Call) Rebind(q, k, v backend.Tensor) error {
	for _, o := range [3]struct {
		name    string
		is, was backend.Tensor
	}{{"q", q, c.q}, {"k", k, c.k}, {"v", v, c.v}} {
		if o.is.Shape() != o.was.Shape() || o.is.Strides() != o.was.Strides() || o.is.DType() != o.was.DType() {
			return fmt.Errorf("rebind: %s is %v %v with strides %v, the call was prepared for %v %v with strides %v: %w", o.name,
				o.is.DType(), o.is.Shape(), o.is.Strides(), o.was.DType(), o.was.Shape(), o.was.Strides(), backend.ErrShape)
		}
	}
	c.q, c.k, c.v = q, k, v
	return nil
}
