package fronttest

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// host returns a tensor in host memory.
func host(t *testing.T, dtype kernels.DType, s ...int) kernels.Tensor {
	t.Helper()
	return must.Get(kernels.AllocHost(dtype, kernels.Shape(s)))(t)
}

// refusal is the error of a call, what it must be, and what it must contain.
type refusal struct {
	err, want error
	text      string
}

func refused(t *testing.T, all ...refusal) {
	t.Helper()
	for _, r := range all {
		must.Fail(t, r.text, r.err, r.want, r.text)
	}
}

// plainBackend has none of the optional interfaces.
type plainBackend struct{ backend.Backend }

func TestRotateRefuses(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		be := dev.Backend()
		ctx := t.Context()
		tensor := func(dtype kernels.DType, s ...int) kernels.Tensor {
			x := must.Get(be.Alloc(ctx, dtype, kernels.Shape(s)))(t)
			t.Cleanup(x.Release)
			return x
		}
		f32 := kernels.F32
		x, y, angle := tensor(f32, 2, 3, 5, 8), tensor(f32, 2, 3, 5, 8), tensor(f32, 1, 1, 5, 4)
		good := kernels.Angles{Cos: angle, Sin: tensor(f32, 1, 1, 5, 4)}
		part := must.Get(x.Slice(kernels.Batch, 0, 1))(t)
		other := must.Get(x.View(part.Shape(), part.Strides(), 1))(t)
		for _, c := range []struct {
			name string
			be   backend.Backend
			y, x kernels.Tensor
			a    kernels.Angles
			want error
			text string
		}{
			{"no rotator", plainBackend{be}, y, x, good, kernels.ErrUnsupported, be.Info().Name},
			{"no x", be, y, kernels.Tensor{}, good, kernels.ErrShape, "x is missing"},
			{"no y", be, kernels.Tensor{}, x, good, kernels.ErrShape, "y is missing"},
			{"no angles", be, y, x, kernels.Angles{}, kernels.ErrShape, "cos is missing"},
			{"y's shape", be, part, x, good, kernels.ErrShape, "y has shape [1 3 5 8]"},
			{"y's type", be, tensor(kernels.Bool, 2, 3, 5, 8), x, good, kernels.ErrDType, "y is bool"},
			{"too many pairs", be, y, x, kernels.Angles{Cos: tensor(f32, 1, 1, 5, 5), Sin: angle}, kernels.ErrShape, "rotates 10 elements of a row, rows of x [2 3 5 8] have 8"},
			{"sin's pairs", be, y, x, kernels.Angles{Cos: angle, Sin: tensor(f32, 1, 1, 5, 1)}, kernels.ErrShape, "sin has 1 angles a row, cos has 4"},
			{"cos's rows", be, y, x, kernels.Angles{Cos: tensor(f32, 1, 1, 4, 4), Sin: angle}, kernels.ErrShape, "cos: shape [1 1 4 4] does not broadcast"},
			{"sin's type", be, y, x, kernels.Angles{Cos: angle, Sin: tensor(kernels.F16, 1, 1, 5, 4)}, kernels.ErrDType, "sin is f16"},
			{"overlap", be, other, part, good, kernels.ErrOverlap, "y is written while x is read"},
			{"angles overlap", be, x, x, kernels.Angles{Cos: angle, Sin: view(t, x)}, kernels.ErrOverlap, "sin"},
		} {
			must.Fail(t, c.name, kernels.NewDevice(c.be).Rotate(ctx, c.y, c.x, c.a), c.want, c.text)
		}
	})
}

// view returns angles in the memory of x.
func view(t *testing.T, x kernels.Tensor) kernels.Tensor {
	t.Helper()
	return must.Get(x.View(kernels.Shape{1, 1, 5, 4}, kernels.Strides{0, 0, 4, 1}, 0))(t)
}

