package cpu

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// vectorCase is a row of the table that BenchmarkVector prints. want is the
// percentage of the ceiling to reach, on one thread and on two; 0 is not asked.
type vectorCase struct {
	name              string
	heads, kv, sq, sk int
	dim               int
	dtype             backend.DType
	softcap           float32
	window            int // keys before its own that a row sees; 0: all, -1: causal
	bias              bool
	tier              string
	reads             bool // the ceiling is read bandwidth
	want              [2]float64
}

var vectorCases = []vectorCase{
	{name: "s1024d64", heads: 8, sq: 1024, dim: 64, want: [2]float64{86, 85}},
	{name: "s4096d64", heads: 8, sq: 4096, dim: 64, want: [2]float64{86, 85}},
	{name: "s1024d128", heads: 8, sq: 1024, dim: 128, want: [2]float64{89, 88}},
	{name: "s4096d128", heads: 8, sq: 4096, dim: 128, want: [2]float64{89, 88}},
	{name: "s2048d80", heads: 8, sq: 2048, dim: 80, want: [2]float64{80, 80}},
	{name: "s2048d96", heads: 8, sq: 2048, dim: 96, want: [2]float64{80, 80}},
	{name: "s2048d256", heads: 8, sq: 2048, dim: 256, want: [2]float64{80, 80}},
	{name: "s4096d64/causal", heads: 8, sq: 4096, dim: 64, window: -1, want: [2]float64{80, 80}},
	{name: "s4096d128/causal", heads: 8, sq: 4096, dim: 128, window: -1},
	{name: "s8192d64/window256", heads: 8, sq: 8192, dim: 64, window: 256, want: [2]float64{60, 60}},
	{name: "s2048d64/bias", heads: 8, sq: 2048, dim: 64, bias: true, want: [2]float64{75, 75}},
	{name: "s2048d64/softcap", heads: 8, sq: 2048, dim: 64, softcap: 20, want: [2]float64{60, 60}},
	{name: "s256d64", heads: 8, sq: 256, dim: 64, want: [2]float64{0, 70}},
	{name: "h1s256d64", heads: 1, sq: 256, dim: 64},
	{name: "q16k4096d64", heads: 8, sq: 16, sk: 4096, dim: 64},
	{name: "s4096d64/f16", heads: 8, sq: 4096, dim: 64, dtype: backend.F16, want: [2]float64{82, 82}},
	{name: "s4096d64/bf16", heads: 8, sq: 4096, dim: 64, dtype: backend.BF16, want: [2]float64{82, 82}},
	{name: "s4096d64/avx2", heads: 8, sq: 4096, dim: 64, tier: "avx2", want: [2]float64{84, 84}},
	{name: "decode/k32768d128", heads: 8, sq: 1, sk: 32768, dim: 128, reads: true, want: [2]float64{0, 85}},
	{name: "decode/k32768d128/bf16", heads: 8, sq: 1, sk: 32768, dim: 128, dtype: backend.BF16, reads: true, want: [2]float64{0, 80}},
	{name: "decode/k32768d128/8to1", heads: 8, kv: 1, sq: 1, sk: 32768, dim: 128, reads: true, want: [2]float64{0, 85}},
}

// BenchmarkVector measures the vector tiers against the machine's ceiling: the FMA peak
// of the tier, or for decoding the bandwidth at which the same keys and values can be
// read. The two take turns. It reports the median of their ratios in percent, next to
// the target; operations are those of visible pairs. The whole table:
//
//	go test -run '^$' -bench Vector -benchtime 15x ./cpu
func BenchmarkVector(b *testing.B) {
	for _, c := range vectorCases {
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/threads%d", c.name, threads), func(b *testing.B) { benchVector(b, c, threads) })
		}
	}
}

