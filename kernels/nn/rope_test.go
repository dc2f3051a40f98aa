package nn_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
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

// TestAnglesFarOut compares angles at positions up to 2^30 with exact ones: with base 10,000 and 8 elements θ is 1,
// 1/10, 1/100 and 1/1000, and t·θ is a fraction that can be reduced by 2π without an error.
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

// times returns n equal factors.
func times(n int, f float64) []float64 { return slices.Repeat([]float64{f}, n) }

// TestScaling compares frequencies and the factor with numbers that were computed in float64 from the
// published formulas, for the configurations of models.
func TestScaling(t *testing.T) {
	dev := onCPU(t)
	phi3 := nn.Scaling{Kind: nn.ScalingLongRoPE, Factor: 32, OriginalMaxPositionEmbeddings: 4096, ShortFactor: times(48, 2), LongFactor: times(48, 4)}
	long, given := phi3, phi3
	long.Length, given.Length, given.AttentionFactor = 4097, 4096, 1.5
	for _, c := range []struct {
		name    string
		dim     int
		rope    nn.RoPE
		scaling nn.Scaling
		want    map[int]float64 // frequencies by pair
		factor  float64
	}{
		{"gpt-oss", 64, nn.RoPE{Base: 150000}, nn.Scaling{Kind: nn.ScalingYaRN, Factor: 32, OriginalMaxPositionEmbeddings: 4096, BetaFast: 32, BetaSlow: 1, NoTruncate: true},
			map[int]float64{8: 0.0508132748, 9: 0.0317056962, 12: 0.00679495949, 17: 1.29318701e-4, 31: 3.02351143e-7}, 1.34657359},
		{"DeepSeek V3", 64, nn.RoPE{Interleaved: true}, nn.Scaling{Kind: nn.ScalingYaRN, Factor: 40, OriginalMaxPositionEmbeddings: 4096, MScale: 1, MScaleAllDim: 1},
			map[int]float64{10: 0.0562341325, 11: 0.0390069266, 16: 0.0055, 22: 1.77827941e-4, 23: 3.33380358e-5, 31: 3.33380358e-6}, 1},
		{"Kimi K2", 64, nn.RoPE{Base: 50000}, nn.Scaling{Kind: nn.ScalingYaRN, Factor: 32, OriginalMaxPositionEmbeddings: 4096, BetaFast: 1, BetaSlow: 1, MScale: 1, MScaleAllDim: 1},
			map[int]float64{18: 0.00227420376, 19: 0.00162175991, 20: 3.61404677e-05, 31: 8.76441291e-07}, 1},
		{"Qwen3 times 4", 128, nn.RoPE{Base: 1e6}, nn.Scaling{Kind: nn.ScalingYaRN, Factor: 4, OriginalMaxPositionEmbeddings: 32768},
			map[int]float64{20: 0.0133352143, 30: 0.00106436098, 40: 4.44569853e-5}, 1.13862944},
		{"Llama 3.1", 128, nn.RoPE{Base: 5e5}, nn.Scaling{Kind: nn.ScalingLlama3, Factor: 8, OriginalMaxPositionEmbeddings: 8192, LowFreqFactor: 1, HighFreqFactor: 4},
			map[int]float64{28: 0.00321144599, 29: 0.00216657076, 30: 0.00137189357, 34: 1.78507813e-4, 35: 9.55621235e-5, 63: 3.06892599e-7}, 1},
		{"Llama 3.2 1B", 64, nn.RoPE{Base: 5e5}, nn.Scaling{Kind: nn.ScalingLlama3, Factor: 32, OriginalMaxPositionEmbeddings: 8192, LowFreqFactor: 1, HighFreqFactor: 4},
			map[int]float64{14: 0.00321144599, 15: 0.00129054793, 16: 4.29556798e-4, 17: 9.70828780e-5, 31: 9.41830673e-8}, 1},
		{"dynamic", 128, nn.RoPE{}, nn.Scaling{Kind: nn.ScalingDynamic, Factor: 2, OriginalMaxPositionEmbeddings: 4096, Length: 8192},
			map[int]float64{0: 1, 32: math.Pow(30527.7367, -0.5), 63: math.Pow(30527.7367, -126./128)}, 1},
		{"dynamic, not longer", 128, nn.RoPE{}, nn.Scaling{Kind: nn.ScalingDynamic, Factor: 2, OriginalMaxPositionEmbeddings: 4096}, map[int]float64{32: 0.01}, 1},
		{"Phi-3, short", 96, nn.RoPE{}, phi3, map[int]float64{0: 0.5, 24: 0.005}, 1.19023807},
		{"Phi-3, long", 96, nn.RoPE{}, long, map[int]float64{0: 0.25, 24: 0.0025}, 1.19023807},
		{"longrope, factor given", 96, nn.RoPE{}, given, map[int]float64{0: 0.5, 24: 0.005}, 1.5},
		{"Gemma 3", 256, nn.RoPE{Base: 1e6}, nn.Scaling{Kind: nn.ScalingLinear, Factor: 8}, map[int]float64{0: 0.125, 64: 1.25e-4}, 1},
		{"Gemma 4", 512, nn.RoPE{Base: 1e6, Dim: 128}, nn.Scaling{Kind: nn.ScalingProportional}, map[int]float64{0: 1, 32: 0.177827941, 63: 0.0333762469, 64: 0, 255: 0}, 1},
		{"proportional with a factor", 8, nn.RoPE{Base: 1e4, Dim: 4}, nn.Scaling{Kind: nn.ScalingProportional, Factor: 4}, map[int]float64{0: 0.25, 1: 0.025, 2: 0, 3: 0}, 1},
		{"partial", 16, nn.RoPE{Dim: 8}, nn.Scaling{Kind: nn.ScalingLinear, Factor: 2}, map[int]float64{0: 0.5, 1: 0.05, 2: 0.005, 3: 5e-4}, 1},
	} {
		c.rope.Scaling = &c.scaling
		a := must.Get(c.rope.Angles(t.Context(), dev, c.dim, [][]int{{1}}))(t)
		cos, sin := must.Get(a.Cos.Float32s())(t), must.Get(a.Sin.Float32s())(t)
		for i, want := range c.want {
			// Each number is rounded to float32, with a relative error up to u = 2^-24: the
			// angle changes by less than 2u of it and the length by u. The wanted numbers have 9 digits.
			const u, digits = 0x1p-24, 5e-9
			if got := math.Atan2(float64(sin[i]), float64(cos[i])); !(math.Abs(got-want) <= want*(2*u+digits)) {
				t.Errorf("%s: frequency %d is %v, should be %v", c.name, i, got, want)
			}
			if got := math.Hypot(float64(sin[i]), float64(cos[i])); !(math.Abs(got-c.factor) <= c.factor*(u+digits)) {
				t.Errorf("%s: factor of pair %d is %v, should be %v", c.name, i, got, c.factor)
			}
		}
		a.Release()
	}
}

