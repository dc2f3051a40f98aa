package kernels

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func TestBackwardRefuses(t *testing.T) {
	f32, f16 := F32, F16
	q, k, v := meta(t, f32, 2, 4, 8, 16), meta(t, f32, 2, 2, 9, 16), meta(t, f32, 2, 2, 9, 5)
	o, lse := meta(t, f32, 2, 4, 8, 5), meta(t, f32, 2, 4, 8, 1)
	result, d := Result{O: o, LSE: lse}, Result{O: o}
	q8 := meta(t, Q8, 2, 2, 9, 16)
	for _, c := range []struct {
		name      string
		k, v      Tensor
		opt       Options
		grads     Gradients
		d, result Result
		want      error
		says      string
	}{
		{"int8 keys", q8, q8, Options{}, Gradients{}, d, result, ErrUnsupported, "k is q8, which has no gradients"},
		{"pages", meta(t, f32, 3, 2, 4, 16), meta(t, f32, 3, 2, 4, 5), Options{Pages: &Pages{Table: [][]int32{{0}, {1}}, Keys: 4}, KLen: []int{4, 4}}, Gradients{}, d, result, ErrUnsupported, "keys in pages have no gradients"},
		{"no lse", k, v, Options{}, Gradients{}, d, Result{O: o}, ErrOption, "set Options.LSE"},
		{"weights", k, v, Options{}, Gradients{}, Result{O: o, Weights: lse}, result, ErrUnsupported, "weights have no gradients"},
		{"no o", k, v, Options{}, Gradients{}, d, Result{LSE: lse}, ErrShape, "o is missing"},
		{"no d.o", k, v, Options{}, Gradients{}, Result{LSE: lse}, result, ErrShape, "d.o is missing"},
		{"shape of d.o", k, v, Options{}, Gradients{}, Result{O: q}, result, ErrShape, "d.o has shape [2 4 8 16], it must be [2 4 8 5]"},
		{"dtype of d.lse", k, v, Options{}, Gradients{}, Result{O: o, LSE: meta(t, f16, 2, 4, 8, 1)}, result, ErrDType, "d.lse is f16"},
		{"shape of dq", k, v, Options{}, Gradients{Q: k}, d, result, ErrShape, "dq has shape [2 2 9 16], it must be [2 4 8 16]"},
		{"dtype of dk", k, v, Options{}, Gradients{K: meta(t, f16, 2, 2, 9, 16)}, d, result, ErrDType, "dk is f16"},
		{"no bias", k, v, Options{}, Gradients{Bias: lse}, d, result, ErrOption, "dbias is requested, but the call does not have that option"},
		{"shape of dbias", k, v, Options{Bias: meta(t, f16, 1, 4, 8, 9)}, Gradients{Bias: meta(t, f32, 2, 4, 8, 9)}, d, result, ErrShape, "dbias has shape [2 4 8 9], it must be [1 4 8 9]"},
		{"shape of dalibi", k, v, Options{ALiBi: make([]float32, 8)}, Gradients{ALiBi: meta(t, f32, 1, 4, 1, 1)}, d, result, ErrShape, "dalibi has shape [1 4 1 1], it must be [2 4 1 1]"},
		{"no gradients on the backend", k, v, Options{}, Gradients{Q: q}, d, result, ErrUnsupported, "none has no gradients"},
	} {
		call := must.Get(refusing(t).Prepare(q, c.k, c.v, c.opt))(must.In(t, "%v", c.name))
		if err := call.Backward(t.Context(), c.grads, c.d, c.result); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) || !strings.HasPrefix(err.Error(), "backward: ") {
			t.Errorf("%s: error %v, want %v with %q", c.name, err, c.want, c.says)
		}
	}
}

// noting is a backend that notes the gradients that it should compute.
type noting struct {
	noBackend
	parts []backend.Gradients
}

func (n *noting) Backward(_ context.Context, g *backend.Gradients) error {
	n.parts = append(n.parts, *g)
	return nil
}

func (n *noting) PlanBackward(_ context.Context, g *backend.Gradients) (backend.Plan, error) {
	return backend.NewGradientsPlan(g), nil
}

