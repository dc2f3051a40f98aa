package kernelstest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// poisoned is a backend under test. It fills new memory with NaN, and the outputs of a call before the
// call: an element that no call writes stays NaN, and the comparison finds it. Only a backend that
// implements backend.Copier can be filled.
type poisoned struct {
	backend.Backend
	nan         backend.Tensor // one element
	unsupported []string       // Harness.Unsupported
}

// underTest returns a device that poisons outputs. Closing it closes be.
func (h *Harness) underTest(t testing.TB, be backend.Backend) *kernels.Device {
	t.Helper()
	nan := must(kernels.NewDevice(be).FromFloat32(t.Context(), backend.F32, []float32{float32(math.NaN())}, backend.Shape{1, 1, 1, 1}))(t)
	return kernels.NewDevice(&poisoned{be, nan, h.Unsupported})
}

// implements reports whether the backend of dev implements T. It asks the backend behind poisoned, which
// has every method.
func implements[T any](dev *kernels.Device) bool {
	be := dev.Backend()
	if p, ok := be.(*poisoned); ok {
		be = p.Backend
	}
	_, ok := be.(T)
	return ok
}

// with calls f with p's backend as a T.
func with[T any](p *poisoned, f func(be T) error) error {
	be, ok := p.Backend.(T)
	if !ok {
		return fmt.Errorf("%s is no %T: %w", p.Info().Name, &be, backend.ErrUnsupported)
	}
	return f(be)
}

// fill fills tensors with NaN. It ignores those that it cannot fill, because the call reports them.
func (p *poisoned) fill(ctx context.Context, tensors ...backend.Tensor) {
	c, ok := p.Backend.(backend.Copier)
	for _, t := range tensors {
		if nan, err := p.nan.Broadcast(t.Shape()); ok && err == nil && t.DType() != backend.Bool && t.Shape().Elements() > 0 {
			_ = c.Copy(ctx, []backend.Tensor{t}, []backend.Tensor{nan})
		}
	}
}

func (p *poisoned) Close() error {
	p.nan.Release()
	return p.Backend.Close()
}

func (p *poisoned) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	t, err := p.Backend.Alloc(ctx, dtype, shape)
	if err == nil {
		p.fill(ctx, t)
	}
	return t, err
}

func (p *poisoned) QK(ctx context.Context, s, q, k backend.Tensor) error {
	p.fill(ctx, s)
	return p.Backend.QK(ctx, s, q, k)
}

func (p *poisoned) Softmax(ctx context.Context, s, lse backend.Tensor, problem *backend.Problem) error {
	p.fill(ctx, lse)
	return p.Backend.Softmax(ctx, s, lse, problem)
}

func (p *poisoned) PV(ctx context.Context, o, w, v backend.Tensor) error {
	p.fill(ctx, o)
	return p.Backend.PV(ctx, o, w, v)
}

func (p *poisoned) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		if c.Resume == nil {
			p.fill(ctx, c.O, c.LSE)
		}
	}
	return p.Backend.Attention(ctx, calls...)
}

func (p *poisoned) Backward(ctx context.Context, g *backend.Gradients) error {
	return with(p, func(be backend.Differentiator) error {
		if outputs, _ := g.Operands(); !g.Add {
			for _, o := range outputs {
				p.fill(ctx, o.Tensor)
			}
		}
		return be.Backward(ctx, g)
	})
}

func (p *poisoned) PlanBackward(ctx context.Context, g *backend.Gradients) (plan backend.Plan, err error) {
	err = with(p, func(be backend.Differentiator) error {
		plan, err = be.PlanBackward(ctx, g)
		return err
	})
	return plan, err
}

func (p *poisoned) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	return with(p, func(be backend.Projector) error {
		p.fill(ctx, y)
		return be.Project(ctx, y, x, w, bias)
	})
}

// Rotate, Normalise, Gate and Copy fill nothing that may be in place, or that an earlier copy wrote.

func (p *poisoned) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, how backend.Rotation) error {
	return with(p, func(be backend.Rotator) error { return be.Rotate(ctx, y, x, cos, sin, how) })
}

func (p *poisoned) Normalise(ctx context.Context, y, x, w backend.Tensor, n backend.Norm) error {
	return with(p, func(be backend.Normaliser) error { return be.Normalise(ctx, y, x, w, n) })
}

