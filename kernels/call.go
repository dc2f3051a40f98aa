package kernels

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// Result holds the results of an attention call, in device memory.
type Result struct {
	// O is the output, [B, H, Sq, Dv].
	O Tensor
	// LSE is log Σ exp(score) of each row, [B, H, Sq, 1] F32, if requested.
	LSE Tensor
	// Weights are the softmax weights, [B, H, Sq, Sk] F32, if requested.
	Weights Tensor
}

// Release frees all tensors of r.
func (r Result) Release() {
	r.O.Release()
	r.LSE.Release()
	r.Weights.Release()
}

// Attention computes softmax(scale·Q·Kᵀ + bias)·V and allocates the result, for the caller to Release:
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]    v [B, Hkv, Sk, Dv]    O [B, H, Sq, Dv]
//
// Hkv divides H: query head h reads key and value head h/(H/Hkv). q is F32, F16 or BF16, and so is O; k and v have one
// dtype of these, Q8, Q4 or F8. Strides are arbitrary. The fused kernels follow Dao et al. 2022 (FlashAttention).
//
// Errors: ErrShape, ErrDType, ErrOption and ErrUnsupported name the argument and the rule; ErrDevice, ErrReleased,
// ErrMemory, ErrUnsupported, ErrDeviceLost and context errors come from the backend.
func (d *Device) Attention(ctx context.Context, q, k, v Tensor, opt Options) (Result, error) {
	c, err := d.Prepare(q, k, v, opt)
	if err != nil {
		return Result{}, err
	}
	return c.Run(ctx)
}

// Call is a prepared attention call: validated once, it can run any number of times. [Call.Reset] prepares it for
// other operands. A Call is not safe for concurrent use.
type Call struct {
	dev     *Device
	opt     Options
	q, k, v Tensor
	dims    backend.Dims
	packed  bool            // CuQ or CuK is set
	pages   *backend.Pages  // of the options, or nil
	problem backend.Problem // of the whole call, unless sequences are packed
	// subs are the backend calls that compute the call; each row belongs to one.
	subs  []subcall
	calls []*backend.Call // of subs
}

// subcall is the backend call of a region of the scores.
type subcall struct {
	region.Region
	backend.Call
	whole    bool // computes all of the call, as it is
	sequence int  // the packed sequence, or 0
	byRow    bool // each row is a batch, see makeByRow in keyindices.go
}

// Prepare validates an attention call and returns it. The operands may be [Meta] tensors, which Plan and Warmup accept.
// The slices in opt must not change while the Call is used. The errors are the validation errors of [Device.Attention].
func (d *Device) Prepare(q, k, v Tensor, opt Options) (*Call, error) {
	c := &Call{dev: d}
	if err := c.Reset(q, k, v, opt); err != nil {
		return nil, err
	}
	return c, nil
}

// Reset prepares c for another call in place, for example for each step of decoding over a growing
// cache. It validates everything again. Calls that are not divided do not allocate. Errors as for
// [Device.Prepare]. After an error c can only be Reset.
func (c *Call) Reset(q, k, v Tensor, opt Options) (err error) {
	defer op.Annotate(&err, "attention")
	if c == nil {
		return c.ready()
	}
	clear(c.subs) // which would keep other memory reachable
	*c = Call{dev: c.dev, opt: opt, q: q, k: k, v: v, packed: opt.CuQ != nil || opt.CuK != nil, pages: (*backend.Pages)(opt.Pages),
		subs: c.subs[:0], calls: c.calls[:0]}
	c.dims, err = operandDims(q, k, v, c.pages)
	if err == nil && (opt.Weights || c.packed || opt.KeyIndices != nil) { // other calls take all options
		err = c.checkPath(opt.Weights)
	}
	switch {
	case err != nil:
	case c.packed:
		err = c.addSequences()
	default:
		err = c.addAll()
	}
	if err != nil {
		*c = Call{dev: c.dev}
		return err
	}
	for i := range c.subs {
		c.calls = append(c.calls, &c.subs[i].Call)
	}
	return nil
}

