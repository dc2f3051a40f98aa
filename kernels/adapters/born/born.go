// Package born computes the attention of born's models on a [kernels.Device].
//
//	dev, err := kernels.Open("auto")
//	...
//	attention := attnborn.New[Backend](ctx, dev, nil)
//	model := llama.NewModel(config, backend, llama.WithAttentionFunc(attention))
//
// For query row i and key j of one head, as born's ScaledDotProductAttention:
//
//	s_ij = scale·q_i·k_j + mask_ij    o_i = Σ_j softmax(s_i)_j · v_j
//
//	q [B, H, Sq, D]    k [B, H, Sk, D]    v [B, H, Sk, Dv]    o [B, H, Sq, Dv]
//
// The scores are never stored: memory is O(Sq), where born's function stores B·H·Sq·Sk numbers
// three times. Born repeats the heads of grouped-query attention before it calls the function.
//
// It differs from born's function in three points. It returns no weights. A row whose keys are all hidden yields zeros,
// not NaN. It does not record on a gradient tape, and refuses to run while one records.
package born

import (
	"context"
	"fmt"
	"math"

	"github.com/born-ml/born/autodiff"
	"github.com/born-ml/born/models/llama"
	"github.com/born-ml/born/tensor"
	"github.com/seed90331342/attn/kernels"
)

// New returns a function for llama.WithAttentionFunc that computes attention on dev:
//
//	q [B, H, Sq, D]    k [B, H, Sk, D]    v [B, H, Sk, Dv]    mask: nil, or broadcasts to [B, H, Sq, Sk]
//
// mask is added to the scores; -Inf hides a key. The mask of born's CausalMask becomes the option
// Causal, so that no hidden block is computed. A scale of 0 means 1/sqrt(D). The tensors are in
// host memory: a device that computes there, such as "cpu", reads and writes them without a copy,
// another one transfers q, k, v, mask and o. Calls end early when ctx is cancelled.
//
// Functions of born return no error. New calls fail with it, from the goroutine of the model, and
// returns an output of NaN when fail returns. A nil fail panics with the error, as born does with
// its own. Errors wrap those of package kernels: ErrShape and ErrOption name the argument,
// ErrDevice means a tensor in the memory of a GPU of born, and ErrUnsupported a tape that records.
func New[B tensor.Backend](ctx context.Context, dev *kernels.Device, fail func(error)) llama.AttentionFunc[B] {
	return func(q, k, v, mask *tensor.Tensor[float32, B], scale float32) (*tensor.Tensor[float32, B], *tensor.Tensor[float32, B]) {
		o, err := attention(ctx, dev, q, k, v, mask, scale)
		if err == nil {
			return o, nil
		}
		err = fmt.Errorf("born: %w", err)
		if fail == nil {
			panic(err)
		}
		fail(err)
		if q == nil {
			return nil, nil
		}
		return tensor.Full(q.Shape(), float32(math.NaN()), q.Backend()), nil
	}
}

// attention returns o in new memory of born.
func attention[B tensor.Backend](ctx context.Context, dev *kernels.Device, q, k, v, mask *tensor.Tensor[float32, B], scale float32) (*tensor.Tensor[float32, B], error) {
	named := []operand[B]{{"q", q}, {"k", k}, {"v", v}, {"mask", mask}}
	for _, o := range named[:3] {
		if o.tensor == nil {
			return nil, fmt.Errorf("%s is nil: %w", o.name, kernels.ErrShape)
		}
	}
	if tape, ok := any(q.Backend()).(interface{ Tape() *autodiff.GradientTape }); ok && tape.Tape().IsRecording() {
		return nil, fmt.Errorf("a gradient tape records, but attention is not recorded: run the model in NoGrad: %w", kernels.ErrUnsupported)
	}
	opt := kernels.Options{}
	if scale != 0 {
		opt.Scale = new(float64(scale))
	}
	var operands [4]kernels.Tensor
	if mask == nil || causal(mask.Raw(), q.Shape(), k.Shape()) {
		opt.Causal = mask != nil
		named = named[:3]
	}
	for i, o := range named {
		host, err := o.host()
		if err != nil {
			return nil, err
		}
		if operands[i], err = dev.Upload(ctx, host); err != nil {
			return nil, fmt.Errorf("%s: %w", o.name, err)
		}
		defer operands[i].Release()
	}
	opt.Bias = operands[3]
	call, err := dev.Prepare(operands[0], operands[1], operands[2], opt)
	if err != nil {
		return nil, err
	}

	d := call.Dims()
	result := tensor.Zeros[float32](tensor.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim}, q.Backend())
	host, err := operand[B]{"o", result}.host()
	if err != nil {
		return nil, err
	}
	if operands[0].OnHost() { // the device computes in host memory: o is an alias of the result
		o, err := dev.Upload(ctx, host)
		if err != nil {
			return nil, err
		}
		defer o.Release()
		return result, call.RunInto(ctx, kernels.Result{O: o})
	}
	r, err := call.Run(ctx)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return result, dev.Download(ctx, host, r.O)
}

// operand is a tensor of born with its name in errors.
type operand[B tensor.Backend] struct {
	name   string
	tensor *tensor.Tensor[float32, B]
}

// host returns the tensor's memory as [1, ..., its lengths], without a copy.
func (o operand[B]) host() (kernels.Tensor, error) {
	lengths := o.tensor.Shape()
	switch device := o.tensor.Device(); {
	case device != tensor.CPU:
		return kernels.Tensor{}, fmt.Errorf("%s is in the memory of %v, it must be in host memory: %w", o.name, device, kernels.ErrDevice)
	case len(lengths) > 4 || len(lengths) < 4 && o.name != "mask":
		return kernels.Tensor{}, fmt.Errorf("%s has shape %v, it must be [B, H, S, D]: %w", o.name, lengths, kernels.ErrShape)
	}
	shape := kernels.Shape{1, 1, 1, 1}
	copy(shape[4-len(lengths):], lengths)
	t, err := kernels.HostF32(o.tensor.Data(), shape)
	if err != nil {
		err = fmt.Errorf("%s: %w", o.name, err)
	}
	return t, err
}

// causal reports whether mask is that of born's CausalMask for the scores of q and k: 0 up to the diagonal and -Inf
// after it. The test reads S² numbers, attention with the mask as a bias would read them for each head.
func causal(mask *tensor.RawTensor, q, k tensor.Shape) bool {
	shape := mask.Shape()
	if len(shape) != 4 || shape[0] != 1 || shape[1] != 1 || mask.Device() != tensor.CPU {
		return false
	}
	s := shape[2]
	if shape[3] != s || len(q) != 4 || len(k) != 4 || q[2] != s || k[2] != s {
		return false
	}
	data := mask.AsFloat32()
	for i := range s {
		for j, x := range data[i*s : (i+1)*s] {
			if j <= i && x != 0 || j > i && !math.IsInf(float64(x), -1) {
				return false
			}
		}
	}
	return true
}