func TestNormsAndGatesRefuse(t *testing.T) {
	dev := onCPU(t)
	ctx, f32 := t.Context(), kernels.F32
	x, y, terms, none := host(t, f32, 2, 3, 5, 8), host(t, f32, 2, 3, 5, 8), host(t, f32, 2, 3, 5, 8), kernels.Tensor{}
	short, mask, half := host(t, f32, 2, 3, 4, 8), host(t, kernels.Bool, 2, 3, 5, 8), host(t, kernels.F16, 2, 3, 5, 8)
	part := must.Get(x.Slice(kernels.Batch, 0, 1))(t)
	moved := must.Get(x.View(part.Shape(), part.Strides(), 1))(t)
	norm := func(y, x, w kernels.Tensor) error { return dev.Normalise(ctx, y, x, w, kernels.Norm{}) }
	normBack := func(dx, dw, dy, x kernels.Tensor) error {
		return dev.NormaliseBackward(ctx, dx, dw, dy, x, none, kernels.Norm{})
	}
	refused(t, []refusal{
		{kernels.NewDevice(plainBackend{dev.Backend()}).Normalise(ctx, y, x, none, kernels.Norm{}), kernels.ErrUnsupported, "normalise: cpu has no norms"},
		{kernels.NewDevice(plainBackend{dev.Backend()}).GateBackward(ctx, y, x, x, x, x, kernels.Sigmoid), kernels.ErrUnsupported, "gate backward: cpu has no gates"},
		{norm(y, none, none), kernels.ErrShape, "normalise: x is missing"},
		{norm(short, x, none), kernels.ErrShape, "y has shape [2 3 4 8], it must be [2 3 5 8], the shape of x"},
		{norm(mask, x, none), kernels.ErrDType, "y is bool"},
		{norm(y, x, host(t, f32, 1, 1, 1, 1)), kernels.ErrShape, "w has shape [1 1 1 1], it must be [1 1 1 8], the [1, H or 1, 1, D] of x"},
		{norm(y, x, host(t, f32, 1, 2, 1, 8)), kernels.ErrShape, "w has shape [1 2 1 8], it must be [1 3 1 8]"},
		{norm(y, x, host(t, kernels.Q8, 1, 1, 1, 8)), kernels.ErrDType, "w is q8"},
		{norm(part, moved, none), kernels.ErrOverlap, "y is written while x is read"},
		{norm(x, x, must.Get(x.View(kernels.Shape{1, 1, 1, 8}, x.Strides(), 0))(t)), kernels.ErrOverlap, "y is written while w is read"},
		{normBack(none, terms, y, x), kernels.ErrShape, "normalise backward: dx is missing"},
		{normBack(y, terms, short, x), kernels.ErrShape, "dy has shape"},
		{normBack(y, half, y, x), kernels.ErrDType, "dw is f16"},
		{normBack(y, y, y, x), kernels.ErrOverlap, "dw and dx share memory"},
		{normBack(x, none, y, x), kernels.ErrOverlap, "dx is written while x is read"},
		{dev.Gate(ctx, y, x, none, kernels.Sigmoid), kernels.ErrShape, "gate: gate is missing"},
		{dev.Gate(ctx, y, x, host(t, f32, 1, 3, 5, 1), kernels.Sigmoid), kernels.ErrShape, "gate has shape [1 3 5 1], it must be [2 3 5 1]"},
		{dev.Gate(ctx, y, x, mask, kernels.Sigmoid), kernels.ErrDType, "gate is bool"},
		{dev.Gate(ctx, x, x, x, kernels.Sigmoid), kernels.ErrOverlap, "y is written while gate is read"},
		{dev.GateBackward(ctx, y, none, y, x, x, kernels.Sigmoid), kernels.ErrShape, "gate backward: dgate is missing"},
		{dev.GateBackward(ctx, y, half, y, x, x, kernels.Sigmoid), kernels.ErrDType, "dgate is f16"},
		{dev.Gate(ctx, y, x, x, kernels.Identity+1), kernels.ErrOption, "activation is 4, it must be Sigmoid"},
		{dev.GateBackward(ctx, y, terms, y, x, x, -1), kernels.ErrOption, "gate backward: activation is -1"},
	}...)
	for _, epsilon := range []float64{-1, math.NaN(), math.Inf(1), 1e-40, 1.5} {
		must.Fail(t, "epsilon", dev.Normalise(ctx, y, x, none, kernels.Norm{Epsilon: epsilon}), kernels.ErrOption, "it must be from 2^-100 to 1")
	}
}