func (p *poisoned) NormaliseBackward(ctx context.Context, dx, dw, dy, x, w backend.Tensor, n backend.Norm) error {
	return with(p, func(be backend.Normaliser) error {
		p.fill(ctx, dw)
		return be.NormaliseBackward(ctx, dx, dw, dy, x, w, n)
	})
}

func (p *poisoned) Gate(ctx context.Context, y, x, gate backend.Tensor, f backend.Activation) error {
	return with(p, func(be backend.Gater) error { return be.Gate(ctx, y, x, gate, f) })
}

func (p *poisoned) GateBackward(ctx context.Context, dx, dgate, dy, x, gate backend.Tensor, f backend.Activation) error {
	return with(p, func(be backend.Gater) error {
		p.fill(ctx, dgate)
		return be.GateBackward(ctx, dx, dgate, dy, x, gate, f)
	})
}

func (p *poisoned) LinearAttention(ctx context.Context, c *backend.LinearAttention) error {
	return with(p, func(be backend.LinearAttender) error {
		p.fill(ctx, c.O)
		return be.LinearAttention(ctx, c)
	})
}

func (p *poisoned) CausalConv(ctx context.Context, c *backend.CausalConv) error {
	return with(p, func(be backend.Convolver) error {
		p.fill(ctx, c.Y)
		return be.CausalConv(ctx, c)
	})
}

func (p *poisoned) Index(ctx context.Context, c *backend.Index) (keys backend.Tensor, err error) {
	err = with(p, func(be backend.Indexer) error {
		keys, err = be.Index(ctx, c)
		return err
	})
	return keys, err
}

func (p *poisoned) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	return with(p, func(be backend.Copier) error { return be.Copy(ctx, dst, src) })
}

func (p *poisoned) Merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	return with(p, func(be backend.Merger) error { return be.Merge(ctx, o, lse, po, plse) })
}

func (p *poisoned) Scores(ctx context.Context, s backend.Tensor, problem *backend.Problem, at backend.ScorePoint) error {
	return with(p, func(be backend.Scorer) error { return be.Scores(ctx, s, problem, at) })
}

func (p *poisoned) Warmup(ctx context.Context, weights bool, calls ...*backend.Call) error {
	if be, ok := p.Backend.(backend.Warmer); ok {
		return be.Warmup(ctx, weights, calls...)
	}
	return ctx.Err()
}

func (p *poisoned) WarmupBackward(ctx context.Context, g *backend.Gradients) error {
	if be, ok := p.Backend.(backend.Warmer); ok {
		return be.WarmupBackward(ctx, g)
	}
	return ctx.Err()
}

// optionals are the options that Harness.Unsupported may name.
var optionals = []struct {
	name string
	uses func(c *Case) bool
	drop func(c *Case)
	add  func(c *Case)
}{
	{"score mod", func(c *Case) bool { return c.Options.ScoreMod != nil },
		func(c *Case) { c.Options.ScoreMod = nil }, func(c *Case) { c.Options.ScoreMod = placeMod() }},
	{"softcap", func(c *Case) bool { return c.Options.Softcap > 0 },
		func(c *Case) { c.Options.Softcap = 0 }, func(c *Case) { c.Options.Softcap = 2 }},
	{"mask", func(c *Case) bool { return c.MaskShape != backend.Shape{} },
		func(c *Case) { c.MaskShape = backend.Shape{} }, func(c *Case) { c.MaskShape = backend.Shape{1, 1, c.SeqQ, c.SeqK} }},
	{"block mask", func(c *Case) bool { return c.BlockSize > 0 },
		func(c *Case) { c.BlockSize, c.BlockShape = 0, backend.Shape{} }, func(c *Case) { c.BlockSize, c.BlockShape = 16, backend.Shape{1, 1, 1, 1} }},
	{"bias", func(c *Case) bool { return c.BiasShape != backend.Shape{} },
		func(c *Case) { c.BiasShape = backend.Shape{} }, func(c *Case) { c.BiasShape = backend.Shape{1, 1, c.SeqQ, c.SeqK} }},
	{"relative bias", func(c *Case) bool { return c.RelativeShape != backend.Shape{} },
		func(c *Case) { c.RelativeShape = backend.Shape{} }, func(c *Case) { c.RelativeShape = backend.Shape{1, 1, 1, c.SeqQ + c.SeqK - 1} }},
	{"alibi", func(c *Case) bool { return c.Options.ALiBi != nil },
		func(c *Case) { c.Options.ALiBi = nil }, func(c *Case) { c.Options.ALiBi = slopes(c.Heads) }},
	{"sinks", func(c *Case) bool { return c.Options.Sinks != nil },
		func(c *Case) { c.Options.Sinks = nil }, func(c *Case) { c.Options.Sinks = make([]float32, c.Heads) }},
	{"dropout", func(c *Case) bool { return c.Options.Dropout.P > 0 },
		func(c *Case) { c.Options.Dropout.P = 0 }, func(c *Case) { c.Options.Dropout.P = 0.5 }},
	{"pages", func(c *Case) bool { return c.PageSize > 0 },
		func(c *Case) { c.PageSize = 0 }, func(c *Case) { c.PageSize = 16 }},
	{"key indices", func(c *Case) bool { return c.Options.KeyIndices != nil },
		func(c *Case) { c.Options.KeyIndices = nil }, func(c *Case) { *c = chosen(*c, false, 1, 4) }},
	{"q8", func(c *Case) bool { return c.keyType() == backend.Q8 },
		func(c *Case) { c.Keys = nil }, func(c *Case) { c.Keys = new(backend.Q8) }},
	{"q4", func(c *Case) bool { return c.keyType() == backend.Q4 },
		func(c *Case) { c.Keys = nil }, func(c *Case) { c.Keys, c.Dim, c.ValueDim = new(backend.Q4), 32, 32 }},
	{"f8", func(c *Case) bool { return c.keyType() == backend.F8 },
		func(c *Case) { c.Keys = nil }, func(c *Case) { c.Keys = new(backend.F8) }},
}

