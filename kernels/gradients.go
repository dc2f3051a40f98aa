package kernels

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Gradients are the gradients of a loss, in device memory, that [Call.Backward] writes. The zero
// Tensor means that one is not requested.
//
// The same type requests gradients: [Call.AllocGradients], [Call.WarmupBackward] and [Call.PlanBackward] take those
// that are set, with or without memory. [Call.Gradients] returns all that a call has.
type Gradients struct {
	// Q, K and V have the shapes of the operands, and their dtypes or F32.
	Q, K, V Tensor
	// Bias and RelativeBias are F32 and have the shapes of the options: the gradient of a
	// bias that is broadcast along an axis is the sum over that axis.
	Bias, RelativeBias Tensor
	// ALiBi is F32, [1, H, 1, 1] or, with slopes for each of B batches or packed
	// sequences, [B, H, 1, 1]. Sinks is F32 [1, H, 1, 1].
	ALiBi, Sinks Tensor
}

// tensors returns the gradients in the order of the fields.
func (g *Gradients) tensors() [7]*Tensor {
	return [7]*Tensor{&g.Q, &g.K, &g.V, &g.Bias, &g.RelativeBias, &g.ALiBi, &g.Sinks}
}

// Operands returns the gradients of Q, K and V of g alone.
func (g Gradients) Operands() Gradients { return Gradients{Q: g.Q, K: g.K, V: g.V} }

// Release frees all tensors of g.
func (g Gradients) Release() {
	for _, t := range g.tensors() {
		t.Release()
	}
}

// Backward computes the gradients of a loss with respect to the operands and the options of
// the call, from d, the gradients of the loss with respect to the call's results:
//
//	d.O [B, H, Sq, Dv], F32, F16 or BF16    d.LSE [B, H, Sq, 1] F32, or the zero Tensor for 0
//
// result is what Run returned with Options.LSE, or the merged result of calls over disjoint sets of
// keys (see [Device.Merge]). The gradients of K and V are then complete for the keys of this call,
// and those of Q are summed over the calls.
//
// Backward computes the scores again instead of storing them, and needs O(Sq + Sk) memory (Dao
// et al. 2022, FlashAttention, section 3.1). The same call yields the same bits. Pages and int8
// keys have no gradients. With P = exp(min(s - LSE, 0)), w as in [Options], and keep = 1 without dropout:
//
//	P_ij <= 1, also where the float32 LSE is less than a score, as it may be from scores of 2^23 on
//	dP_ij = keep_ij/(1-Dropout.P) · dO_i·v_j
//	dS_ij = P_ij · (dP_ij - dO_i·O_i + dLSE_i)        gradient of the biased score
//	dX_ij = Scale · dS_ij · (1 - tanh²(x_ij)) · f'_ij  x_ij = f(Scale·q_i·k_j)/Softcap, 1 without softcap; f is the ScoreMod
//	dQ_i  = Σ_j dX_ij·k_j    dK_j = Σ_i dX_ij·q_i    dV_j = Σ_i w_ij·dO_i
//
// Errors: ErrShape, ErrDType, ErrOption and ErrUnsupported name the argument and the rule; ErrUnsupported also when
// the device computes no gradients; the others are those of [Device.Attention].
func (c *Call) Backward(ctx context.Context, grads Gradients, d, result Result) (err error) {
	defer op.Annotate(&err, "backward")
	if err := c.checkBackward(&grads, d, result); err != nil {
		return err
	}
	diff, err := need[backend.Differentiator](ctx, c.dev, "gradients")
	if err != nil {
		return err
	}
	if c.whole() {
		g := c.gradients(&c.subs[0], &grads, d, result)
		return diff.Backward(ctx, &g)
	}
	if err := c.distinctGradients(&grads, d, result); err != nil {
		return err
	}
	return c.dev.summed(ctx, &grads, func(sums *Gradients) error {
		for i := range c.subs {
			g := c.gradients(&c.subs[i], sums, d, result)
			g.Add = true
			if err := diff.Backward(ctx, &g); err != nil {
				return err
			}
		}
		if grads.Sinks.IsZero() || c.dims.SeqK > 0 {
			return nil
		}
		return c.dev.withoutKeys(ctx, result.O, result.LSE, c.opt.Sinks, func(own *backend.Call) error {
			return diff.Backward(ctx, &backend.Gradients{Call: *own, DO: d.O, DLSE: d.LSE, DSinks: sums.Sinks, Add: true})
		})
	})
}

// whole reports whether the call is one backend call that writes all elements of the gradients. Otherwise the
// gradients are sums. Slopes of packed sequences without rows and keys are in no backend call.
func (c *Call) whole() bool {
	return len(c.subs) == 1 && c.subs[0].whole && len(c.opt.CuQ) <= 2 && c.opt.KeyIndices == nil
}