func TestLinearAttentionRefuses(t *testing.T) {
	dev := onCPU(t)
	ctx := t.Context()
	f32, mask := kernels.F32, host(t, kernels.Bool, 2, 4, 5, 1)
	call := func(change func(c *kernels.LinearAttention)) error {
		c := kernels.LinearAttention{O: host(t, f32, 2, 4, 5, 6), Q: host(t, f32, 2, 4, 5, 8), K: host(t, f32, 2, 2, 5, 8), V: host(t, f32, 2, 4, 5, 6),
			Decay: host(t, f32, 2, 4, 5, 8), Beta: host(t, f32, 2, 1, 5, 1), PastState: host(t, f32, 2, 4, 8, 6), PresentState: host(t, f32, 2, 4, 8, 6)}
		change(&c)
		return dev.LinearAttention(ctx, c)
	}
	type linear = kernels.LinearAttention
	must.Do(t, call(func(*linear) {}))
	refused(t, []refusal{
		{kernels.NewDevice(plainBackend{dev.Backend()}).LinearAttention(ctx, linear{}), kernels.ErrUnsupported, "linear attention: cpu has no linear attention"},
		{call(func(c *linear) { c.Q = kernels.Tensor{} }), kernels.ErrShape, "linear attention: q is missing"},
		{call(func(c *linear) { c.K = host(t, f32, 2, 2, 5, 7) }), kernels.ErrShape, "they must be [B, Hq, T, K], [B, Hk, T, K] and [B, Hv, T, V]"},
		{call(func(c *linear) { c.V = mask }), kernels.ErrDType, "v is bool"},
		{call(func(c *linear) { c.K = host(t, f32, 2, 3, 5, 8) }), kernels.ErrShape, "4 query heads, 3 key heads and 4 value heads"},
		{call(func(c *linear) { c.K = host(t, f32, 2, 0, 5, 8) }), kernels.ErrShape, "0 key heads"},
		{call(func(c *linear) { c.Q = host(t, f32, 2, 3, 5, 8) }), kernels.ErrShape, "3 query heads"},
		{call(func(c *linear) { c.O = host(t, f32, 2, 2, 5, 6) }), kernels.ErrShape, "o has shape [2 2 5 6], it must be [2 4 5 6]"},
		{call(func(c *linear) { c.Decay = host(t, f32, 2, 4, 5, 2) }), kernels.ErrShape, "decay has shape [2 4 5 2], it must be [2 4 5 8]"},
		{call(func(c *linear) { c.Decay = mask }), kernels.ErrDType, "decay is bool"},
		{call(func(c *linear) { c.Beta = host(t, f32, 2, 2, 5, 1) }), kernels.ErrShape, "beta has shape [2 2 5 1], it must be [2 4 5 1]"},
		{call(func(c *linear) { c.PastState = host(t, kernels.F16, 2, 4, 8, 6) }), kernels.ErrDType, "past state is f16"},
		{call(func(c *linear) { c.PresentState = host(t, f32, 2, 2, 8, 6) }), kernels.ErrShape, "present state has shape [2 2 8 6], it must be [2 4 8 6]"},
		{call(func(c *linear) { c.Scale = float32(math.NaN()) }), kernels.ErrOption, "scale is NaN"},
		{call(func(c *linear) { c.ChunkSize = -1 }), kernels.ErrOption, "chunkSize is -1"},
		{call(func(c *linear) { c.CuQ = []int{0, 5} }), kernels.ErrShape, "2 batches, packed sequences (cuQ) have 1"},
		{call(func(c *linear) { c.V = c.O }), kernels.ErrOverlap, "o is written while v is read"},
		{call(func(c *linear) {
			c.PresentState = must.Get(c.PastState.View(c.PastState.Shape(), kernels.Strides{192, 48, 1, 8}, 0))(t)
		}), kernels.ErrOverlap, "present state is written while past state is read"},
	}...)
	one := func(cuQ ...int) error {
		return dev.LinearAttention(ctx, linear{O: host(t, f32, 1, 1, 5, 6), Q: host(t, f32, 1, 1, 5, 8), K: host(t, f32, 1, 1, 5, 8), V: host(t, f32, 1, 1, 5, 6), CuQ: cuQ})
	}
	must.Fail(t, "cuQ of 1", one(0), kernels.ErrShape, "cuQ has 1 entries")
	must.Fail(t, "cuQ too short", one(0, 4), kernels.ErrOption, "cuQ[1] is 4, there are 5 tokens")
	must.Fail(t, "cuQ that falls", one(0, 5, 3), kernels.ErrOption, "cuQ[2] is 3, after 5")
}

