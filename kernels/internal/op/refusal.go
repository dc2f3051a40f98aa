package op

import (
	"context"

	"github.com/seed90331342/attn/backend"
)

// Refusal is a backend whose methods return Err.
type Refusal struct{ Err error }

func (r Refusal) Info() backend.Info { return backend.Info{} }
func (r Refusal) Close() error       { return nil }
func (r Refusal) Alloc(context.Context, backend.DType, backend.Shape) (t backend.Tensor, err error) {
	return t, r.Err
}
func (r Refusal) Upload(context.Context, backend.Tensor) (t backend.Tensor, err error) {
	return t, r.Err
}
func (r Refusal) Download(context.Context, backend.Tensor, backend.Tensor) error { return r.Err }
func (r Refusal) Wait(context.Context) error                                     { return r.Err }
func (r Refusal) QK(_ context.Context, _, _, _ backend.Tensor) error             { return r.Err }
func (r Refusal) Softmax(_ context.Context, _, _ backend.Tensor, _ *backend.Problem) error {
	return r.Err
}
func (r Refusal) PV(_ context.Context, _, _, _ backend.Tensor) error         { return r.Err }
func (r Refusal) Attention(context.Context, ...*backend.Call) error          { return r.Err }
func (r Refusal) Project(_ context.Context, _, _, _, _ backend.Tensor) error { return r.Err }
func (r Refusal) Merge(_ context.Context, _, _, _, _ backend.Tensor) error   { return r.Err }
func (r Refusal) Copy(_ context.Context, _, _ []backend.Tensor) error        { return r.Err }
func (r Refusal) Warmup(context.Context, *backend.Call, bool) error          { return r.Err }
func (r Refusal) Rotate(_ context.Context, _, _, _, _ backend.Tensor, _ backend.Rotation) error {
	return r.Err
}
func (r Refusal) Normalise(_ context.Context, _, _, _ backend.Tensor, _ backend.Norm) error {
	return r.Err
}
func (r Refusal) NormaliseBackward(_ context.Context, _, _, _, _, _ backend.Tensor, _ backend.Norm) error {
	return r.Err
}
func (r Refusal) Gate(_ context.Context, _, _, _ backend.Tensor, _ backend.Activation) error {
	return r.Err
}
func (r Refusal) GateBackward(_ context.Context, _, _, _, _, _ backend.Tensor, _ backend.Activation) error {
	return r.Err
}
func (r Refusal) LinearAttention(context.Context, *backend.LinearAttention) error { return r.Err }
func (r Refusal) CausalConv(context.Context, *backend.CausalConv) error           { return r.Err }
func (r Refusal) Index(context.Context, *backend.Index) (t backend.Tensor, err error) {
	return t, r.Err
}
func (r Refusal) Scores(context.Context, backend.Tensor, *backend.Problem, backend.ScorePoint) error {
	return r.Err
}
func (r Refusal) WarmupBackward(context.Context, *backend.Gradients) error { return r.Err }
func (r Refusal) Backward(context.Context, *backend.Gradients) error       { return r.Err }
func (r Refusal) PlanBackward(context.Context, *backend.Gradients) (p backend.Plan, err error) {
	return p, r.Err
}
func (r Refusal) Plan(context.Context, *backend.Call) (p backend.Plan, err error) { return p, r.Err }
