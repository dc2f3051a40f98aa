package fronttest

import (
	"errors"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// plainBackend has none of the optional interfaces.
type plainBackend struct{ backend.Backend }

func TestRotateRefuses(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		be := dev.Backend()
		ctx := t.Context()
		tensor := func(dtype backend.DType, s ...int) backend.Tensor {
			x, err := be.Alloc(ctx, dtype, backend.Shape(s))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(x.Release)
			return x
		}
		f32 := backend.F32
		x, y, angle := tensor(f32, 2, 3, 5, 8), tensor(f32, 2, 3, 5, 8), tensor(f32, 1, 1, 5, 4)
		good := kernels.Angles{Cos: angle, Sin: tensor(f32, 1, 1, 5, 4)}
		part, err := x.Slice(backend.Batch, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		other, err := x.View(part.Shape(), part.Strides(), 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name string
			be   backend.Backend
			y, x backend.Tensor
			a    kernels.Angles
			want error
			text string
		}{
			{"no rotator", plainBackend{be}, y, x, good, backend.ErrUnsupported, be.Info().Name},
			{"no x", be, y, backend.Tensor{}, good, backend.ErrShape, "x is missing"},
			{"no y", be, backend.Tensor{}, x, good, backend.ErrShape, "y is missing"},
			{"no angles", be, y, x, kernels.Angles{}, backend.ErrShape, "cos is missing"},
			{"y's shape", be, part, x, good, backend.ErrShape, "y has shape [1 3 5 8]"},
			{"y's type", be, tensor(backend.Bool, 2, 3, 5, 8), x, good, backend.ErrDType, "y is bool"},
			{"too many pairs", be, y, x, kernels.Angles{Cos: tensor(f32, 1, 1, 5, 5), Sin: angle}, backend.ErrShape, "rotates 10 elements of a row, rows of x [2 3 5 8] have 8"},
			{"sin's pairs", be, y, x, kernels.Angles{Cos: angle, Sin: tensor(f32, 1, 1, 5, 1)}, backend.ErrShape, "sin has 1 angles a row, cos has 4"},
			{"cos's rows", be, y, x, kernels.Angles{Cos: tensor(f32, 1, 1, 4, 4), Sin: angle}, backend.ErrShape, "cos: shape [1 1 4 4] does not broadcast"},
			{"sin's type", be, y, x, kernels.Angles{Cos: angle, Sin: tensor(backend.F16, 1, 1, 5, 4)}, backend.ErrDType, "sin is f16"},
			{"overlap", be, other, part, good, backend.ErrOverlap, "y is written while x is read"},
			{"angles overlap", be, x, x, kernels.Angles{Cos: angle, Sin: view(t, x)}, backend.ErrOverlap, "sin"},
		} {
			if err := kernels.NewDevice(c.be).Rotate(ctx, c.y, c.x, c.a); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%s: error is %v, should be %v and contain %q", c.name, err, c.want, c.text)
			}
		}
	})
}

// view returns angles in the memory of x.
func view(t *testing.T, x backend.Tensor) backend.Tensor {
	t.Helper()
	y, err := x.View(backend.Shape{1, 1, 5, 4}, backend.Strides{0, 0, 4, 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return y
}