func TestCausalConvRefuses(t *testing.T) {
	dev := onCPU(t)
	ctx := t.Context()
	f32 := kernels.F32
	type conv = kernels.CausalConv
	call := func(change func(c *conv)) error {
		c := conv{Y: host(t, f32, 2, 1, 5, 6), X: host(t, f32, 2, 1, 5, 6), W: host(t, f32, 1, 1, 4, 6), Bias: host(t, f32, 1, 1, 1, 6),
			PastState: host(t, f32, 2, 1, 3, 6), PresentState: host(t, f32, 2, 1, 3, 6)}
		change(&c)
		return dev.CausalConv(ctx, c)
	}
	must.Do(t, call(func(*conv) {}))
	refused(t, []refusal{
		{kernels.NewDevice(plainBackend{dev.Backend()}).CausalConv(ctx, conv{}), kernels.ErrUnsupported, "causal convolution: cpu has no convolutions"},
		{call(func(c *conv) { c.X = kernels.Tensor{} }), kernels.ErrShape, "causal convolution: x is missing"},
		{call(func(c *conv) { c.X = host(t, f32, 2, 2, 5, 6) }), kernels.ErrShape, "x has shape [2 2 5 6] and w [1 1 4 6]: they must be [B, 1, S, Ch] and [1, 1, W, Ch] with W from 1 to 64"},
		{call(func(c *conv) { c.W = host(t, f32, 1, 1, 65, 6) }), kernels.ErrShape, "w [1 1 65 6]"},
		{call(func(c *conv) { c.W = host(t, f32, 1, 1, 0, 6) }), kernels.ErrShape, "w [1 1 0 6]"},
		{call(func(c *conv) { c.W = host(t, f32, 1, 1, 4, 1) }), kernels.ErrShape, "w has shape [1 1 4 1], it must be [1 1 4 6], the [1, 1, W, Ch] of x"},
		{call(func(c *conv) { c.W = host(t, kernels.Bool, 1, 1, 4, 6) }), kernels.ErrDType, "w is bool"},
		{call(func(c *conv) { c.Y = host(t, f32, 2, 1, 4, 6) }), kernels.ErrShape, "y has shape [2 1 4 6], it must be [2 1 5 6], the shape of x"},
		{call(func(c *conv) { c.Bias = host(t, f32, 1, 1, 1, 1) }), kernels.ErrShape, "bias has shape [1 1 1 1], it must be [1 1 1 6]"},
		{call(func(c *conv) { c.PastState = host(t, f32, 2, 1, 4, 6) }), kernels.ErrShape, "past state has shape [2 1 4 6], it must be [2 1 3 6], the [N, 1, W-1, Ch] of sequences, w and x"},
		{call(func(c *conv) { c.PresentState = host(t, kernels.Bool, 2, 1, 3, 6) }), kernels.ErrDType, "present state is bool"},
		{call(func(c *conv) { c.CuQ = []int{0, 5} }), kernels.ErrShape, "2 batches, packed sequences (cuQ) have 1"},
		{call(func(c *conv) { c.Y = c.X }), kernels.ErrOverlap, "y is written while x is read"},
		{call(func(c *conv) {
			c.PresentState = must.Get(c.PastState.View(c.PastState.Shape(), kernels.Strides{18, 18, 1, 3}, 0))(t)
		}), kernels.ErrOverlap, "present state is written while past state is read"},
	}...)
}