func (n *noting) Upload(_ context.Context, t Tensor) (Tensor, error) { return t, nil }
func (n *noting) Alloc(_ context.Context, d DType, s Shape) (Tensor, error) {
	return AllocHost(d, s)
}

// Copy copies the only element of src to all of dst.
func (n *noting) Copy(_ context.Context, dst, src []Tensor) error {
	for i := range dst {
		data, err := dst[i].Float32s()
		if err != nil {
			return err
		}
		for j := range data {
			data[j] = 0
		}
	}
	return nil
}

// TestBackwardOfRegions checks which parts of the gradients the backend calls of a call add to.
func TestBackwardOfRegions(t *testing.T) {
	f32 := F32
	host := func(s ...int) Tensor {
		return must.Get(AllocHost(f32, Shape(s)))(t)
	}
	be := &noting{noBackend: noBackend{t: t}}
	// Rows 0 to 1 see keys 0 to 3, rows 2 to 4 keys 4 to 5.
	opt := Options{QSegments: [][]int32{{7, 7, 8, 8, 8}}, KSegments: [][]int32{{7, 7, 7, 7, 8, 8}}, LSE: true,
		Bias: host(1, 1, 5, 1), RelativeBias: host(1, 2, 1, 10), ALiBi: []float32{1, 2}, Sinks: []float32{1, 2}}
	c := must.Get(NewDevice(be).Prepare(host(1, 2, 5, 3), host(1, 1, 6, 3), host(1, 1, 6, 4), opt))(t)
	grads := must.Get(c.AllocGradients(t.Context(), c.Gradients()))(t)
	must.Do(t, c.Backward(t.Context(), grads, Result{O: host(1, 2, 5, 4)}, Result{O: host(1, 2, 5, 4), LSE: host(1, 2, 5, 1)}))
	type part struct {
		shape  Shape
		offset int
	}
	want := [2][7]part{
		{{Shape{1, 2, 2, 3}, 0}, {Shape{1, 1, 4, 3}, 0}, {Shape{1, 1, 4, 4}, 0}, {Shape{1, 1, 2, 1}, 0},
			{Shape{1, 2, 1, 5}, 3}, {Shape{1, 2, 1, 1}, 0}, {Shape{1, 2, 1, 1}, 0}},
		{{Shape{1, 2, 3, 3}, 6}, {Shape{1, 1, 2, 3}, 12}, {Shape{1, 1, 2, 4}, 16}, {Shape{1, 1, 3, 1}, 2},
			{Shape{1, 2, 1, 4}, 4}, {Shape{1, 2, 1, 1}, 0}, {Shape{1, 2, 1, 1}, 0}},
	}
	if len(be.parts) != 2 {
		t.Fatal(len(be.parts), "backend calls, want 2")
	}
	for n, g := range be.parts {
		outputs, _ := g.Operands()
		for i, o := range outputs {
			if got := (part{o.Tensor.Shape(), o.Tensor.Offset()}); got != want[n][i] {
				t.Errorf("call %d: %s is %v, want %v", n, o.Name, got, want[n][i])
			}
		}
		if !g.Add {
			t.Errorf("call %d replaces the gradients", n)
		}
	}
	plan, err := c.PlanBackward(t.Context(), c.Gradients().Operands())
	if want := int64(2*(2*4+3*2)) * 2 * (3*3 + 2*4); err != nil || plan.FLOPs != want {
		t.Errorf("plan %+v, %v, want %d FLOPs", plan, err, want)
	}
	grads.K = grads.Q
	c = must.Get(NewDevice(be).Prepare(host(1, 2, 5, 3), host(1, 2, 5, 3), host(1, 2, 5, 4), Options{QSegments: [][]int32{{7, 7, 8, 8, 8}}}))(t)
	grads = Gradients{Q: grads.Q, K: grads.Q}
	must.Fail(t, "dq and dk in one memory", c.Backward(t.Context(), grads, Result{O: host(1, 2, 5, 4)}, Result{O: host(1, 2, 5, 4), LSE: host(1, 2, 5, 1)}), ErrOverlap)
}
