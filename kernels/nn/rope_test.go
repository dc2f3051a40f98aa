package nn_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"math/big"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

func ExampleRoPE() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	// Three rows of one pair, at positions 0, 1 and 2: rotated by 0, 1 and 2 radians.
	q, err := dev.FromFloat32(ctx, kernels.F32, []float32{1, 0, 1, 0, 1, 0}, kernels.Shape{1, 1, 3, 2})
	if err != nil {
		log.Fatal(err)
	}
	defer q.Release()
	positions, err := nn.Positions(0, 3)
	if err != nil {
		log.Fatal(err)
	}
	angles, err := (&nn.RoPE{}).Angles(ctx, dev, 2, positions)
	if err != nil {
		log.Fatal(err)
	}
	defer angles.Release()
	if err := dev.Rotate(ctx, q, q, angles); err != nil {
		log.Fatal(err)
	}
	x, err := dev.ToFloat32(ctx, q)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", x)
	// Output: [1.000 0.000 0.540 0.841 -0.416 0.909]
}

// twoPi is 2π (OEIS A019692), more digits than any angle here needs.
const twoPi = "6.28318530717958647692528676655900576839433879875021164194988918461563281257241799725606965068423413596"

// TestAnglesFarOut compares angles at positions up to 2^30 with exact ones: with base
// 10,000 and 8 elements θ is 1, 1/10, 1/100 and 1/1000, and t·θ is a fraction that can be
// reduced by 2π without an error.
func TestAnglesFarOut(t *testing.T) {
	dev := onCPU(t)
	turn, ok := new(big.Rat).SetString(twoPi)
	if !ok {
		t.Fatal("2π is not a number")
	}
	ids := []int{0, 1, 999, 16_777_217, 1_000_003, 1 << 30, -1_000_003}
	a := must.Get((&nn.RoPE{}).Angles(t.Context(), dev, 8, [][]int{ids}))(t)
	defer a.Release()
	if a.Cos.Shape() != (kernels.Shape{1, 1, len(ids), 4}) || a.Sin.Shape() != a.Cos.Shape() {
		t.Fatalf("cos is %v, sin %v", a.Cos.Shape(), a.Sin.Shape())
	}
	cos := must.Get(a.Cos.Float32s())(t)
	sin := must.Get(a.Sin.Float32s())(t)
	for i, id := range ids {
		for pair, below := range []int64{1, 10, 100, 1000} {
			angle := big.NewRat(int64(id), below)
			turns := new(big.Rat).Quo(angle, turn)
			whole := new(big.Int).Div(turns.Num(), turns.Denom())
			rest, _ := new(big.Rat).Sub(angle, new(big.Rat).Mul(new(big.Rat).SetInt(whole), turn)).Float64()
			// Rounding to float32, and a float64 angle with an error of 2 ulp.
			far, _ := angle.Float64()
			bound := 0x1p-25 + math.Abs(far)*0x1p-51
			if got, want := float64(cos[4*i+pair]), math.Cos(rest); !(math.Abs(got-want) <= bound) {
				t.Errorf("cos of %v is %v, should be %v", angle, got, want)
			}
			if got, want := float64(sin[4*i+pair]), math.Sin(rest); !(math.Abs(got-want) <= bound) {
				t.Errorf("sin of %v is %v, should be %v", angle, got, want)
			}
		}
	}
}

func TestAnglesRefuse(t *testing.T) {
	dev := onCPU(t)
	five := positionsOf(t, 0, 5)
	for _, c := range []struct {
		name      string
		rope      nn.RoPE
		dim       int
		positions [][]int
		want      error
		text      string
	}{
		{"odd head size", nn.RoPE{}, 7, five, kernels.ErrOption, "dim is 7, it must be even and 2 to the head size 7"},
		{"odd part", nn.RoPE{Dim: 3}, 8, five, kernels.ErrOption, "dim is 3"},
		{"part too large", nn.RoPE{Dim: 10}, 8, five, kernels.ErrOption, "dim is 10, it must be even and 2 to the head size 8"},
		{"negative part", nn.RoPE{Dim: -2}, 8, five, kernels.ErrOption, "dim is -2"},
		{"negative base", nn.RoPE{Base: -1}, 8, five, kernels.ErrOption, "base is -1"},
		{"NaN base", nn.RoPE{Base: math.NaN()}, 8, five, kernels.ErrOption, "base is NaN"},
		{"base that overflows", nn.RoPE{Base: 5e-324}, 128, five, kernels.ErrOption, "base is 5e-324"},
		{"no batch", nn.RoPE{}, 8, nil, kernels.ErrShape, "there are no positions"},
		{"ragged", nn.RoPE{}, 8, [][]int{{1, 2}, {1}}, kernels.ErrShape, "batch 1 has 1 positions, batch 0 has 2"},
		{"too far", nn.RoPE{}, 8, [][]int{{1, 1<<30 + 1}}, kernels.ErrOption, "position 1 of batch 0 is 1073741825"},
	} {
		must.Fail(t, c.name, must.Err(c.rope.Angles(t.Context(), dev, c.dim, c.positions)), c.want, c.text)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", must.Err((&nn.RoPE{}).Angles(done, dev, 8, five)), context.Canceled)
}

func positionsOf(t *testing.T, from, n int) [][]int {
	t.Helper()
	return must.Get(nn.Positions(from, n))(t)
}

// TestPositionsRefuse: more positions than memory holds, and fewer than none, are an error.
func TestPositionsRefuse(t *testing.T) {
	for n, want := range map[int]error{-1: kernels.ErrOption, math.MinInt: kernels.ErrOption, 1 << 50: kernels.ErrMemory, math.MaxInt: kernels.ErrMemory} {
		if positions, err := nn.Positions(0, n); !errors.Is(err, want) || positions != nil {
			t.Errorf("%d rows: error is %v, should be %v", n, err, want)
		}
	}
}