// TestSoftmaxFactor compares with the scale of DeepSeek V3, 0.135234 for heads of 192, and with the 1 of others.
func TestSoftmaxFactor(t *testing.T) {
	v3 := &nn.Scaling{Kind: nn.ScalingYaRN, Factor: 40, MScale: 1, MScaleAllDim: 1}
	if scale := v3.SoftmaxFactor() / math.Sqrt(192); !(math.Abs(scale-0.135234) <= 5e-7) {
		t.Errorf("scale is %v, should be 0.135234", scale)
	}
	for _, s := range []*nn.Scaling{nil, {}, {Kind: nn.ScalingYaRN}, {Kind: nn.ScalingYaRN, Factor: 40}, {Kind: nn.ScalingLinear, Factor: 40}} {
		if f := s.SoftmaxFactor(); f != 1 {
			t.Errorf("factor of %v is %v, should be 1", s, f)
		}
	}
}

func TestScalingRefuses(t *testing.T) {
	dev := onCPU(t)
	yarn := nn.Scaling{Kind: nn.ScalingYaRN, Factor: 8, OriginalMaxPositionEmbeddings: 4096}
	with := func(s nn.Scaling, change func(s *nn.Scaling)) nn.RoPE {
		change(&s)
		return nn.RoPE{Scaling: &s}
	}
	llama := nn.Scaling{Kind: nn.ScalingLlama3, Factor: 8, OriginalMaxPositionEmbeddings: 8192, LowFreqFactor: 1, HighFreqFactor: 4}
	long := nn.Scaling{Kind: nn.ScalingLongRoPE, Factor: 8, OriginalMaxPositionEmbeddings: 4096, ShortFactor: times(4, 1), LongFactor: times(4, 1)}
	for _, c := range []struct {
		rope nn.RoPE
		dim  int
		text string
	}{
		{with(nn.Scaling{}, func(*nn.Scaling) {}), 8, `kind is "", it must be one of linear dynamic llama3 yarn longrope proportional`},
		{with(yarn, func(s *nn.Scaling) { s.Kind = "ntk" }), 8, `kind is "ntk"`},
		{with(yarn, func(s *nn.Scaling) { s.Factor = 0 }), 8, "Factor is 0, for yarn it must be 1 to"},
		{with(yarn, func(s *nn.Scaling) { s.Factor = math.NaN() }), 8, "Factor is NaN"},
		{with(yarn, func(s *nn.Scaling) { s.OriginalMaxPositionEmbeddings = 0 }), 8, "OriginalMaxPositionEmbeddings is 0"},
		{with(yarn, func(s *nn.Scaling) { s.OriginalMaxPositionEmbeddings = 1 << 31 }), 8, "OriginalMaxPositionEmbeddings is 2.147483648e+09"},
		{with(yarn, func(s *nn.Scaling) { s.Length = 5 }), 8, "Length is 5, yarn does not use it: leave it out"},
		{with(yarn, func(s *nn.Scaling) { s.BetaSlow = 33 }), 8, "BetaFast is 32, for yarn it must be 33 to"},
		{with(yarn, func(s *nn.Scaling) { s.BetaSlow = -1 }), 8, "BetaSlow is -1"},
		{with(yarn, func(s *nn.Scaling) { s.MScale = math.Inf(1) }), 8, "MScale is +Inf"},
		{with(yarn, func(s *nn.Scaling) { s.MScaleAllDim = -1 }), 8, "MScaleAllDim is -1"},
		{with(yarn, func(s *nn.Scaling) { s.AttentionFactor = -1 }), 8, "AttentionFactor is -1"},
		{nn.RoPE{Base: 1, Scaling: &yarn}, 8, "base is 1, for yarn it must be greater than 1"},
		{with(llama, func(s *nn.Scaling) { s.NoTruncate = true }), 8, "NoTruncate is 1, llama3 does not use it"},
		{with(llama, func(s *nn.Scaling) { s.LowFreqFactor = 5 }), 8, "HighFreqFactor is 4, for llama3 it must be"},
		{with(llama, func(s *nn.Scaling) { s.LowFreqFactor = 0 }), 8, "LowFreqFactor is 0"},
		{with(llama, func(s *nn.Scaling) { s.ShortFactor = []float64{0} }), 8, "the number of ShortFactor is 1, llama3 does not use it"},
		{with(long, func(s *nn.Scaling) { s.ShortFactor = times(3, 1) }), 8, "the number of ShortFactor is 3, for longrope it must be 4 to 4"},
		{with(long, func(s *nn.Scaling) { s.LongFactor = []float64{1, 0, 1, 1} }), 8, "pair 1 is 0"},
		{with(long, func(s *nn.Scaling) { s.Length = -1 }), 8, "Length is -1"},
		{with(nn.Scaling{Kind: nn.ScalingDynamic, Factor: 2, OriginalMaxPositionEmbeddings: 9}, func(*nn.Scaling) {}), 2, "dynamic needs 2 or more"},
		{with(nn.Scaling{Kind: nn.ScalingLinear, Factor: 2, BetaFast: 1}, func(*nn.Scaling) {}), 8, "BetaFast is 1, linear does not use it"},
		{nn.RoPE{Dim: 2, Scaling: &nn.Scaling{Kind: nn.ScalingProportional}}, 9, "head size is 9, proportional scaling needs an even one"},
		{nn.RoPE{Sections: []int{2, 1}}, 8, "sections are [2 1] (interleaved: false), their sum must be the 4 pairs"},
		{nn.RoPE{Sections: []int{5, -1}}, 8, "sections are [5 -1]"},
		{nn.RoPE{Sections: []int{0, 4}, SectionsInterleaved: true}, 8, "sections are [0 4] (interleaved: true)"},
		{nn.RoPE{SectionsInterleaved: true}, 8, "sections are [] (interleaved: true)"},
	} {
		must.Fail(t, c.text, must.Err(c.rope.Angles(t.Context(), dev, c.dim, [][]int{{1}})), kernels.ErrOption, "rope: ", c.text)
	}
}