// operandDims checks q, k and v and returns the lengths of the call. With pages, k and v are pools of pages.
func operandDims(q, k, v Tensor, pages *backend.Pages) (backend.Dims, error) {
	err := cmp.Or(q.CheckDType("q", floats...), k.CheckDType("k", numbers...), v.CheckDType("v", numbers...))
	c := backend.Call{Q: q, K: k, V: v, Pages: pages}
	d := c.Dims()
	qs, ks, vs := q.Shape(), k.Shape(), v.Shape()
	switch {
	case err != nil:
		return d, err
	case k.DType() != v.DType():
		return d, fmt.Errorf("k is %v, v is %v: they must have one dtype: %w", k.DType(), v.DType(), ErrDType)
	case d.Dim == 0 || d.ValueDim == 0:
		return d, fmt.Errorf("the head sizes of q %v and v %v are %d and %d: both must be at least 1%s: %w", qs, vs, d.Dim, d.ValueDim, cmp.Or(qs.Hint(), vs.Hint()), ErrShape)
	case pages != nil && ks[Batch] != vs[Batch]:
		return d, fmt.Errorf("k %v has %d pages, v %v has %d: they must be equal: %w", ks, ks[Batch], vs, vs[Batch], ErrShape)
	case pages == nil && (ks[Batch] != d.Batch || vs[Batch] != d.Batch):
		return d, fmt.Errorf("batches differ: q %v, k %v, v %v must have the same first length: %w", qs, ks, vs, ErrShape)
	case ks[Dim] != d.Dim:
		return d, fmt.Errorf("k %v has head size %d, q %v has %d: they must be equal: %w", ks, ks[Dim], qs, d.Dim, ErrShape)
	case vs[Heads] != d.KVHeads || vs[Seq] != ks[Seq]:
		return d, fmt.Errorf("v %v and k %v must have the same heads and keys: %w", vs, ks, ErrShape)
	}
	return d, divides(d.Heads, d.KVHeads, "k", "q")
}

func divides(heads, kvHeads int, kv, q string) error {
	if heads > 0 && (kvHeads == 0 || heads%kvHeads != 0) {
		return fmt.Errorf("%s has %d heads, %s has %d: the kv heads must divide the query heads: %w", kv, kvHeads, q, heads, ErrShape)
	}
	return nil
}

// The dtypes of numbers, and of keys and values.
var (
	floats  = []DType{F32, F16, BF16}
	numbers = []DType{F32, F16, BF16, Q8, Q4, F8}
)

// checkPath refuses options that the call cannot have, with or without weights.
func (c *Call) checkPath(weights bool) error {
	set, on := c.opt.Set(), op.Path(0)
	switch {
	case weights && c.k.DType().Quantised():
		return fmt.Errorf("weights are requested, but k is %v, which QK does not take: %w", c.k.DType(), ErrUnsupported)
	case c.packed:
		on = op.PackedPath
	case weights:
		on = op.WeightPath
	}
	if weights { // by an output
		set = append(set, "Weights")
	}
	if c.opt.onDevice() {
		on |= op.ListPath
	}
	return op.CheckPath(set, on)
}

// addAll validates the options and appends the subcalls of a call that is not packed.
func (c *Call) addAll() error {
	p, err := c.opt.problem(c.dims)
	if err != nil {
		return err
	}
	c.problem = p.Problem
	if c.pages != nil {
		if err := c.all(Result{}).CheckPages(); err != nil {
			return err
		}
	}
	if c.opt.KeyIndices != nil {
		if c.opt.onDevice() {
			return c.addLists(&p)
		}
		if p.Lists, err = c.opt.keyLists(c.dims); err != nil {
			return err
		}
	}
	return c.add(&p, c.pages, 0, 0, 0)
}

// add appends the subcalls of p, whose first row and key are row and key of the call; sequence is
// the packed sequence, or 0. all are the pages of p, or nil.
func (c *Call) add(p *region.Problem, all *backend.Pages, sequence, row, key int) error {
	return p.Each(func(x region.Region, own backend.Problem, listed [][]int32) (err error) {
		pages := all
		if all != nil {
			if pages, err = x.PagesOf(all, c.k.Shape()[Seq]); err != nil {
				return err
			}
		}
		x.Lo[Seq], x.Hi[Seq] = x.Lo[Seq]+row, x.Hi[Seq]+row
		x.Lo[region.Key], x.Hi[region.Key] = x.Lo[region.Key]+key, x.Hi[region.Key]+key
		c.subs = append(c.subs, subcall{Region: x, sequence: sequence, whole: x == region.WholeRegion(c.dims)})
		s := &c.subs[len(c.subs)-1]
		s.Problem, s.Pages, s.Listed = own, pages, listed
		s.bind(c)
		return nil
	})
}