// lacking reports whether Harness.Unsupported has an option.
func lacking(dev *kernels.Device, option string) bool {
	p, ok := dev.Backend().(*poisoned)
	return ok && slices.Contains(p.unsupported, option)
}

// supported returns c without the options that Harness.Unsupported has.
func supported(dev *kernels.Device, c Case) Case {
	for _, o := range optionals {
		if o.uses(&c) && lacking(dev, o.name) {
			o.drop(&c)
		}
	}
	return c
}

// unsupported returns the first option of c that Harness.Unsupported has, or "".
func unsupported(dev *kernels.Device, c Case) string {
	for _, o := range optionals {
		if o.uses(&c) && lacking(dev, o.name) {
			return o.name
		}
	}
	return ""
}

// needs skips a test of c that Harness.Unsupported excludes.
func needs(t *testing.T, dev *kernels.Device, c Case) {
	t.Helper()
	if name := unsupported(dev, c); name != "" {
		t.Skipf("Harness.Unsupported has %s", name)
	}
}

// needsAll skips a test that needs options which Harness.Unsupported has.
func needsAll(t *testing.T, dev *kernels.Device, options ...string) {
	t.Helper()
	for _, name := range options {
		if lacking(dev, name) {
			t.Skipf("Harness.Unsupported has %s", name)
		}
	}
}

// testUnsupported skips a test for each entry of Harness.Unsupported, and fails for those that the backend supports.
func testUnsupported(t *testing.T, dev *kernels.Device, list []string) {
	for _, name := range list {
		t.Run(name, func(t *testing.T) {
			why := must(refuses(t, dev, name))(t)
			t.Skip(why)
		})
	}
}

// refuses returns why the backend refuses an option, or an error if it does not.
func refuses(t testing.TB, dev *kernels.Device, name string) (why, failure error) {
	var names []string
	for _, o := range optionals {
		names = append(names, o.name)
		if o.name != name {
			continue
		}
		c := Case{Name: name, Dims: dims(1, 2, 1, 5, 9, 8, 8), Seed: 1}
		o.add(&c)
		x, err := dev.Alloc(t.Context(), c.keyType(), backend.Shape{1, 1, 1, 32})
		if errors.Is(err, backend.ErrUnsupported) {
			return err, nil // it does not store the type
		}
		x.Release()
		on := c.build().on(t, dev)
		defer on.release()
		switch _, err := on.run(t, fused); {
		case err == nil:
			return nil, fmt.Errorf("%s supports %s: remove it from Harness.Unsupported", dev.Info().Name, name)
		case !errors.Is(err, backend.ErrUnsupported):
			return nil, fmt.Errorf("%s refuses %s with %w, should be %w", dev.Info().Name, name, err, backend.ErrUnsupported)
		default:
			return err, nil
		}
	}
	return nil, fmt.Errorf("Harness.Unsupported has %q, it may have %s", name, strings.Join(names, ", "))
}