// checkBackward checks the arguments of Backward.
func (c *Call) checkBackward(grads *Gradients, d, result Result) error {
	if err := c.ready(); err != nil {
		return err
	}
	switch {
	case c.opt.Pages != nil:
		return fmt.Errorf("keys in pages have no gradients: use contiguous keys instead of Pages: %w", ErrUnsupported)
	case c.opt.onDevice():
		return fmt.Errorf("lists of keys in device memory have no gradients: give KeyIndices.Indices: %w", ErrUnsupported)
	case c.k.DType().Quantised():
		return fmt.Errorf("k is %v, which has no gradients: use f32, f16 or bf16: %w", c.k.DType(), ErrUnsupported)
	case c.opt.ScoreMod != nil && c.opt.ScoreMod.Derivative == nil && c.opt.ScoreMod.WGSLDerivative == "":
		return fmt.Errorf("score mod: Derivative is nil and WGSLDerivative empty, gradients need one: %w", ErrUnsupported)
	case result.LSE.IsZero():
		return fmt.Errorf("the result has no lse, which gradients need: set Options.LSE: %w", ErrOption)
	case !d.Weights.IsZero():
		return fmt.Errorf("weights have no gradients: leave d.Weights empty: %w", ErrUnsupported)
	}
	result.Weights = Tensor{}
	return cmp.Or(c.checkOutputs(result), d.O.CheckShape("d.o", c.shapeOf(c.dims.ValueDim), "shape of o", floats...),
		checkOptional("d.lse", d.LSE, c.shapeOf(1), "shape of lse", F32), c.checkGradients(grads))
}

// gradientRule is what a gradient of a call must be.
type gradientRule struct {
	name   string
	shape  Shape
	of     string // what has this shape
	exists bool
	dtype  DType // or F32
}

// gradientRules returns the rules in the order of [Gradients].
func (c *Call) gradientRules() [7]gradientRule {
	slopes := Shape{1, c.dims.Heads, 1, 1}
	sinks := slopes
	if c.dims.Heads > 0 {
		slopes[Batch] = max(1, len(c.opt.ALiBi)/c.dims.Heads)
	}
	return [7]gradientRule{
		{"dq", c.q.Shape(), "shape of q", true, c.q.DType()},
		{"dk", c.k.Shape(), "shape of k", true, c.k.DType()},
		{"dv", c.v.Shape(), "shape of v", true, c.v.DType()},
		{"dbias", c.opt.Bias.Shape(), "shape of Options.Bias", !c.opt.Bias.IsZero(), F32},
		{"drelativebias", c.opt.RelativeBias.Shape(), "shape of Options.RelativeBias", !c.opt.RelativeBias.IsZero(), F32},
		{"dalibi", slopes, "one for each slope of Options.ALiBi", c.opt.ALiBi != nil, F32},
		{"dsinks", sinks, "one for each of Options.Sinks", c.opt.Sinks != nil, F32},
	}
}

// checkGradients checks the shapes and dtypes of grads.
func (c *Call) checkGradients(grads *Gradients) error {
	all := grads.tensors()
	for i, rule := range c.gradientRules() {
		if !rule.exists && !all[i].IsZero() {
			return fmt.Errorf("%s is requested, but the call does not have that option: %w", rule.name, ErrOption)
		}
		if err := checkOptional(rule.name, *all[i], rule.shape, rule.of, rule.dtype, F32); err != nil {
			return err
		}
	}
	return nil
}

// gradients returns the backward pass of s, which writes its part of grads.
func (c *Call) gradients(s *subcall, grads *Gradients, d, result Result) backend.Gradients {
	g := backend.Gradients{Call: s.Call, DO: s.Rows(d.O), DLSE: s.Rows(d.LSE)}
	g.O, g.LSE = s.Rows(result.O), s.Rows(result.LSE)
	g.DQ, g.DK, g.DV = s.Rows(grads.Q), s.Keys(grads.K, c.dims, false), s.Keys(grads.V, c.dims, false)
	relative := s.Box.Relative(c.dims.SeqQ)
	g.DBias, g.DRelative = s.Part(grads.Bias), relative.Part(grads.RelativeBias)
	heads := s.Box
	if c.packed {
		heads.Lo[Batch], heads.Hi[Batch] = s.sequence, s.sequence+1
	}
	g.DSlopes, g.DSinks = heads.Part(grads.ALiBi), heads.Part(grads.Sinks)
	return g
}

// distinctGradients returns ErrOverlap when gradients overlap inputs or each other: those of
// one backend call may overlap an operand of another one.
func (c *Call) distinctGradients(grads *Gradients, d, result Result) error {
	g := backend.Gradients{Call: *c.all(result), DO: d.O, DLSE: d.LSE, DQ: grads.Q, DK: grads.K, DV: grads.V,
		DBias: grads.Bias, DRelative: grads.RelativeBias, DSlopes: grads.ALiBi, DSinks: grads.Sinks}
	outputs, inputs := g.Operands()
	return backend.Distinct(outputs[:], inputs[:])
}