// bind sets the inputs of s to its parts of c's.
func (s *subcall) bind(c *Call) {
	if s.whole { // steps of generation are short: slicing takes half a microsecond
		s.Q, s.K, s.V = c.q, c.k, c.v
		return
	}
	paged := s.Pages != nil
	s.Q, s.K, s.V = s.rows(c.q), s.Keys(c.k, c.dims, paged), s.Keys(c.v, c.dims, paged)
	if s.byRow && !paged { // all rows read the keys of one batch
		for _, t := range [2]*Tensor{&s.K, &s.V} {
			shape := t.Shape()
			shape[Batch] = c.dims.SeqQ
			*t, _ = t.Broadcast(shape) // from one batch
		}
	}
}

// rows returns the rows of s of t, as the backend call has them.
func (s *subcall) rows(t Tensor) Tensor {
	if t = s.Rows(t); s.byRow {
		t = rowsAsBatches(t)
	}
	return t
}

// Run computes the call and allocates the result, for the caller to Release.
func (c *Call) Run(ctx context.Context) (Result, error) {
	r, err := c.Alloc(ctx)
	if err == nil {
		err = c.run(ctx, r, nil)
	}
	if err != nil {
		r.Release()
		return Result{}, err
	}
	return r, nil
}

// Alloc allocates the outputs that the call's options request, for [Call.RunInto]. The caller releases them.
func (c *Call) Alloc(ctx context.Context) (r Result, err error) {
	defer op.Annotate(&err, "attention")
	return c.outputs(func(dtype DType, shape Shape) (Tensor, error) { return c.dev.Alloc(ctx, dtype, shape) })
}

// outputs returns the results that the call's options request, made by alloc, or none and an error.
func (c *Call) outputs(alloc func(DType, Shape) (Tensor, error)) (r Result, err error) {
	if err := c.ready(); err != nil {
		return r, err
	}
	request := func(t *Tensor, want bool, dtype DType, last int) {
		switch {
		case !want || err != nil:
		case c.packed: // [total, H, last]
			*t, err = alloc(dtype, BSHD.inMemory(c.shapeOf(last)))
			*t = BSHD.view(*t)
		default:
			*t, err = alloc(dtype, c.shapeOf(last))
		}
	}
	request(&r.O, true, c.q.DType(), c.dims.ValueDim)
	request(&r.LSE, c.opt.LSE, F32, 1)
	request(&r.Weights, c.opt.Weights, F32, c.dims.SeqK)
	if err != nil {
		r.Release()
		return Result{}, err
	}
	return r, nil
}

// shapeOf returns the shape of a tensor with so many elements for each row.
func (c *Call) shapeOf(elements int) Shape {
	return Shape{c.dims.Batch, c.dims.Heads, c.dims.SeqQ, elements}
}

// ready returns an error for a Call that was not prepared.
func (c *Call) ready() error {
	if c == nil || c.q.IsZero() {
		return fmt.Errorf("the call is not prepared, or could not be reset: make it with Prepare: %w", ErrOption)
	}
	return nil
}

// RunInto computes the call into preallocated outputs: out.O, of q's dtype or F32, and out.LSE and out.Weights unless
// they are the zero Tensor. Options.LSE and Options.Weights do not matter. It does not allocate, except for
// [KeyIndices] in a tensor. It returns ErrOverlap when an output shares memory with an input or another output.
func (c *Call) RunInto(ctx context.Context, out Result) error { return c.run(ctx, out, nil) }

// Resume is RunInto that continues a run which ended early, because its device was lost or its
// context was cancelled. [errors.As] finds the [Interrupted] in the error of that run, and from is
// its Partial. The earlier call had the same operands and options; its device may be another one.
//
// ErrOption when from is of another call, ErrUnsupported for weights and for calls that packed
// sequences, a prefix or segments divide into several.
func (c *Call) Resume(ctx context.Context, out Result, from *Partial) error {
	if from == nil || from.Call == "" || from.O.IsZero() {
		return fmt.Errorf("attention: the partial result is empty, it must be the Partial of an Interrupted: %w", ErrOption)
	}
	return c.run(ctx, out, from)
}