// TestSections compares the bits of each pair with those of a plain RoPE at the positions of its axis. The
// axis is that of the published rules: [16, 24, 24] adjacent pairs, or pair i of [24, 20, 20] by i%3.
func TestSections(t *testing.T) {
	dev, rng := onCPU(t), rand.New(rand.NewPCG(4, 2))
	const dim, batches, rows = 128, 2, 5
	axes := make([][][]int, 3)
	for axis := range axes {
		for range batches {
			axes[axis] = append(axes[axis], rng.Perm(1000)[:rows])
		}
	}
	floats := func(a kernels.Angles, err error) [2][]float32 {
		must.Do(t, err)
		t.Cleanup(a.Release)
		return [2][]float32{must.Get(a.Cos.Float32s())(t), must.Get(a.Sin.Float32s())(t)}
	}
	plain := &nn.RoPE{Base: 1e6}
	var of [3][2][]float32
	for axis := range of {
		of[axis] = floats(plain.Angles(t.Context(), dev, dim, axes[axis]))
	}
	for _, c := range []struct {
		rope nn.RoPE
		axis func(i int) int
	}{
		{nn.RoPE{Base: 1e6, Sections: []int{16, 24, 24}}, func(i int) int {
			switch {
			case i < 16:
				return 0
			case i < 40:
				return 1
			}
			return 2
		}},
		{nn.RoPE{Base: 1e6, Sections: []int{24, 20, 20}, SectionsInterleaved: true}, func(i int) int {
			if i < 60 {
				return i % 3
			}
			return 0
		}},
	} {
		got := floats(c.rope.AnglesOfAxes(t.Context(), dev, dim, axes))
		for i := range got[0] {
			if want := of[c.axis(i%(dim/2))]; got[0][i] != want[0][i] || got[1][i] != want[1][i] {
				t.Fatalf("sections %v: pair %d of row %d is (%v, %v), should be (%v, %v)", c.rope.Sections, i%(dim/2), i/(dim/2), got[0][i], got[1][i], want[0][i], want[1][i])
			}
		}
		text := floats(c.rope.AnglesOfAxes(t.Context(), dev, dim, [][][]int{axes[0], axes[0], axes[0]}))
		one := floats(c.rope.Angles(t.Context(), dev, dim, axes[0]))
		for i := range of[0] {
			if !slices.Equal(text[i], of[0][i]) || !slices.Equal(one[i], of[0][i]) {
				t.Errorf("sections %v: text does not rotate as without sections", c.rope.Sections)
			}
		}
		must.Fail(t, "two axes", must.Err(c.rope.AnglesOfAxes(t.Context(), dev, dim, axes[:2])), kernels.ErrShape, "there are positions of 2 axes, Sections has 3")
		must.Fail(t, "fewer batches", must.Err(c.rope.AnglesOfAxes(t.Context(), dev, dim, [][][]int{axes[0], axes[1][:1], axes[2]})), kernels.ErrShape, "axis 1 has positions of 1 batches, axis 0 has 2")
		must.Fail(t, "fewer rows", must.Err(c.rope.AnglesOfAxes(t.Context(), dev, dim, [][][]int{axes[0], axes[1], {{1}, {2}}})), kernels.ErrShape, "batch 0 has 1 positions")
	}
	must.Fail(t, "no sections", must.Err(plain.AnglesOfAxes(t.Context(), dev, dim, axes)), kernels.ErrShape, "Sections has 0")
	must.Fail(t, "nil", must.Err((*nn.RoPE)(nil).AnglesOfAxes(t.Context(), dev, dim, nil)), kernels.ErrOption, "*RoPE is nil")
}
