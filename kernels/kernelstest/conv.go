package kernelstest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// convCase is a causal convolution.
type convCase struct {
	name               string
	batch, s, ch, w    int
	x, weights, y, mem backend.DType // mem is that of the states
	layout             Layout        // of x and y
	states             Layout
	bias, silu, past   bool
	cuQ                []int
}

// testConv compares causal convolutions with float64: in one call, in one with the state in place, and in calls of three
// tokens.
func testConv(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Convolver](dev) {
		t.Logf("%s has no convolutions", dev.Info().Name)
		return
	}
	f32, f16, bf16 := backend.F32, backend.F16, backend.BF16
	for i, c := range []convCase{
		{"width 1, as a product", 2, 9, 17, 1, f32, f32, f32, f32, Contiguous, Contiguous, true, false, true, nil},
		{"width 2", 2, 40, 33, 2, f32, f32, f32, f32, Padded, Padded, false, false, true, nil},
		{"width 4 and SiLU", 2, 70, 300, 4, f32, f32, f32, f32, BSHD, Contiguous, false, true, true, nil},
		{"width 64", 1, 100, 20, 64, f32, f32, f32, f32, Contiguous, Padded, true, true, true, nil},
		{"channels before tokens", 2, 35, 40, 4, f32, f32, f32, f32, Transposed, Transposed, true, true, true, nil},
		{"f16, channels before tokens", 2, 35, 21, 4, f16, f16, f16, f16, Transposed, Transposed, true, true, true, nil},
		{"bf16", 3, 20, 64, 4, bf16, bf16, bf16, bf16, Padded, Padded, true, true, true, nil},
		{"f16 to bf16, states in f32", 1, 34, 48, 3, f16, f32, bf16, f32, Swapped, Swapped, false, true, true, nil},
		{"f32 to f16, weights in bf16", 1, 34, 48, 5, f32, bf16, f16, f32, Contiguous, BSHD, true, false, true, nil},
		{"no states before", 2, 12, 24, 4, f32, f32, f32, f32, Contiguous, Contiguous, false, true, false, nil},
		{"one token", 3, 1, 600, 4, f32, f32, f32, f32, Contiguous, Contiguous, false, true, true, nil},
		{"fewer tokens than a state", 2, 3, 18, 9, f32, f32, f32, f32, Padded, Transposed, true, false, true, nil},
		{"fewer tokens than a state, none before", 2, 3, 18, 9, bf16, f32, f32, bf16, Padded, Padded, true, true, false, nil},
		{"no tokens", 2, 0, 18, 4, f32, f32, f32, f32, Contiguous, Padded, true, true, true, nil},
		{"no tokens, none before", 2, 0, 18, 4, f32, f32, f32, f32, Contiguous, Padded, true, true, false, nil},
		{"packed, one empty and one of a token", 1, 60, 20, 4, f32, f32, f32, f32, Padded, Padded, true, true, true, []int{0, 17, 17, 18, 60}},
		{"packed, channels before tokens", 1, 41, 20, 6, f16, f32, f32, f16, Transposed, Transposed, false, false, false, []int{0, 2, 41}},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, dev, uint64(i)) })
	}
}

func (c convCase) test(t *testing.T, dev *kernels.Device, seed uint64) {
	rng, nan := rand.New(rand.NewPCG(seed, 0x636f6e76)), float32(math.NaN())
	type shape = backend.Shape
	sequences := backend.Sequences(c.cuQ, c.batch)
	rows := shape{sequences, 1, c.w - 1, c.ch}
	x, w := drawn(rng, shape{c.batch, 1, c.s, c.ch}, c.x), drawn(rng, shape{1, 1, c.w, c.ch}, c.weights)
	bias, past := drawn(rng, shape{1, 1, 1, c.ch}, c.weights), drawn(rng, rows, c.mem)
	for i := range x.data { // sigmoids from 1 to almost 0
		x.data[i] = c.x.Round(x.data[i] * []float32{1, 30, 0}[i%3])
	}
	var held []flat
	up := func(o operand, l Layout) flat {
		held = append(held, put(t, dev, o, l))
		return held[len(held)-1]
	}
	defer func() {
		for _, f := range held {
			f.release()
		}
	}()
	y, before, present := up(filled(nan, x.shape, c.y), c.layout), up(past, c.states), up(filled(nan, rows, c.mem), c.states)
	call := kernels.CausalConv{Y: y.view, X: up(x, c.layout).view, W: up(w, []Layout{Contiguous, Padded, Transposed}[seed%3]).view, PresentState: present.view, SiLU: c.silu, CuQ: c.cuQ}
	if c.bias {
		call.Bias = up(bias, Contiguous).view
	}
	if c.past {
		call.PastState = before.view
	}
	check := func(what string, present flat) {
		t.Helper()
		var got, state []float32
		if c.s > 0 {
			got = y.get(t, dev, what)
		}
		if c.w > 1 {
			state = present.get(t, dev, what)
		}
		c.check(t, what, x, w, bias, past, got, state)
	}
	noError(t, dev.CausalConv(t.Context(), call))
	check("a call", present)
	if c.past {
		again := call
		again.PresentState = call.PastState
		noError(t, dev.CausalConv(t.Context(), again))
		check("the state in place", before)
	}
	if c.cuQ != nil || !c.past || c.mem != c.x {
		return
	}
	call.PastState = up(past, c.states).view
	for lo := 0; lo < c.s; lo += 3 {
		part := call
		part.Y = must(call.Y.Slice(backend.Seq, lo, min(lo+3, c.s)))(t)
		part.X = must(call.X.Slice(backend.Seq, lo, min(lo+3, c.s)))(t)
		noError(t, dev.CausalConv(t.Context(), part))
		call.PastState = call.PresentState
	}
	if c.s > 0 {
		check("steps", present)
	}
}

// check compares y and the final states with float64.
func (c *convCase) check(t *testing.T, what string, x, w, bias, past operand, y, states []float32) {
	t.Helper()
	var worst oracle.Worst
	in, weights := make([]float32, c.w), make([]float32, c.w)
	for n := range backend.Sequences(c.cuQ, c.batch) {
		b, lo, hi := backend.Sequence(c.cuQ, n, c.s)
		for ch := range c.ch {
			at := func(s int) float32 { // of x, or of the state before it
				switch {
				case s >= lo:
					return x.data[(b*c.s+s)*c.ch+ch]
				case c.past:
					return past.data[(n*(c.w-1)+s-lo+c.w-1)*c.ch+ch]
				}
				return 0
			}
			for i := range weights {
				weights[i] = w.data[i*c.ch+ch]
			}
			add := float32(0)
			if c.bias {
				add = bias.data[ch]
			}
			for s := lo; s < hi; s++ {
				for i := range in {
					in[i] = at(s - c.w + 1 + i)
				}
				want := oracle.CausalConv(in, weights, add, c.silu)
				worst.See(float64(y[(b*c.s+s)*c.ch+ch]), want.Value, want.Bound(c.y), func() string { return fmt.Sprintf("%s: sequence %d, token %d, channel %d", what, n, s-lo, ch) })
			}
			for i := range c.w - 1 {
				if got, want := states[(n*(c.w-1)+i)*c.ch+ch], c.mem.Round(at(hi-c.w+1+i)); got != want {
					t.Fatalf("%s: state of sequence %d, row %d, channel %d is %v, should be %v", what, n, i, ch, got, want)
				}
			}
		}
	}
	if err := worst.Err(); err != nil {
		t.Error(err)
	}
	t.Logf("%s: %.2g of the bound at worst, at %s", what, worst.Off, worst.Where)
}
