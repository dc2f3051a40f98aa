package gpu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestOptionsOfManyHeads compares, bit for bit, a call with more heads than the kernels'
// tables hold with calls of these heads alone: slopes for each batch, sinks, and dropout.
func TestOptionsOfManyHeads(t *testing.T) {
	b := open(t, Options{})
	const batch, heads, sk, d = 2, 70, 40, 8
	slopes, sinks := make([]float32, batch*heads), make([]float32, heads)
	for i := range slopes {
		slopes[i], sinks[i%heads] = wave(i)/8, wave(i)
	}
	for _, sq := range []int{3, 20} { // decoded and not
		q := input(t, b, backend.Shape{batch, heads, sq, d})
		k := upload(t, b, host(t, backend.Shape{batch, heads, sk, d}, func(i int) float32 { return wave(i + 5) }))
		v := upload(t, b, host(t, backend.Shape{batch, heads, sk, d}, func(i int) float32 { return wave(i + 9) }))
		p := backend.Problem{Scale: 0.3, Visible: backend.Everything(), Slopes: slopes, Sinks: sinks, Dropout: backend.Dropout{P: 0.3, Seed: 5}}
		o, lse := attend(t, b, backend.Call{Q: q, K: k, V: v, Problem: p})
		for _, at := range [][2]int{{0, 0}, {0, 63}, {1, 34}, {1, 35}, {1, 69}} {
			n, h := at[0], at[1]
			one := func(x backend.Tensor) backend.Tensor {
				for axis, i := range at {
					x = must.Get(x.Slice(axis, i, i+1))(t)
				}
				return x
			}
			alone := p
			alone.Slopes, alone.Sinks = slopes[n*heads+h:][:1], sinks[h:h+1]
			alone.Dropout.First = [4]int{n, h, 0, 0}
			ao, alse := attend(t, b, backend.Call{Q: one(q), K: one(k), V: one(v), Problem: alone})
			first := (n*heads + h) * sq
			what := fmt.Sprintf("%d rows, batch %d, head %d", sq, n, h)
			sameRow(t, what, ao, o[first*d:(first+sq)*d])
			sameRow(t, what+", lse", alse, lse[first:first+sq])
		}
	}
}

// TestFewBindings asks for two masks, two biases and all four, on devices with eight to ten storage
// buffers a kernel. All four need ten in prefill and gradients, and errors name both numbers. The
// others, and decoding, need eight. Values of a score mod, or lists of keys, with a mask and a bias need nine.
func TestFewBindings(t *testing.T) {
	for _, binds := range []uint32{8, 9, 10} {
		t.Run(fmt.Sprint(binds), func(t *testing.T) { testFewBindings(t, binds) })
	}
}

func testFewBindings(t *testing.T, binds uint32) {
	b := open(t, Options{Limits: gputypes.Limits{MaxStorageBuffersPerShaderStage: binds}})
	c := problem(t, b)
	c.Relative = input(t, b, backend.Shape{1, 4, 1, 70 + 90 - 1})
	c.Blocks, c.BlockQ, c.BlockK = blocksOf(t, b, 9, 12), 8, 8
	g := backwardOf(t, b, c)
	for _, without := range [][2]*backend.Tensor{{&g.Mask, &g.Blocks}, {&g.Bias, &g.Relative}} {
		kept := *g
		*without[0], *without[1] = backend.Tensor{}, backend.Tensor{}
		check(t, errors.Join(b.Attention(t.Context(), &g.Call), b.Backward(t.Context(), g)))
		*g = kept
	}
	if binds == 8 { // values of a score mod take the ninth if there are a mask and a bias
		mod := *g
		mod.Blocks, mod.Relative = backend.Tensor{}, backend.Tensor{}
		mod.ScoreMod = &backend.ScoreMod{WGSL: "return score + value(h);", WGSLDerivative: "return 1.0;", Values: []float32{1}}
		for _, err := range []error{b.Attention(t.Context(), &mod.Call), b.Backward(t.Context(), &mod)} {
			must.Fail(t, "score mod", err, backend.ErrUnsupported, "9 storage buffers")
		}
	}
	listed := problem(t, b) // lists of keys with a mask and a bias take the ninth
	listed.Listed, listed.Visible = [][]int32{{3, 5, 80}, {0}}, backend.Everything()
	listed.Visible.KLen = []int{3, 1}
	if err := b.Attention(t.Context(), listed); binds > 8 && err != nil || binds == 8 && (!errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), "9 storage buffers")) {
		t.Errorf("lists: %v", err)
	}
	_, err := b.Plan(t.Context(), c)
	for what, err := range map[string]error{"plan": err, "attention": b.Attention(context.Background(), c), "backward": b.Backward(context.Background(), g)} {
		if binds == 10 {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			continue
		}
		if limit := fmt.Sprintf("10 storage buffers, %s binds %d", b.Info().Name, binds); !errors.Is(err, backend.ErrUnsupported) ||
			!strings.Contains(err.Error(), "two masks with a bias") || !strings.Contains(err.Error(), limit) ||
			what != "backward" && !strings.Contains(err.Error(), "maxStorageBuffersPerShaderStage") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, x := range []struct {
		t    *backend.Tensor
		axis int
		n    int
	}{{&c.Q, backend.Seq, 3}, {&c.O, backend.Seq, 3}, {&c.LSE, backend.Seq, 3}, {&c.Mask, backend.Seq, 3}, {&c.Bias, backend.Seq, 3},
		{&c.Blocks, backend.Seq, 1}, {&c.Relative, backend.Dim, 3 + 90 - 1}} {
		*x.t, err = x.t.Slice(x.axis, 0, x.n)
		check(t, err)
	}
	must.Pass(t, "few rows", b.Attention(context.Background(), c))
}

// TestScoreModForCPU asks for gradients with a score mod whose own text GPUs do not take, unlike its derivative.
func TestScoreModForCPU(t *testing.T) {
	b := open(t, Options{})
	g := backwardOf(t, b, problem(t, b))
	for wgsl, kind := range map[string]error{"": backend.ErrUnsupported, "return;": backend.ErrOption} {
		g.ScoreMod = &backend.ScoreMod{WGSL: wgsl, WGSLDerivative: "return 1.0;"}
		_, err := b.PlanBackward(t.Context(), g)
		for _, err := range []error{err, b.Backward(t.Context(), g), b.WarmupBackward(t.Context(), g)} {
			must.Fail(t, "score mod", err, kind, "the score mod's WGSL")
		}
	}
}
