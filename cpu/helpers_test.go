package cpu

import (
	"math"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// cut returns elements [lo, hi) of x along an axis.
func cut(t testing.TB, x backend.Tensor, axis, lo, hi int) backend.Tensor {
	t.Helper()
	return must.Get(x.Slice(axis, lo, hi))(t)
}

// floats returns the elements of a contiguous F32 tensor.
func floats(t testing.TB, x backend.Tensor) []float32 {
	t.Helper()
	s := must.Get(x.Float32s())(t)
	return s[:x.Shape().Elements()]
}

// sameBits fails when the contiguous F32 tensors got and want differ in any bit.
func sameBits(t *testing.T, what string, got, want backend.Tensor) {
	t.Helper()
	g := floats(t, got)
	w := floats(t, want)
	for i := range want.Shape().Elements() {
		if math.Float32bits(g[i]) != math.Float32bits(w[i]) {
			t.Fatalf("%s: element %d is %v, should be %v, bit by bit", what, i, g[i], w[i])
		}
	}
}

func alloc(t testing.TB, shape backend.Shape) backend.Tensor {
	t.Helper()
	return must.Get(backend.AllocHost(backend.F32, shape))(t)
}

// eachTier runs f on each tier that the machine has.
func eachTier(t *testing.T, f func(t *testing.T, tier string)) {
	for _, tier := range Tiers() {
		t.Run(tier, func(t *testing.T) { f(t, tier) })
	}
}

// flags returns a contiguous tensor of which three in four are true.
func flags(t testing.TB, seed uint64, shape backend.Shape) backend.Tensor {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 4))
	data := make([]bool, shape.Elements())
	for i := range data {
		data[i] = rng.IntN(4) > 0
	}
	return must.Get(backend.Host(data, backend.Bool, shape))(t)
}

// rowsOfHead returns rows [from, to) of head h of a contiguous F32 tensor.
func rowsOfHead(t *testing.T, x backend.Tensor, h, from, to int) []float32 {
	data := floats(t, x)
	s := x.Strides()
	return data[h*s[1]+from*s[2] : h*s[1]+to*s[2]]
}

// swap returns x with two axes exchanged.
func swap(t testing.TB, x backend.Tensor, a, b int) backend.Tensor {
	t.Helper()
	return must.Get(x.Swap(a, b))(t)
}

// broadcast returns x with the given shape.
func broadcast(t testing.TB, x backend.Tensor, shape backend.Shape) backend.Tensor {
	t.Helper()
	return must.Get(x.Broadcast(shape))(t)
}

// random returns a contiguous tensor of numbers in [-1, 1).
func random(t testing.TB, seed uint64, shape backend.Shape) backend.Tensor {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 3))
	data := make([]float32, shape.Elements())
	for i := range data {
		data[i] = rng.Float32()*2 - 1
	}
	return must.Get(backend.Host(data, backend.F32, shape))(t)
}

// typed returns x, a contiguous F32 tensor, rounded to dtype.
func typed(tb testing.TB, x backend.Tensor, dtype backend.DType) backend.Tensor {
	tb.Helper()
	if dtype == backend.F32 {
		return x
	}
	shape := x.Shape()
	y := must.Get(backend.AllocHost(dtype, shape))(tb)
	to := strided.Of(&y)
	from := floats(tb, x)
	n := shape[backend.Dim]
	for b := range shape[backend.Batch] {
		for h := range shape[backend.Heads] {
			for s := range shape[backend.Seq] {
				to.Store(vec.Tiers()[0], from[:n], b, h, s, 0)
				from = from[n:]
			}
		}
	}
	return y
}

// plain returns a call of plain attention over random operands.
func plain(t testing.TB, heads, seq, dim int) *backend.Call {
	shape := backend.Shape{1, heads, seq, dim}
	o := must.Get(backend.AllocHost(backend.F32, shape))(t)
	return &backend.Call{
		Q: random(t, 1, shape), K: random(t, 2, shape), V: random(t, 3, shape), O: o,
		Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()},
	}
}

// withO returns c with an unset output.
func withO(t testing.TB, c backend.Call) backend.Call {
	d := c.Dims()
	c.O = alloc(t, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim})
	return c
}

// attended returns the outputs of c.
func attended(t testing.TB, be *Backend, c backend.Call) backend.Tensor {
	t.Helper()
	c = withO(t, c)
	must.Do(t, be.Attention(t.Context(), &c))
	return c.O
}

// everyOption returns a problem of 4 heads with most options.
func everyOption(t testing.TB, b, h, sq, sk int, visible backend.Visibility) backend.Problem {
	t.Helper()
	return backend.Problem{Scale: 0.3, Softcap: 5, Bias: random(t, 4, backend.Shape{b, h, sq, sk}), Visible: visible,
		Relative: random(t, 9, backend.Shape{b, h, 1, sq + sk - 1}), Slopes: []float32{0.1, 0.2, 0, 0.4}, Sinks: []float32{1, vec.NegInf, 0, -3},
		Mask: flags(t, 10, backend.Shape{b, h, sq, sk}), Blocks: flags(t, 11, backend.Shape{b, h, tile.CeilDiv(sq, 40), tile.CeilDiv(sk, 20)}), BlockQ: 40, BlockK: 20,
		Dropout: backend.Dropout{P: 0.2, Seed: 8}}
}

// open returns a backend that is closed at the end of the test.
func open(tb testing.TB, opt Options) *Backend {
	tb.Helper()
	if before := runtime.GOMAXPROCS(0); opt.Threads > before { // more would not compute
		runtime.GOMAXPROCS(opt.Threads)
		tb.Cleanup(func() { runtime.GOMAXPROCS(before) })
	}
	be := New(opt)
	tb.Cleanup(func() { be.Close() })
	return be
}

// skipWithRace skips a test of results: the race detector slows it down tenfold and finds
// nothing that TestConformance and TestThreads do not show.
func skipWithRace(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector has nothing to find in a test of results")
	}
}

// signed returns a contiguous F32 tensor of small multiples of ±unit.
func signed(t *testing.T, seed uint64, shape backend.Shape, unit float32) backend.Tensor {
	t.Helper()
	rng, x := rand.New(rand.NewPCG(seed, 5)), alloc(t, shape)
	data := floats(t, x)
	for i := range data {
		data[i] = float32(rng.IntN(9)-4) * unit
	}
	return x
}

// near fails when an element of got is 1e-5 or more from that of want, relative to
// 1 and to it: float32 with sums of a few thousand numbers is 50 times closer,
// and a wrong index is never.
func near(t *testing.T, what string, got, want []float32) {
	t.Helper()
	for i, x := range want {
		if y := got[i]; x != y && !(math.Abs(float64(x-y)) < 1e-5*max(1, math.Abs(float64(x)))) {
			t.Fatalf("%s: element %d is %v, should be %v", what, i, y, x)
		}
	}
}