// run computes the call into out, and continues from a Partial unless that is nil.
func (c *Call) run(ctx context.Context, out Result, from *Partial) (err error) {
	defer op.Annotate(&err, "attention")
	if err := c.checkOutputs(out); err != nil {
		return err
	}
	defer c.bindOutputs(Result{})
	if region.Empty(c.dims) {
		return c.dev.noKeys(ctx, out.O, out.LSE, c.opt.Sinks)
	}
	c.bindOutputs(out)
	if from != nil {
		if err := c.bindPartial(from, out); err != nil {
			return err
		}
	}
	if len(c.subs) != 1 || !c.subs[0].whole || !out.Weights.IsZero() {
		// The output of a backend call may overlap an operand of another one, which backends do not see.
		outputs, inputs := c.all(out).Operands()
		written := []backend.Operand{outputs[0], outputs[1], {Name: "weights", Tensor: out.Weights}}
		if err := backend.Distinct(written, inputs[:]); err != nil {
			return err
		}
	}
	err = c.dev.attend(ctx, c.calls...)
	if left, ok := errors.AsType[*Interrupted](err); ok && !c.resumable(out) {
		return left.Err
	}
	if err == nil && !out.Weights.IsZero() {
		err = c.runWeights(ctx, out.Weights)
	}
	if err != nil {
		return err
	}
	if rows := int(c.dev.verify.Load()); rows > 0 {
		return c.verify(ctx, out, rows)
	}
	return nil
}

// checkOutputs checks the shapes and dtypes of out.
func (c *Call) checkOutputs(out Result) error {
	if err := c.ready(); err != nil {
		return err
	}
	if err := cmp.Or(out.O.CheckShape("o", c.shapeOf(c.dims.ValueDim), "[B, H, Sq, Dv] of q and v", c.q.DType(), F32),
		checkOptional("lse", out.LSE, c.shapeOf(1), "[B, H, Sq, 1] of q", F32),
		checkOptional("weights", out.Weights, c.shapeOf(c.dims.SeqK), "[B, H, Sq, Sk] of q and k", F32)); err != nil || out.Weights.IsZero() {
		return err
	}
	return c.checkPath(true)
}

// checkOptional is Tensor.CheckShape unless t is the zero Tensor.
func checkOptional(name string, t Tensor, shape Shape, rule string, dtypes ...DType) error {
	if t.IsZero() {
		return nil
	}
	return t.CheckShape(name, shape, rule, dtypes...)
}

// bindOutputs sets the outputs of the subcalls to their parts of out. Those of an empty result
// drop what a run has bound, so that c does not keep its memory reachable.
func (c *Call) bindOutputs(out Result) {
	for i := range c.subs {
		s := &c.subs[i]
		if s.O, s.LSE, s.Resume = out.O, out.LSE, nil; !s.whole {
			s.O, s.LSE = s.rows(out.O), s.rows(out.LSE)
		}
	}
}

// all returns the call with all its operands and outputs, before it is cut.
func (c *Call) all(out Result) *backend.Call {
	x := &backend.Call{Q: c.q, K: c.k, V: c.v, O: out.O, LSE: out.LSE, Problem: c.problem, Pages: c.pages}
	if c.opt.onDevice() {
		x.Lists = c.opt.KeyIndices.Tensor
	}
	return x
}

// resumable reports whether a run of c into out is one backend call, which a Partial of it describes.
func (c *Call) resumable(out Result) bool {
	return len(c.calls) == 1 && !c.packed && !c.opt.onDevice() && out.Weights.IsZero()
}

// bindPartial makes the only backend call of c continue from a Partial of the same call.
func (c *Call) bindPartial(from *Partial, out Result) error {
	if !c.resumable(out) {
		return fmt.Errorf("a call with weights, with lists of keys in device memory, or one that is divided into several, cannot be resumed: %w", ErrUnsupported)
	}
	if is := c.calls[0].Signature(); from.Call != is {
		return fmt.Errorf("the partial result is of another call, %s, this one is %s: %w", from.Call, is, ErrOption)
	}
	c.calls[0].Resume = from
	return nil
}

// runWeights computes the weights, for which a fused call has no memory, by stages into w.
func (c *Call) runWeights(ctx context.Context, w Tensor) error {
	for i := range c.subs {
		s := &c.subs[i]
		err := c.dev.be.QK(ctx, s.Scores(w), s.Q, s.K)
		if err == nil {
			err = c.dev.softmax(ctx, w, Tensor{}, s.Region, &s.Problem)
		}
		if err != nil {
			return fmt.Errorf("weights: %w", err)
		}
	}
	return nil
}

// scoreDims is operandDims for a stage that takes q and k alone, which must not be quantised.
func scoreDims(q, k Tensor) (backend.Dims, error) {
	d, err := operandDims(q, k, k, nil)
	return d, cmp.Or(k.CheckDType("k", floats...), err)
}

// Dims returns the lengths of the call.
func (c *Call) Dims() Dims {
	if c == nil {
		return Dims{}
	}
	return Dims(c.dims)
}
