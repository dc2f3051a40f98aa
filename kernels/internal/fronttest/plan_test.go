package fronttest

import (
	"context"
	"errors"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// warmer records the calls of Warmup.
type warmer struct {
	differentiator
	calls     []backend.Call
	weights   []bool
	gradients []backend.Gradients
	err       error
}

type differentiator interface {
	backend.Backend
	backend.Differentiator
}

func (w *warmer) WarmupBackward(_ context.Context, g *backend.Gradients) error {
	w.gradients = append(w.gradients, *g)
	return w.err
}

func (w *warmer) Warmup(_ context.Context, weights bool, calls ...*backend.Call) error {
	for _, c := range calls {
		w.calls, w.weights = append(w.calls, *c), append(w.weights, weights)
	}
	return w.err
}

func TestWarmup(t *testing.T) {
	dev := onCPU(t)
	meta := func(heads, seq, dim int) kernels.Tensor {
		return must.Get(kernels.Meta(kernels.F16, kernels.Shape{2, heads, seq, dim}))(t)
	}
	q, k, v := meta(4, 3, 8), meta(2, 9, 8), meta(2, 9, 5)
	must.Pass(t, "a backend that has nothing to compile", prepare(t, dev, q, k, v, kernels.Options{}).Warmup(t.Context()))
	done, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", prepare(t, dev, q, k, v, kernels.Options{}).Warmup(done), context.Canceled)
	w := &warmer{differentiator: dev.Backend().(differentiator)}
	warm := kernels.NewDevice(w)
	if _, err := warm.Prepare(q, v, k, kernels.Options{}); !errors.Is(err, kernels.ErrShape) || len(w.calls) > 0 {
		t.Errorf("shapes that do not fit: %v after %d calls", err, len(w.calls))
	}
	for _, opt := range []kernels.Options{{Causal: true, LSE: true}, {Weights: true}} {
		must.Do(t, prepare(t, warm, q, k, v, opt).Warmup(t.Context()))
		n := len(w.calls) - 1
		c := w.calls[n]
		if c.O.Shape() != (kernels.Shape{2, 4, 3, 5}) || c.O.DType() != kernels.F16 || c.LSE.IsZero() == opt.LSE || w.weights[n] != opt.Weights {
			t.Errorf("%+v: warmed o %v %v, lse %v, weights %v", opt, c.O.DType(), c.O.Shape(), c.LSE.Shape(), w.weights[n])
		}
	}
	if w.calls[0].Visible.Right != 0 {
		t.Errorf("the call that was warmed up is not causal: %+v", w.calls[0].Visible)
	}
	call := prepare(t, warm, q, k, v, kernels.Options{Sinks: make([]float32, 4), LSE: true})
	for _, want := range []kernels.Gradients{call.Gradients().Operands(), call.Gradients()} {
		must.Do(t, call.WarmupBackward(t.Context(), want))
		g := w.gradients[len(w.gradients)-1]
		if g.DQ.DType() != kernels.F16 || g.DV.Shape() != v.Shape() || g.DSinks.IsZero() != want.Sinks.IsZero() || g.LSE.IsZero() || g.DO.Shape() != g.O.Shape() || g.Add {
			t.Errorf("%+v: warmed %+v", want, g)
		}
	}
	plain := prepare(t, dev, q, k, v, kernels.Options{})
	must.Pass(t, "gradients on a backend that has nothing to compile", plain.WarmupBackward(t.Context(), plain.Gradients()))
	w.err = kernels.ErrUnsupported
	must.Fail(t, "the backend's error", prepare(t, warm, q, k, v, kernels.Options{}).Warmup(t.Context()), kernels.ErrUnsupported)
	must.Fail(t, "the backend's error for gradients", prepare(t, warm, q, k, v, kernels.Options{}).WarmupBackward(t.Context(), plain.Gradients().Operands()), kernels.ErrUnsupported)
}
