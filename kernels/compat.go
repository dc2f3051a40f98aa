package kernels

import (
	"context"

	"github.com/seed90331342/attn/backend"
)

// The functions of this file are those that callers have not left yet.

func Attention(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, opt Options) (Result, error) {
	return NewDevice(be).Attention(ctx, q, k, v, opt)
}

func AttentionInto(ctx context.Context, be backend.Backend, out Result, q, k, v backend.Tensor, opt Options) error {
	c, err := NewDevice(be).Prepare(q, k, v, opt)
	if err != nil {
		return err
	}
	return c.RunInto(ctx, out)
}

func AttentionFloat32(ctx context.Context, be backend.Backend, d Dims, q, k, v []float32, opt Options) ([]float32, error) {
	return NewDevice(be).AttentionFloat32(ctx, d, q, k, v, opt)
}

func AttentionVarlen(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) (Result, error) {
	opt.CuQ, opt.CuK = cuQ, cuK
	return NewDevice(be).Attention(ctx, q, k, v, opt)
}

func Plan(be backend.Backend, q, k, v backend.Tensor, opt Options) (backend.Plan, error) {
	c, err := NewDevice(be).Prepare(q, k, v, opt)
	if err != nil {
		return backend.Plan{}, err
	}
	return c.Plan(context.TODO())
}

func PlanVarlen(be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) (backend.Plan, error) {
	opt.CuQ, opt.CuK = cuQ, cuK
	return Plan(be, q, k, v, opt)
}

func Warmup(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, opt Options) error {
	c, err := NewDevice(be).Prepare(q, k, v, opt)
	if err != nil {
		return err
	}
	return c.Warmup(ctx)
}

func WarmupVarlen(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) error {
	opt.CuQ, opt.CuK = cuQ, cuK
	return Warmup(ctx, be, q, k, v, opt)
}

func Check(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, r Result, opt Options, co CheckOptions) (CheckReport, error) {
	c, err := NewDevice(be).Prepare(q, k, v, opt)
	if err != nil {
		return CheckReport{}, err
	}
	return c.Check(ctx, r, co)
}

func CheckVarlen(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, r Result, opt Options, co CheckOptions) (CheckReport, error) {
	opt.CuQ, opt.CuK = cuQ, cuK
	return Check(ctx, be, q, k, v, r, opt, co)
}

func Packed(x backend.Tensor) (backend.Tensor, error) { return x.Swap(backend.Heads, backend.Seq) }

func FromFloat32(ctx context.Context, be backend.Backend, dtype backend.DType, data []float32, shape backend.Shape) (backend.Tensor, error) {
	return NewDevice(be).FromFloat32(ctx, dtype, data, shape)
}

func Float32s(ctx context.Context, be backend.Backend, t backend.Tensor) ([]float32, error) {
	return NewDevice(be).Float32s(ctx, t)
}

func QK(ctx context.Context, be backend.Backend, q, k backend.Tensor) (backend.Tensor, error) {
	return NewDevice(be).QK(ctx, q, k)
}

func Softmax(ctx context.Context, be backend.Backend, s, lse backend.Tensor, opt Options) error {
	return NewDevice(be).Softmax(ctx, s, lse, opt)
}

func PV(ctx context.Context, be backend.Backend, w, v backend.Tensor) (backend.Tensor, error) {
	return NewDevice(be).PV(ctx, w, v)
}

func Scores(ctx context.Context, be backend.Backend, q, k backend.Tensor, at backend.ScorePoint, opt Options) (backend.Tensor, error) {
	return NewDevice(be).Scores(ctx, q, k, at, opt)
}

func TopWeights(ctx context.Context, be backend.Backend, q, k backend.Tensor, n int, opt Options) (Top, error) {
	return NewDevice(be).TopWeights(ctx, q, k, n, opt)
}

func Merge(ctx context.Context, be backend.Backend, r, part Result) error {
	return NewDevice(be).Merge(ctx, r, part)
}