// summed calls add with grads set to zeros, in F32. Gradients of other dtypes are summed in
// new memory and rounded once.
func (d *Device) summed(ctx context.Context, grads *Gradients, add func(sums *Gradients) error) error {
	sums := *grads
	var rounded, exact []Tensor
	for _, t := range sums.sums() {
		sum, err := d.Alloc(ctx, F32, t.Shape())
		if err != nil {
			return err
		}
		defer sum.Release()
		rounded, exact = append(rounded, *t), append(exact, sum)
		*t = sum
	}
	if err := d.clear(ctx, &sums); err != nil {
		return err
	}
	if err := add(&sums); err != nil || len(exact) == 0 {
		return err
	}
	return d.Copy(ctx, rounded, exact)
}

// clear sets all gradients of g to zeros.
func (d *Device) clear(ctx context.Context, g *Gradients) error {
	zero, err := d.zero(ctx, F32)
	if err != nil {
		return err
	}
	defer zero.Release()
	var dst, src []Tensor
	for _, t := range g.tensors() {
		if t.Shape().Elements() > 0 {
			zeros, _ := zero.Broadcast(t.Shape()) // a single element broadcasts to any shape
			dst, src = append(dst, *t), append(src, zeros)
		}
	}
	return d.Copy(ctx, dst, src)
}

// Gradients returns a request for all gradients of the call: those of q, k and v, in their dtypes, and those of its
// options, in F32. Its tensors have no memory. The request is empty for a call that was not prepared.
func (c *Call) Gradients() (g Gradients) {
	if c.ready() != nil {
		return g
	}
	to := g.tensors()
	for i, rule := range c.gradientRules() {
		if rule.exists {
			*to[i], _ = Meta(rule.dtype, rule.shape) // the shapes of operands are valid
		}
	}
	return g
}

// AllocGradients allocates a tensor for each gradient that want requests, for the caller to Release.
func (c *Call) AllocGradients(ctx context.Context, want Gradients) (g Gradients, err error) {
	defer op.Annotate(&err, "backward")
	if err = c.ready(); err == nil {
		err = c.checkGradients(&want)
	}
	if err != nil {
		return g, err
	}
	to := g.tensors()
	for i, t := range want.tensors() {
		if t.IsZero() {
			continue
		}
		if *to[i], err = c.dev.Alloc(ctx, t.DType(), t.Shape()); err != nil {
			g.Release()
			return Gradients{}, err
		}
	}
	return g, nil
}

// PlanBackward returns how the device would run Backward for the gradients of want, which may be without memory. It
// runs nothing. The gradients of q, k and v take five products where the forward pass takes two, 2.5 times its FLOPs.
func (c *Call) PlanBackward(ctx context.Context, want Gradients) (_ Plan, err error) {
	defer op.Annotate(&err, "plan")
	var sum backend.Plan
	err = c.rehearseBackward(ctx, want, func(diff backend.Differentiator, g *backend.Gradients) error {
		p, err := diff.PlanBackward(ctx, g)
		p.Bytes += sum.Bytes
		p.Add(sum)
		sum = p
		return err
	})
	return Plan(sum), err
}

// WarmupBackward is [Call.Warmup] for Backward with the gradients of want, which may be without memory.
func (c *Call) WarmupBackward(ctx context.Context, want Gradients) (err error) {
	defer op.Annotate(&err, "warmup")
	return c.rehearseBackward(ctx, want, func(diff backend.Differentiator, g *backend.Gradients) error {
		if w, ok := diff.(backend.Warmer); ok {
			return w.WarmupBackward(ctx, g)
		}
		return ctx.Err()
	})
}

// rehearseBackward calls f with the backward passes of the call, without memory for their results.
func (c *Call) rehearseBackward(ctx context.Context, want Gradients, f func(diff backend.Differentiator, g *backend.Gradients) error) error {
	return c.rehearse(ctx, func(be backend.Backend, out Result) (err error) {
		diff, err := op.Need[backend.Differentiator](be, "gradients")
		if err != nil {
			return err
		}
		if out.LSE, err = Meta(F32, c.shapeOf(1)); err != nil {
			return err
		}
		d := Result{O: out.O}
		if err := c.checkBackward(&want, d, out); err != nil {
			return err
		}
		if !c.whole() { // see summed
			for _, t := range want.sums() {
				if *t, err = Meta(F32, t.Shape()); err != nil {
					return err
				}
			}
		}
		for i := range c.subs {
			g := c.gradients(&c.subs[i], &want, d, out)
			g.Add = !c.whole()
			if err := f(diff, &g); err != nil {
				return err
			}
		}
		return nil
	})
}

// sums returns the gradients of g that need a sum in F32 before they are rounded.
func (g *Gradients) sums() []*Tensor {
	return slices.DeleteFunc([]*Tensor{&g.Q, &g.K, &g.V}, func(t *Tensor) bool { return t.IsZero() || t.DType() == F32 })
}
