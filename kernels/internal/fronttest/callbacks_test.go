package fronttest

import (
	"errors"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// modCalls are the calls in which the functions of a score mod run.
func modCalls(t *testing.T, dev *kernels.Device) map[string]func(m *kernels.ScoreMod) error {
	ctx, scale := t.Context(), new(0.25)
	x := upload(t, dev, normal(2*70*16, 1), kernels.Shape{1, 2, 70, 16})
	few := must.Get(x.Slice(kernels.Seq, 0, 3))(t)
	none := func([]float32, kernels.Position) {}
	attend := func(q kernels.Tensor, opt kernels.Options) error {
		r, err := dev.Attention(ctx, q, x, x, opt)
		r.Release()
		return err
	}
	ran := func(m *kernels.ScoreMod) (*kernels.Call, kernels.Result) { // forward, with functions that do not fail
		working := *m
		working.Go, working.Derivative = none, none
		c := prepare(t, dev, x, x, x, kernels.Options{ScoreMod: &working, LSE: true})
		return c, must.Get(c.Run(ctx))(t)
	}
	return map[string]func(m *kernels.ScoreMod) error{
		"tiles":   func(m *kernels.ScoreMod) error { return attend(x, kernels.Options{ScoreMod: m, Causal: true}) },
		"few":     func(m *kernels.ScoreMod) error { return attend(few, kernels.Options{ScoreMod: m}) },
		"weights": func(m *kernels.ScoreMod) error { return attend(few, kernels.Options{ScoreMod: m, Weights: true}) },
		"packed":  func(m *kernels.ScoreMod) error { return attend(x, kernels.Options{ScoreMod: m, CuQ: []int{0, 9, 70}}) },
		"softmax": func(m *kernels.ScoreMod) error {
			s := must.Get(dev.QK(ctx, few, x))(t)
			return dev.Softmax(ctx, s, kernels.Tensor{}, kernels.Options{Scale: scale, ScoreMod: m})
		},
		"scores": func(m *kernels.ScoreMod) error {
			_, err := dev.Scores(ctx, few, x, kernels.Biased, kernels.Options{ScoreMod: m})
			return err
		},
		"check": func(m *kernels.ScoreMod) error {
			_, r := ran(m)
			_, err := prepare(t, dev, x, x, x, kernels.Options{ScoreMod: m, LSE: true}).Check(ctx, r, kernels.CheckOptions{})
			return err
		},
		"backward": func(m *kernels.ScoreMod) error {
			_, r := ran(m)
			c := prepare(t, dev, x, x, x, kernels.Options{ScoreMod: m, LSE: true})
			grads := must.Get(c.AllocGradients(ctx, c.Gradients()))(t)
			return c.Backward(ctx, grads, kernels.Result{O: x}, r)
		},
		"backward, derivative": func(m *kernels.ScoreMod) error {
			c, r := ran(m)
			grads := must.Get(c.AllocGradients(ctx, c.Gradients()))(t)
			d := *m
			d.Go = none
			return prepare(t, dev, x, x, x, kernels.Options{ScoreMod: &d, LSE: true}).Backward(ctx, grads, kernels.Result{O: x}, r)
		},
	}
}

// TestScoreModFails: a panic in a function of the program is a short error that names the function and the place, not a
// defect of this module, and the next call works.
func TestScoreModFails(t *testing.T) {
	dev := onCPU(t)
	beyond := func(_ []float32, at kernels.Position) { _ = at.Values[7] }
	for name, call := range modCalls(t, dev) {
		err := call(&kernels.ScoreMod{Go: beyond, Derivative: beyond})
		if !errors.Is(err, kernels.ErrCallback) || errors.Is(err, kernels.ErrInternal) {
			t.Errorf("%s: error is %v", name, err)
			continue
		}
		text := err.Error()
		if strings.Contains(text, "\n") || len(text) > 400 || !strings.Contains(text, "score mod: github.com/seed90331342/attn/kernels/internal/fronttest.TestScoreModFails.func1 panicked at callbacks_test.go:") ||
			!strings.Contains(text, "index out of range [7] with length 0") {
			t.Errorf("%s: the message is %q", name, text)
		}
		err = call(&kernels.ScoreMod{Go: inner, Derivative: inner})
		if text := err.Error(); !strings.Contains(text, "fronttest.inner panicked at") || !strings.Contains(text, " in strings.Repeat: ") {
			t.Errorf("%s: a panic in a function that the score mod calls: %q", name, text)
		}
		nothing := func([]float32, kernels.Position) {}
		must.Do(t, call(&kernels.ScoreMod{Go: nothing, Derivative: nothing}))
	}
}

func inner([]float32, kernels.Position) { _ = strings.Repeat("-", -1) }

// TestCallbackSlices: the slices that functions of the program receive have no room behind them, where an append would
// write to what is not theirs.
func TestCallbackSlices(t *testing.T) {
	dev := onCPU(t)
	spare := func(name string, s []float32) {
		if cap(s) > len(s) {
			t.Errorf("%s: a slice of %d elements has room for %d", name, len(s), cap(s))
		}
	}
	for name, call := range modCalls(t, dev) {
		f := func(s []float32, at kernels.Position) { spare(name, s); spare(name, at.Values) }
		must.Do(t, call(&kernels.ScoreMod{Go: f, Derivative: f, Values: make([]float32, 3, 9)}))
	}
	x := upload(t, dev, normal(2*70*16, 1), kernels.Shape{1, 2, 70, 16})
	must.Do(t, dev.EachWeightRow(t.Context(), x, x, kernels.WeightRange{Rows: [2]int{0, 70}, Keys: [2]int{3, 60}}, kernels.Options{},
		func(_, _ int, w []float32) { spare("EachWeightRow", w) }))
}
