package fronttest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestAnyOptions prepares, plans, runs and checks small calls, and computes their stages and gradients, with options
// that are valid, invalid and at the ends of their types. None panics, and what runs is right.
func TestAnyOptions(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		calls := 10000
		if dev.Info().Name != "cpu" {
			calls = 100
		}
		anyOptions(t, dev, calls)
	})
}

func anyOptions(t *testing.T, dev *kernels.Device, calls int) {
	ctx := t.Context()
	rng := rand.New(rand.NewPCG(1, 1))
	ran := 0
	for n := range calls {
		seldom := func() bool { return rng.IntN(6) == 0 }
		length := func() int {
			if seldom() {
				return 0
			}
			return 1 + rng.IntN(5)
		}
		integer := func() int {
			if rng.IntN(3) > 0 {
				return rng.IntN(6)
			}
			ends := []int{-1, 1 << 20, 1 << 30, math.MaxInt32, math.MaxInt32 + 1, 1 << 40, math.MaxInt - 1, math.MaxInt, math.MinInt32, math.MinInt}
			return ends[rng.IntN(len(ends))]
		}
		integers := func(n int) []int {
			if rng.IntN(8) > 0 {
				return nil
			}
			if seldom() {
				n = rng.IntN(4)
			}
			list := make([]int, n)
			for i := range list {
				if list[i] = rng.IntN(3); seldom() {
					list[i] = integer()
				}
			}
			return list
		}
		number := func() float64 {
			all := []float64{0, 1, -1, 0.5, 30, 1e-300, 1e300, math.Inf(1), math.Inf(-1), math.NaN()}
			return all[rng.IntN(len(all))]
		}
		var held []kernels.Tensor
		put := func(x kernels.Tensor, err error) kernels.Tensor {
			must.Do(t, err)
			x = must.Get(dev.Upload(ctx, x))(t)
			held = append(held, x)
			return x
		}
		b, hkv, share, sq, sk := length(), length(), 1+rng.IntN(2), length(), length()
		h := hkv * share
		tensor := func(b, h, s, d int) kernels.Tensor {
			shape := kernels.Shape{b, h, s, d}
			return put(kernels.HostF32(normal(shape.Elements(), uint64(n)), shape))
		}
		q, k, v := tensor(b, h, sq, 4), tensor(b, hkv, sk, 4), tensor(b, hkv, sk, 3)
		bools := func(s kernels.Shape) kernels.Tensor {
			data := make([]bool, s.Elements())
			for i := range data {
				data[i] = rng.IntN(4) > 0
			}
			return put(kernels.HostBool(data, s))
		}
		opt := kernels.Options{Causal: seldom(), LSE: seldom(), Weights: seldom(), KLen: integers(b), Offset: integers(b), Prefix: integers(b), CuQ: integers(3), CuK: integers(3)}
		if seldom() {
			opt.Scale = new(number())
		}
		if seldom() {
			opt.Softcap = number()
		}
		if seldom() {
			opt.ScoreMod = &kernels.ScoreMod{First: [4]int{2: integer(), 3: integer()}}
			if !seldom() {
				opt.ScoreMod.Go = func(scores []float32, at kernels.Position) {
					for i := range scores {
						scores[i] = float32((at.Row - at.Key - i) % 8)
					}
				}
				opt.ScoreMod.Derivative = func(scores []float32, _ kernels.Position) { clear(scores) }
			}
		}
		if seldom() {
			opt.Spans = [][][2]int{{{integer(), integer()}}}
		}
		if seldom() {
			opt.Window = &kernels.Window{Left: integer(), Right: integer()}
		}
		if seldom() {
			opt.Offset, opt.Align = []int{integer()}, kernels.Align(rng.IntN(3))
		}
		if seldom() {
			dev.SetVerify(rng.IntN(4) - 1)
		}
		if seldom() {
			opt.Mask = bools(kernels.Shape{1, 1, sq, max(sk-rng.IntN(2), 0)})
		}
		if seldom() {
			opt.Bias = tensor(1, 1, 1, sk)
		}
		if seldom() {
			opt.RelativeBias = tensor(1, 1, 1, max(sq+sk-1, 0))
		}
		if seldom() {
			opt.BlockSize = integer()
			size := max(opt.BlockSize, 1)
			opt.BlockMask = bools(kernels.Shape{1, 1, sq/size + min(1, sq%size), sk/size + min(1, sk%size)})
		}
		if seldom() {
			opt.Sinks = make([]float32, h)
		}
		if seldom() {
			opt.ALiBi = make([]float32, h)
			for i := range opt.ALiBi {
				opt.ALiBi[i] = float32(rng.NormFloat64())
			}
		}
		if seldom() {
			opt.Dropout = kernels.Dropout{P: float32(number()), Seed: rng.Uint64(), First: [4]int{0, 0, max(integer(), 0) % 100, 0}}
		}
		if seldom() {
			ids := func(n int) [][]int32 {
				list := make([]int32, n)
				for i := range list {
					list[i] = int32(i / 2)
				}
				return [][]int32{list}
			}
			opt.QSegments, opt.KSegments = ids(sq), ids(sk)
		}
		if seldom() {
			opt.KeyIndices = &kernels.KeyIndices{TopK: rng.IntN(3), Rows: rng.IntN(4)}
			blocks := (sq + max(opt.KeyIndices.Rows, 1) - 1) / max(opt.KeyIndices.Rows, 1)
			for range b * blocks {
				list := make([]int32, opt.KeyIndices.TopK)
				for i := range list {
					if list[i] = int32(i) % int32(max(sk, 1)); seldom() {
						list[i] = int32(integer())
					}
				}
				opt.KeyIndices.Indices = append(opt.KeyIndices.Indices, list...)
			}
			if x := opt.KeyIndices; seldom() {
				host, _ := kernels.Host(x.Indices, kernels.I32, kernels.Shape{b, 1, blocks, x.TopK})
				opt.KeyIndices = &kernels.KeyIndices{Tensor: host}
			}
		}
		if seldom() {
			opt.Pages = &kernels.Pages{Keys: integer(), Table: make([][]int32, b)}
			for i := range opt.Pages.Table {
				opt.Pages.Table[i] = make([]int32, rng.IntN(3))
			}
		}
		func() {
			var stage string
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("%s of %v, %v panics: %v\n%s", stage, q.Shape(), k.Shape(), p, fmt.Sprintf("%+v", opt))
				}
			}()
			if seldom() { // the stages need no more than an error
				stage = "top weights"
				_, _ = dev.TopWeights(ctx, q, k, rng.IntN(4), opt)
				stage = "each weight row"
				_ = dev.EachWeightRow(ctx, q, k, kernels.WeightRange{Batch: integer(), Head: integer(), Rows: [2]int{rng.IntN(3), integer()}, Keys: [2]int{0, integer()}}, opt, func(int, int, []float32) {})
				stage = "scores"
				s, _ := dev.Scores(ctx, q, k, kernels.ScorePoint(rng.IntN(4)), opt)
				if s.Release(); opt.Scale == nil {
					opt.Scale = new(1.0)
				}
				stage = "softmax"
				if s, err := dev.QK(ctx, q, k); err == nil {
					_ = dev.Softmax(ctx, s, kernels.Tensor{}, opt)
					stage = "pv"
					o, _ := dev.PV(ctx, s, v)
					o.Release()
					s.Release()
				}
			}
			stage = "prepare"
			call, err := dev.Prepare(q, k, v, opt)
			if err != nil {
				return
			}
			stage = "plan"
			_, err = call.Plan(ctx)
			if (opt.ScoreMod != nil || opt.KeyIndices != nil) && errors.Is(err, kernels.ErrUnsupported) { // on a GPU
				return
			}
			if err != nil {
				t.Errorf("plan of %v, %v: %v\n%+v", q.Shape(), k.Shape(), err, opt)
			}
			stage = "run"
			r, err := call.Run(ctx)
			if err != nil {
				t.Errorf("run of %v, %v: %v\n%+v", q.Shape(), k.Shape(), err, opt)
				return
			}
			defer r.Release()
			stage = "check"
			if report, err := call.Check(ctx, r, kernels.CheckOptions{Rows: 4}); err != nil || !report.OK() {
				t.Errorf("check of %v, %v: %+v, %v\n%+v, pages %+v", q.Shape(), k.Shape(), report, err, opt, opt.Pages)
			}
			ran++
			stage = "backward"
			far := slices.ContainsFunc(opt.Offset, func(n int) bool { return max(n, -n) > 1000 })
			if opt.LSE && opt.Pages == nil && (opt.KeyIndices == nil || opt.KeyIndices.Tensor.IsZero()) && !(far && opt.ALiBi != nil) { // an LSE of 10^9 has no digits after the point
				anyGradients(t, call, r, opt)
			}
		}()
		for _, x := range held {
			x.Release()
		}
		if t.Failed() {
			return
		}
	}
	if ran < calls/10 {
		t.Errorf("only %d calls ran", ran)
	}
}

// anyGradients computes and checks all gradients of a call that has run, with its own output as dO.
func anyGradients(t *testing.T, call *kernels.Call, r kernels.Result, opt kernels.Options) {
	ctx := t.Context()
	if _, err := call.PlanBackward(ctx, call.Gradients()); err != nil {
		t.Errorf("plan of gradients: %v\n%+v", err, opt)
	}
	grads := must.Get(call.AllocGradients(ctx, call.Gradients()))(t)
	defer grads.Release()
	d := kernels.Result{O: r.O}
	if err := call.Backward(ctx, grads, d, r); err != nil {
		t.Errorf("gradients of %+v: %v\n%+v", call.Dims(), err, opt)
		return
	}
	if report, err := call.CheckBackward(ctx, grads, d, r, kernels.CheckOptions{Rows: 4}); err != nil || !report.OK() {
		t.Errorf("check of gradients of %+v: %+v, %v\n%+v", call.Dims(), report, err, opt)
	}
}
