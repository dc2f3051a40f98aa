package backendtest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// testRotate compares rotated rows with float64: in both conventions, every type and
// layout, whole and partial, in place and not.
func testRotate(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Rotator](dev) {
		t.Logf("%s has no rotary embedding", dev.Info().Name)
		return
	}
	f32, f16, bf16 := backend.F32, backend.F16, backend.BF16
	far := [][]int{{1_000_000, -3, 0, 77, 1 << 29}, {5, 6, 7, 999_999, 12}}
	for i, c := range []rotation{
		{"halves", nn.RoPE{}, f32, f32, Contiguous, 8, positionsOf(0, 5)},
		{"interleaved", nn.RoPE{Interleaved: true}, f32, f32, Contiguous, 8, positionsOf(0, 5)},
		{"smallest", nn.RoPE{}, f32, f32, Padded, 2, positionsOf(3, 5)},
		{"partial, odd head size", nn.RoPE{Dim: 6, Base: 500}, f32, f32, BSHD, 11, positionsOf(40, 5)},
		{"partial interleaved", nn.RoPE{Dim: 10, Interleaved: true}, f32, f32, Transposed, 16, far},
		{"positions of their own, f16", nn.RoPE{}, f16, f16, Padded, 18, far},
		{"bf16", nn.RoPE{Dim: 4, Interleaved: true}, bf16, bf16, Padded, 7, far},
		{"bf16 transposed", nn.RoPE{}, bf16, bf16, Transposed, 6, far},
		{"f16 to f32", nn.RoPE{Dim: 12}, f16, f32, BSHD, 20, far},
		{"f32 to bf16", nn.RoPE{Base: 1e6}, f32, bf16, Padded, 80, far},
		{"several workgroups", nn.RoPE{Dim: 64}, f32, f32, Contiguous, 128, positionsOf(1<<20, 97)},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, dev, uint64(i)) })
	}
}

// rotation is one call of Rotate.
type rotation struct {
	name      string
	rope      nn.RoPE
	in, out   backend.DType
	layout    Layout
	dim       int
	positions [][]int
}

func (c rotation) test(t *testing.T, dev *kernels.Device, seed uint64) {
	const batch, heads = 2, 3
	seq := len(c.positions[0])
	rng := rand.New(rand.NewPCG(seed, 0x726f7065))
	x := drawn(rng, backend.Shape{batch, heads, seq, c.dim}, c.in)
	empty := filled(float32(math.NaN()), x.shape, c.out)
	angles := must(c.rope.Angles(t.Context(), dev, c.dim, c.positions))(t)
	defer angles.Release()
	from, to := put(t, dev, x, c.layout), put(t, dev, empty, c.layout)
	defer from.release()
	defer to.release()
	noError(t, dev.Rotate(t.Context(), to.view, from.view, angles))
	got := to.get(t, dev, "y")
	if err := c.compare(x, got); err != nil {
		t.Error(err)
	}
	c.testInverse(t, dev, to, from.view, got)
	if c.in != c.out {
		return
	}
	noError(t, dev.Rotate(t.Context(), from.view, from.view, angles))
	for i, p := range from.get(t, dev, "x in place") {
		if p != got[i] {
			t.Fatalf("in place element %d is %v, from x to y %v", i, p, got[i])
		}
	}
}

// testInverse compares the inverse rotation by the angles of the negated positions, whose
// cosines and negated sines are the same numbers, with the rotation y.
func (c rotation) testInverse(t *testing.T, dev *kernels.Device, to flat, x backend.Tensor, y []float32) {
	back := make([][]int, len(c.positions))
	for b, positions := range c.positions {
		for _, at := range positions {
			back[b] = append(back[b], -at)
		}
	}
	angles := must(c.rope.Angles(t.Context(), dev, c.dim, back))(t)
	defer angles.Release()
	angles.Inverse = true
	noError(t, dev.Rotate(t.Context(), to.view, x, angles))
	for i, p := range to.get(t, dev, "y of the inverse") {
		if p != y[i] {
			t.Fatalf("element %d is %v by the inverse of the negated angles, %v by the angles", i, p, y[i])
		}
	}
}

// compare compares y with x rotated in float64. A cosine or sine has the error of its
// rounding and of the angle, whose relative error is 4·2^-53 at most (a power, a product
// and the reduction). Products and their sum have one rounding each:
//
//	|y - ref| <= (3u + |t·θ|·2^-51)·(|x_a| + |x_b|) + u_y·|ref| + tiny
//
// Elements that are not rotated are those of x, rounded to y's type.
func (c rotation) compare(x operand, y []float32) error {
	pairs := c.rope.Dim / 2
	if pairs == 0 {
		pairs = c.dim / 2
	}
	base := c.rope.Base
	if base == 0 {
		base = 10000
	}
	tiny := 0x1p-125
	if c.out != backend.F32 {
		tiny += 0x1p-25 // half a subnormal step of f16
	}
	var worst oracle.Worst
	for row := range len(y) / c.dim {
		in := x.data[row*c.dim : (row+1)*c.dim]
		batch, s := row/(x.shape[1]*x.shape[2]), row%x.shape[2]
		at := c.positions[batch%len(c.positions)][s]
		for d := range c.dim {
			got := float64(y[row*c.dim+d])
			name := func() string { return fmt.Sprintf("y[row %d, %d] at position %d", row, d, at) }
			if d >= 2*pairs {
				worst.See(got, float64(c.out.Round(in[d])), 0, name)
				continue
			}
			pair, second := d%pairs, d >= pairs
			a, b := in[pair], in[pair+pairs]
			if c.rope.Interleaved {
				pair, second = d/2, d%2 == 1
				a, b = in[2*pair], in[2*pair+1]
			}
			angle := float64(at) * math.Exp(-float64(pair)/float64(pairs)*math.Log(base))
			ref := float64(a)*math.Cos(angle) - float64(b)*math.Sin(angle)
			if second {
				ref = float64(a)*math.Sin(angle) + float64(b)*math.Cos(angle)
			}
			// The reference's own angle: its logarithm errs by an ulp, times at most 15.
			slack := math.Abs(angle) * (0x1p-51 + 16*0x1p-52)
			bound := (3*u + slack) * (math.Abs(float64(a)) + math.Abs(float64(b)))
			if c.out != backend.F32 {
				bound += c.out.UnitRoundoff() * math.Abs(ref)
			}
			worst.See(got, ref, bound+tiny, name)
		}
	}
	return worst.Err()
}

// positionsOf returns the positions of a few rows.
func positionsOf(from, n int) [][]int {
	positions, err := nn.Positions(from, n)
	if err != nil {
		panic(err) // the suite asks for few
	}
	return positions
}