func benchVector(b *testing.B, c vectorCase, threads int) {
	be, err := Open(Options{Threads: threads, Tier: c.tier})
	if err != nil {
		b.Skip(err)
	}
	defer be.Close()
	call := c.call(b)
	p, err := be.Plan(b.Context(), call)
	if err != nil {
		b.Fatal(err)
	}
	ceiling := func() (float64, error) { return be.PeakFLOPS(b.Context()) }
	work := float64(p.FLOPs)
	if c.reads {
		ceiling = func() (float64, error) { return be.ReadBandwidth(b.Context(), call.K, call.V) }
		work = float64(call.K.Bytes() + call.V.Bytes())
	}
	benchCeiling(b, c.want[threads-1], map[bool]string{false: "GFLOP/s", true: "GB/s"}[c.reads], work, ceiling,
		func() error { return be.Attention(b.Context(), call) })
}

// call builds the case's call.
func (c *vectorCase) call(tb testing.TB) *backend.Call {
	sk, kv := max(c.sk, 1), max(c.kv, 1)
	if c.sk == 0 {
		sk = c.sq
	}
	if c.kv == 0 {
		kv = c.heads
	}
	of := func(seed uint64, heads, seq int) backend.Tensor {
		return typed(tb, random(tb, seed, backend.Shape{1, heads, seq, c.dim}), c.dtype)
	}
	call := &backend.Call{Q: of(1, c.heads, c.sq), K: of(2, kv, sk), V: of(3, kv, sk), O: of(4, c.heads, c.sq),
		Problem: backend.Problem{Scale: 0.125, Softcap: c.softcap, Visible: backend.Everything()}}
	switch {
	case c.window < 0:
		call.Visible.Right = 0
	case c.window > 0:
		call.Visible = backend.Visibility{Left: c.window - 1}
	}
	if c.bias {
		bias, err := random(tb, 5, backend.Shape{1, 1, c.sq, sk}).Broadcast(backend.Shape{1, c.heads, c.sq, sk})
		if err != nil {
			tb.Fatal(err)
		}
		call.Bias = bias
	}
	return call
}

// typed returns x, a contiguous F32 tensor, rounded to dtype.
func typed(tb testing.TB, x backend.Tensor, dtype backend.DType) backend.Tensor {
	tb.Helper()
	if dtype == backend.F32 {
		return x
	}
	shape := x.Shape()
	y, err := backend.AllocHost(dtype, shape)
	if err != nil {
		tb.Fatal(err)
	}
	to, err := openView("y", y)
	if err != nil {
		tb.Fatal(err)
	}
	from, err := x.Float32s()
	if err != nil {
		tb.Fatal(err)
	}
	n := shape[backend.Dim]
	for b := range shape[backend.Batch] {
		for h := range shape[backend.Heads] {
			for s := range shape[backend.Seq] {
				to.store(from[:n], b, h, s, 0)
				from = from[n:]
			}
		}
	}
	return y
}

// BenchmarkStages measures the cost of inspecting the weights on each tier: the
// three stages one after the other, in GFLOP/s of the two products, and the
// fused call for comparison.
func BenchmarkStages(b *testing.B) {
	c := vectorCase{heads: 8, sq: 1024, dim: 64}
	call := c.call(b)
	s := alloc(b, backend.Shape{1, 8, 1024, 1024})
	flops := 4.0 * 8 * 1024 * 1024 * 64
	for _, tier := range Tiers() {
		be, ctx := open(b, Options{Tier: tier}), b.Context()
		for _, stage := range []struct {
			name  string
			flops float64
			do    func() error
		}{
			{"qk", flops / 2, func() error { return be.QK(ctx, s, call.Q, call.K) }},
			{"softmax", 0, func() error { return be.Softmax(ctx, s, backend.Tensor{}, &call.Problem) }},
			{"pv", flops / 2, func() error { return be.PV(ctx, call.O, s, call.V) }},
			{"fused", flops, func() error { return be.Attention(ctx, call) }},
		} {
			b.Run(tier+"/"+stage.name, func(b *testing.B) {
				for b.Loop() {
					if err := stage.do(); err != nil {
						b.Fatal(err)
					}
				}
				if stage.flops > 0 {
					b.ReportMetric(stage.flops*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
				}
			})
		}
	}
}
