package kernelstest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// idle is a backend that writes no output.
type idle struct{ *cpu.Backend }

func (idle) QK(_ context.Context, _, _, _ backend.Tensor) error                       { return nil }
func (idle) Softmax(_ context.Context, _, _ backend.Tensor, _ *backend.Problem) error { return nil }
func (idle) PV(_ context.Context, _, _, _ backend.Tensor) error                       { return nil }
func (idle) Attention(context.Context, ...*backend.Call) error                        { return nil }
func (idle) Backward(context.Context, *backend.Gradients) error                       { return nil }
func (idle) Project(_ context.Context, _, _, _, _ backend.Tensor) error               { return nil }

// TestOutputsArePoisoned: what a backend does not write is NaN, whatever the output held.
func TestOutputsArePoisoned(t *testing.T) {
	h := Harness{}
	dev := h.underTest(t, idle{cpu.New(cpu.Options{})})
	defer dev.Close()
	s := backend.Shape{1, 2, 3, 4}
	sums := backend.Shape{1, 2, 3, 1}
	zeros := func(s backend.Shape) backend.Tensor { return up(t, dev, make([]float32, s.Elements()), s) }
	o, lse, dq, scores, pv, y := zeros(s), zeros(sums), zeros(s), zeros(backend.Shape{1, 2, 3, 3}), zeros(s), zeros(s)
	before := zeros(s)
	allocated := must(dev.Alloc(t.Context(), backend.F16, s))(t)
	x, be := zeros(s), dev.Backend()
	c := backend.Call{Q: x, K: x, V: x, O: o, LSE: lse, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
	for _, err := range []error{
		be.Attention(t.Context(), &c),
		be.(backend.Differentiator).Backward(t.Context(), &backend.Gradients{Call: c, DO: x, DQ: dq}),
		be.(backend.Differentiator).Backward(t.Context(), &backend.Gradients{Call: c, DO: x, DQ: before, Add: true}),
		be.QK(t.Context(), scores, x, x),
		be.PV(t.Context(), pv, scores, x),
		be.(backend.Projector).Project(t.Context(), y, x, x, backend.Tensor{}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, out := range map[string]backend.Tensor{"o": o, "lse": lse, "dq": dq, "s of QK": scores, "o of PV": pv, "y": y, "new memory": allocated} {
		if all := read(t, dev, out); slices.ContainsFunc(all, func(x float32) bool { return x == x }) {
			t.Errorf("%s is %v, should be NaN", name, all)
		}
	}
	if all := read(t, dev, before); slices.ContainsFunc(all, func(x float32) bool { return x != 0 }) {
		t.Errorf("dq to which a call adds is %v, should be 0", all)
	}
}

// refusing is the CPU backend without some options.
type refusing struct {
	*cpu.Backend
	options []string
}

func (r refusing) refuse(p *backend.Problem, k backend.Tensor, paged, listed bool) error {
	for name, uses := range map[string]bool{
		"score mod": p.ScoreMod != nil, "softcap": p.Softcap > 0, "mask": !p.Mask.IsZero(), "block mask": !p.Blocks.IsZero(), "bias": !p.Bias.IsZero(), "relative bias": !p.Relative.IsZero(),
		"alibi": p.Slopes != nil, "sinks": p.Sinks != nil, "dropout": p.Dropout.P > 0, "pages": paged, "key indices": listed, "q8": k.DType() == backend.Q8, "q4": k.DType() == backend.Q4, "f8": k.DType() == backend.F8,
	} {
		if uses && slices.Contains(r.options, name) {
			return fmt.Errorf("no %s: %w", name, backend.ErrUnsupported)
		}
	}
	return nil
}

func (r refusing) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		if err := r.refuse(&c.Problem, c.K, c.Pages != nil, c.Listed != nil); err != nil {
			return err
		}
	}
	return r.Backend.Attention(ctx, calls...)
}

func (r refusing) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	if err := r.refuse(p, backend.Tensor{}, false, false); err != nil {
		return err
	}
	return r.Backend.Softmax(ctx, s, lse, p)
}

func (r refusing) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	if err := r.refuse(p, backend.Tensor{}, false, false); err != nil {
		return err
	}
	return r.Backend.Scores(ctx, s, p, at)
}

func (r refusing) Plan(ctx context.Context, calls ...*backend.Call) (backend.Plan, error) {
	for _, c := range calls {
		if err := r.refuse(&c.Problem, c.K, c.Pages != nil, c.Listed != nil); err != nil {
			return backend.Plan{}, err
		}
	}
	return r.Backend.Plan(ctx, calls...)
}

func (r refusing) Backward(ctx context.Context, g *backend.Gradients) error {
	if err := r.refuse(&g.Problem, g.K, g.Pages != nil, g.Listed != nil); err != nil {
		return err
	}
	return r.Backend.Backward(ctx, g)
}

// TestUnsupported: a backend without some options passes the suite with these in Harness.Unsupported.
func TestUnsupported(t *testing.T) {
	var all []string
	for _, o := range optionals {
		all = append(all, o.name)
	}
	for _, options := range [][]string{all, {"sinks"}, {"pages", "softcap"}} {
		if testing.Short() && len(options) < len(all) {
			continue
		}
		t.Run(strings.Join(options, ", "), func(t *testing.T) {
			Run(t, Harness{Unsupported: options, Extent: Extent{Draws: 10, PairsEvery: 12},
				Open: func(testing.TB) backend.Backend { return refusing{cpu.New(cpu.Options{}), options} }})
		})
	}
}

// TestUnsupportedShrinks: an entry of Harness.Unsupported that the backend supports, or that names
// no option, is a failure.
func TestUnsupportedShrinks(t *testing.T) {
	h := Harness{Unsupported: []string{"sinks"}}
	dev := h.underTest(t, refusing{cpu.New(cpu.Options{}), h.Unsupported})
	defer dev.Close()
	for name, want := range map[string]string{
		"sinks": "", "alibi": "cpu supports alibi: remove it from Harness.Unsupported", "pages": "cpu supports pages", "sink": `it may have score mod, softcap, mask,`,
	} {
		why, failure := refuses(t, dev, name)
		if want == "" && (why == nil || failure != nil) || want != "" && (failure == nil || !strings.Contains(failure.Error(), want)) {
			t.Errorf("%s: refused for %v, failure %v, should contain %q", name, why, failure, want)
		}
	}
}

// TestLacksInPlan: the suite names the field that is wrong.
func TestLacksInPlan(t *testing.T) {
	good := kernels.Plan{Backend: "mine", Path: "p", Why: "w", Cut: "c", Bytes: 1}
	for want, spoil := range map[string]func(p *kernels.Plan){
		"": func(*kernels.Plan) {},
		`Backend is "cpu", Info().Name is "mine"`: func(p *kernels.Plan) { p.Backend = "cpu" },
		"Path is empty": func(p *kernels.Plan) { p.Path = "" },
		"Why is empty":  func(p *kernels.Plan) { p.Why = "" },
		"Cut is empty":  func(p *kernels.Plan) { p.Cut = "" },
		"Bytes is 0":    func(p *kernels.Plan) { p.Bytes = 0 },
	} {
		p := good
		spoil(&p)
		if got := lacksInPlan(p, "mine"); got != want {
			t.Errorf("%+v: %q, should be %q", p, got, want)
		}
	}
}
