package kernels_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"math/big"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

func ExampleRotate() {
	ctx := context.Background()
	be, err := backend.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer be.Close()
	// Three rows of one pair, at positions 0, 1 and 2: turned by 0, 1 and 2 radians.
	q, err := kernels.FromFloat32(ctx, be, backend.F32, []float32{1, 0, 1, 0, 1, 0}, backend.Shape{1, 1, 3, 2})
	if err != nil {
		log.Fatal(err)
	}
	defer q.Release()
	angles, err := kernels.RoPE{}.Angles(ctx, be, 2, kernels.Positions(0, 3))
	if err != nil {
		log.Fatal(err)
	}
	defer angles.Release()
	if err := kernels.Rotate(ctx, be, q, q, angles); err != nil {
		log.Fatal(err)
	}
	x, err := kernels.Float32s(ctx, be, q)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", x)
	// Output: [1.000 0.000 0.540 0.841 -0.416 0.909]
}

// twoPi is 2π (OEIS A019692), more digits than any angle here needs.
const twoPi = "6.28318530717958647692528676655900576839433879875021164194988918461563281257241799725606965068423413596"

// TestAnglesFarOut holds angles at positions up to 2^30 against exact ones: with base
// 10,000 and 8 elements θ is 1, 1/10, 1/100 and 1/1000, so that t·θ is a fraction and
// can be reduced by 2π without an error.
func TestAnglesFarOut(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	turn, ok := new(big.Rat).SetString(twoPi)
	if !ok {
		t.Fatal("2π is no number")
	}
	ids := []int{0, 1, 999, 16_777_217, 1_000_003, 1 << 30, -1_000_003}
	a, err := kernels.RoPE{}.Angles(t.Context(), be, 8, [][]int{ids})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Release()
	if a.Cos.Shape() != (backend.Shape{1, 1, len(ids), 4}) || a.Sin.Shape() != a.Cos.Shape() {
		t.Fatalf("cos is %v, sin %v", a.Cos.Shape(), a.Sin.Shape())
	}
	cos, err := a.Cos.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	sin, err := a.Sin.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	for i, id := range ids {
		for pair, below := range []int64{1, 10, 100, 1000} {
			angle := big.NewRat(int64(id), below)
			turns := new(big.Rat).Quo(angle, turn)
			whole := new(big.Int).Div(turns.Num(), turns.Denom())
			rest, _ := new(big.Rat).Sub(angle, new(big.Rat).Mul(new(big.Rat).SetInt(whole), turn)).Float64()
			// Rounding to float32, and a float64 angle that errs by 2 ulp.
			far, _ := angle.Float64()
			bound := 0x1p-25 + math.Abs(far)*0x1p-51
			if got, want := float64(cos[4*i+pair]), math.Cos(rest); math.Abs(got-want) > bound {
				t.Errorf("cos of %v is %v, should be %v", angle, got, want)
			}
			if got, want := float64(sin[4*i+pair]), math.Sin(rest); math.Abs(got-want) > bound {
				t.Errorf("sin of %v is %v, should be %v", angle, got, want)
			}
		}
	}
}

func TestAnglesRefuse(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	five := kernels.Positions(0, 5)
	for _, c := range []struct {
		name      string
		rope      kernels.RoPE
		dim       int
		positions [][]int
		want      error
		says      string
	}{
		{"odd head size", kernels.RoPE{}, 7, five, backend.ErrOption, "7 of 7 elements"},
		{"odd part", kernels.RoPE{Dim: 3}, 8, five, backend.ErrOption, "3 of 8 elements"},
		{"part too large", kernels.RoPE{Dim: 10}, 8, five, backend.ErrOption, "10 of 8 elements"},
		{"negative part", kernels.RoPE{Dim: -2}, 8, five, backend.ErrOption, "-2 of 8 elements"},
		{"negative base", kernels.RoPE{Base: -1}, 8, five, backend.ErrOption, "base is -1"},
		{"NaN base", kernels.RoPE{Base: math.NaN()}, 8, five, backend.ErrOption, "base is NaN"},
		{"base that overflows", kernels.RoPE{Base: 5e-324}, 128, five, backend.ErrOption, "base is 5e-324"},
		{"no batch", kernels.RoPE{}, 8, nil, backend.ErrShape, "no positions"},
		{"no rows", kernels.RoPE{}, 8, kernels.Positions(0, -1), backend.ErrShape, "no positions"},
		{"ragged", kernels.RoPE{}, 8, [][]int{{1, 2}, {1}}, backend.ErrShape, "batch 1 has 1 positions, batch 0 has 2"},
		{"too far", kernels.RoPE{}, 8, [][]int{{1, 1<<30 + 1}}, backend.ErrOption, "position 1 of batch 0 is 1073741825"},
	} {
		if _, err := c.rope.Angles(t.Context(), be, c.dim, c.positions); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, c.want, c.says)
		}
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (kernels.RoPE{}).Angles(done, be, 8, five); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// plainBackend has none of the optional interfaces.
type plainBackend struct{ backend.Backend }

func TestRotateRefuses(t *testing.T) {
	each(t, func(t *testing.T, be backend.Backend) {
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
			says string
		}{
			{"no rotator", plainBackend{be}, y, x, good, backend.ErrUnsupported, be.Info().Name},
			{"no x", be, y, backend.Tensor{}, good, backend.ErrShape, "x is missing"},
			{"no y", be, backend.Tensor{}, x, good, backend.ErrShape, "y is missing"},
			{"no angles", be, y, x, kernels.Angles{}, backend.ErrShape, "cos is missing"},
			{"y's shape", be, part, x, good, backend.ErrShape, "y has shape [1 3 5 8]"},
			{"y's type", be, tensor(backend.Bool, 2, 3, 5, 8), x, good, backend.ErrDType, "y is bool"},
			{"too many pairs", be, y, x, kernels.Angles{Cos: tensor(f32, 1, 1, 5, 5), Sin: angle}, backend.ErrShape, "turns 10 elements, rows of x [2 3 5 8] have 8"},
			{"sin's pairs", be, y, x, kernels.Angles{Cos: angle, Sin: tensor(f32, 1, 1, 5, 1)}, backend.ErrShape, "sin has 1 angles a row, cos has 4"},
			{"cos's rows", be, y, x, kernels.Angles{Cos: tensor(f32, 1, 1, 4, 4), Sin: angle}, backend.ErrShape, "cos: shape [1 1 4 4] does not broadcast"},
			{"sin's type", be, y, x, kernels.Angles{Cos: angle, Sin: tensor(backend.F16, 1, 1, 5, 4)}, backend.ErrDType, "sin is f16"},
			{"overlap", be, other, part, good, backend.ErrOverlap, "y is written while x is read"},
			{"angles overlap", be, x, x, kernels.Angles{Cos: angle, Sin: view(t, x)}, backend.ErrOverlap, "sin"},
		} {
			if err := kernels.Rotate(ctx, c.be, c.y, c.x, c.a); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, c.want, c.says)
			}
		}
	})
}

// view cuts angles out of x.
func view(t *testing.T, x backend.Tensor) backend.Tensor {
	t.Helper()
	y, err := x.View(backend.Shape{1, 1, 5, 4}, backend.Strides{0, 0, 4, 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return y
}
