package fronttest

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/kernels"
)

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
