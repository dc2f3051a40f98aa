package bench

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// operands are a case's tensors on a device with its prepared call.
type operands struct {
	dev  *kernels.Device
	c    call
	call *kernels.Call
	// bias is zero without a mask.
	q, k, v, bias kernels.Tensor
	// out.Weights holds scores, then weights; it is zero in variants that store none.
	out kernels.Result
	// Of Backward: a drawn gradient of the output, and what is measured.
	dO    kernels.Tensor
	grads kernels.Gradients
}

// load draws Q, K, V, the mask and dO from the standard normal distribution, uploads them,
// allocates the outputs and prepares the call. The caller releases the operands.
func (c call) load(ctx context.Context, dev *kernels.Device, seed uint64) (op *operands, err error) {
	op = &operands{dev: dev, c: c}
	defer func() {
		if err != nil {
			op.release()
		}
	}()
	s := c.shapes()
	dtype, cached := c.Types()
	for i, in := range []struct {
		t     *kernels.Tensor
		shape kernels.Shape
		dtype kernels.DType
		skip  bool
	}{{&op.q, s.q, dtype, false}, {&op.k, s.k, cached, false}, {&op.v, s.k, cached, false}, {&op.bias, s.mask, kernels.F32, c.Mask == ""},
		{&op.dO, s.q, dtype, c.Variant != report.Backward}} {
		if in.skip {
			continue
		}
		// Each operand has its own stream: its numbers do not depend on the size of another.
		data, err := normals(ctx, rand.New(rand.NewPCG(seed, uint64(i))), in.shape.Elements())
		if err != nil {
			return op, err
		}
		if *in.t, err = dev.FromFloat32(ctx, in.dtype, data, in.shape); err != nil {
			return op, err
		}
	}
	if op.call, err = dev.Prepare(op.q, op.k, op.v, c.options(op.bias)); err != nil {
		return op, err
	}
	return op, op.renew(ctx)
}

// normals draws n standard normal numbers.
func normals(ctx context.Context, r *rand.Rand, n int) ([]float32, error) {
	data, err := kernels.Make[float32](n)
	if err != nil {
		return nil, err
	}
	for i := range data {
		if i%(1<<20) == 0 && ctx.Err() != nil { // every 10 ms or so
			return nil, ctx.Err()
		}
		data[i] = float32(r.NormFloat64())
	}
	return data, nil
}

// renew allocates new outputs in place of those that were written.
func (op *operands) renew(ctx context.Context) error {
	if op.c.Variant == report.Backward {
		grads, err := op.call.AllocGradients(ctx, op.call.Gradients().Operands())
		if err != nil {
			return err
		}
		op.grads.Release()
		op.grads = grads
		if !op.out.O.IsZero() { // the results of the forward pass stay, they are inputs
			return nil
		}
	}
	out, err := op.call.Alloc(ctx)
	if err != nil {
		return err
	}
	op.out.O.Release()
	op.out.O, op.out.LSE = out.O, out.LSE
	// The input of a single later stage stays.
	if keep := op.c.Variant == report.Softmax || op.c.Variant == report.PV; !op.c.stored() || keep && !op.out.Weights.IsZero() {
		return nil
	}
	op.out.Weights.Release()
	op.out.Weights, err = op.dev.Alloc(ctx, kernels.F32, op.c.shapes().w)
	return err
}

// inputs returns the operands of another variant with op's inputs and without outputs.
func (op *operands) inputs(variant string) *operands {
	other := &operands{dev: op.dev, c: op.c, call: op.call, q: op.q, k: op.k, v: op.v, bias: op.bias}
	other.c.Variant = variant
	return other
}

func (op *operands) release() {
	op.releaseOutputs()
	for _, t := range []*kernels.Tensor{&op.q, &op.k, &op.v, &op.bias, &op.dO} {
		t.Release()
	}
}

func (op *operands) releaseOutputs() {
	op.out.Release()
	op.grads.Release()
}

// parts are the variants that are a single stage, in their order.
var parts = []string{report.QK, report.Softmax, report.PV}

// stages runs some of parts, the softmax in place.
func (op *operands) stages(ctx context.Context, names ...string) error {
	for _, name := range names {
		var err error
		switch name {
		case report.QK:
			err = op.dev.Backend().QK(ctx, op.out.Weights, op.q, op.k)
		case report.Softmax:
			opt := op.c.options(op.bias)
			opt.LowPrecision = false // which stages refuse
			opt.Scale = new(1 / math.Sqrt(float64(op.c.Dim)))
			err = op.dev.Softmax(ctx, op.out.Weights, kernels.Tensor{}, opt)
		case report.PV:
			err = op.dev.Backend().PV(ctx, op.out.O, op.out.Weights, op.v)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// run runs the case's variant once, to its completion.
func (op *operands) run(ctx context.Context) error {
	var err error
	switch {
	case op.c.stored():
		err = op.stages(ctx, op.c.stages()...)
	case op.c.Variant == report.Backward:
		err = op.call.Backward(ctx, op.grads, kernels.Result{O: op.dO}, op.out)
	default:
		err = op.call.RunInto(ctx, op.out)
	}
	if err != nil {
		return err
	}
	return op.dev.Wait(ctx)
}

// before runs what the variant's first call needs: stages, or the forward pass.
func (op *operands) before(ctx context.Context) error {
	if op.c.Variant == report.Backward {
		return op.call.RunInto(ctx, op.out)
	}
	return op.stages(ctx, parts[:max(slices.Index(parts, op.c.Variant), 0)]...)
}

// check completes the attention call by the stages that the variant does not run, and recomputes rows of the result in
// float64, for Backward those of the gradients too. A softmax that was repeated in place starts again from the scores.
func (op *operands) check(ctx context.Context, opt kernels.CheckOptions) (kernels.CheckReport, error) {
	var err error
	switch op.c.Variant {
	case report.QK:
		err = op.stages(ctx, report.Softmax, report.PV)
	case report.Softmax:
		err = op.stages(ctx, parts...)
	}
	if err != nil {
		return kernels.CheckReport{}, err
	}
	check, err := op.call.Check(ctx, op.out, opt)
	if err != nil || op.c.Variant != report.Backward || !check.OK() {
		return check, err
	}
	return op.call.CheckBackward(ctx, op.grads, kernels.Result{O: op.dO}, op.out, opt)
}

// reads returns the operands that a call reads. If a window hides keys from all rows, K
// and V are cut to the number of visible rows: the size decides which cache they fit.
func (op *operands) reads() []kernels.Tensor {
	switch op.c.Variant {
	case report.QK:
		return []kernels.Tensor{op.q, op.k}
	case report.Softmax:
		return []kernels.Tensor{op.out.Weights, op.bias}
	case report.PV:
		return []kernels.Tensor{op.out.Weights, op.v}
	case report.Stages:
		return []kernels.Tensor{op.q, op.k, op.v, op.bias, op.out.Weights}
	}
	seen := func(t kernels.Tensor) kernels.Tensor {
		shape := kernels.Shape{1, 1, op.c.Batch * op.c.KVHeads * op.c.SeenKeys(), op.c.Dim}
		strides, _ := t.DType().Contiguous(shape)
		if view, err := t.View(shape, strides, t.Offset()); err == nil {
			return view
		}
		return t
	}
	read := []kernels.Tensor{op.q, seen(op.k), seen(op.v), op.bias}
	if op.c.Variant == report.Backward {
		read = append(read, op.out.O, op.out.LSE, op.dO)
	}
	return read
}