func TestIndexRefuses(t *testing.T) {
	dev := onCPU(t)
	ctx := t.Context()
	f32, none := kernels.F32, kernels.Tensor{}
	q, k, w := host(t, f32, 2, 3, 5, 8), host(t, f32, 2, 1, 9, 8), host(t, f32, 2, 1, 5, 3)
	released := host(t, f32, 2, 1, 9, 8)
	released.Release()
	index := func(q, k, w kernels.Tensor, n int, opt kernels.Options) error {
		return must.Err(dev.Index(ctx, q, k, w, n, opt))
	}
	type options = kernels.Options
	must.Do(t, index(q, k, w, 4, options{Causal: true, Align: kernels.LowerRight, KLen: []int{9, 3}, Offset: []int{0, -6}, Window: &kernels.Window{Left: 2}}))
	refused(t, []refusal{
		{must.Err(kernels.NewDevice(plainBackend{dev.Backend()}).Index(ctx, q, k, w, 4, options{})), kernels.ErrUnsupported, "index: cpu has no index scores"},
		{index(q, k, w, 0, options{}), kernels.ErrOption, "index: n is 0, it must be at least 1"},
		{index(none, k, w, 4, options{}), kernels.ErrShape, "index: q is missing"},
		{index(q, host(t, kernels.Q8, 2, 1, 9, 8), w, 4, options{}), kernels.ErrDType, "k is q8"},
		{index(q, host(t, f32, 2, 3, 9, 8), w, 4, options{}), kernels.ErrShape, "q has 3 heads and k 3, they must have at least 1 and 1"},
		{index(host(t, f32, 2, 0, 5, 8), k, w, 4, options{}), kernels.ErrShape, "q has 0 heads and k 1"},
		{index(q, host(t, f32, 1, 1, 9, 8), w, 4, options{}), kernels.ErrShape, "batches differ"},
		{index(q, host(t, f32, 2, 1, 9, 7), w, 4, options{}), kernels.ErrShape, "k [2 1 9 7] has head size 7"},
		{index(q, k, none, 4, options{}), kernels.ErrShape, "w is missing"},
		{index(q, k, host(t, f32, 2, 3, 5, 1), 4, options{}), kernels.ErrShape, "w has shape [2 3 5 1], it must be [2 1 5 3], the [B, 1, Sq, Hi] of q"},
		{index(q, k, host(t, kernels.Bool, 2, 1, 5, 3), 4, options{}), kernels.ErrDType, "w is bool"},
		{index(q, k, w, 4, options{KLen: []int{9}}), kernels.ErrShape, "klen has 1 elements"},
		{index(q, k, w, 4, options{KLen: []int{9, 10}}), kernels.ErrOption, "klen[1] is 10"},
		{index(q, k, w, 4, options{Scale: new(1.0)}), kernels.ErrUnsupported, "Scale is set, but index scores have no such option"},
		{index(q, released, w, 4, options{}), kernels.ErrReleased, "index: k"},
	}...)
}
