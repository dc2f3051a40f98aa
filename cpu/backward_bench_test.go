package cpu

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// backwardCases are the rows of the table that BenchmarkBackward prints.
var backwardCases = []vectorCase{
	{name: "s1024d64", heads: 8, sq: 1024, dim: 64, want: [2]float64{78, 78}},
	{name: "s4096d64", heads: 8, sq: 4096, dim: 64, want: [2]float64{78, 78}},
	{name: "s8192d64", heads: 8, sq: 8192, dim: 64, want: [2]float64{78, 78}},
	{name: "s1024d128", heads: 8, sq: 1024, dim: 128, want: [2]float64{78, 78}},
	{name: "s4096d128", heads: 8, sq: 4096, dim: 128, want: [2]float64{78, 78}},
	{name: "s4096d64/causal", heads: 8, sq: 4096, dim: 64, window: -1, want: [2]float64{72, 72}},
	{name: "s4096d128/causal", heads: 8, sq: 4096, dim: 128, window: -1, want: [2]float64{72, 72}},
	{name: "h1s4096d64", heads: 1, sq: 4096, dim: 64},
	{name: "s2048d64/bias", heads: 8, sq: 2048, dim: 64, bias: true},
	{name: "s2048d64/softcap", heads: 8, sq: 2048, dim: 64, softcap: 20},
	{name: "s2048d64/f16", heads: 8, sq: 2048, dim: 64, dtype: backend.F16},
	{name: "s1024d64/gonum", heads: 8, sq: 1024, dim: 64, tier: tierGonum},
}

// BenchmarkBackward is BenchmarkVector for gradients of q, k and v: 2.5 times the operations
// of the forward call.
func BenchmarkBackward(b *testing.B) {
	for _, c := range backwardCases {
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/threads%d", c.name, threads), func(b *testing.B) {
				be, err := Open(Options{Threads: threads, Tier: c.tier})
				if err != nil {
					b.Skip(err)
				}
				defer be.Close()
				g := backwardOf(b, be, *c.call(b))
				p, err := be.PlanBackward(b.Context(), g)
				if err != nil {
					b.Fatal(err)
				}
				benchCeiling(b, c.want[threads-1], "GFLOP/s", float64(p.FLOPs),
					func() (float64, error) { return be.PeakFLOPS(b.Context()) },
					func() error { return be.Backward(b.Context(), g) })
			})
		}
	}
}

// benchCeiling measures calls of run, which does work operations or reads work bytes, and the
// ceiling in turns. It reports the median of their ratios in percent, next to want.
func benchCeiling(b *testing.B, want float64, unit string, work float64, ceiling func() (float64, error), run func() error) {
	b.Helper()
	if err := run(); err != nil {
		b.Fatal(err)
	}
	var shares, rates []float64
	for b.Loop() {
		most, err := ceiling()
		if err != nil {
			b.Fatal(err)
		}
		calls, start := 0, time.Now()
		for time.Since(start) < 40*time.Millisecond {
			if err := run(); err != nil {
				b.Fatal(err)
			}
			calls++
		}
		rate := work * float64(calls) / time.Since(start).Seconds()
		shares, rates = append(shares, 100*rate/most), append(rates, rate/1e9)
	}
	slices.Sort(shares)
	slices.Sort(rates)
	b.ReportMetric(shares[len(shares)/2], "%ofCeiling")
	b.ReportMetric(want, "%wanted")
	b.ReportMetric(rates[len(rates)/2], unit)
	b.ReportMetric(0, "ns/op")
}

// gradientCases are options with their gradients.
func gradientCases() []struct {
	say     string
	do      func(b *testing.B, c *backend.Call)
	request func(b *testing.B, g *backend.Gradients)
} {
	const heads, s = 8, 2048
	options := map[string]func(b *testing.B, c *backend.Call){}
	for _, o := range optionCases(2048, 2048) {
		options[o.say] = o.do
	}
	dBias := func(shape ...int) func(b *testing.B, g *backend.Gradients) {
		return func(b *testing.B, g *backend.Gradients) { g.DBias = alloc(b, backend.Shape(shape)) }
	}
	return []struct {
		say     string
		do      func(b *testing.B, c *backend.Call)
		request func(b *testing.B, g *backend.Gradients)
	}{
		{"dbias/BHSqSk", options["bias/f32/BHSqSk"], dBias(1, heads, s, s)},
		{"dbias/SqSk", options["bias/f32/SqSk"], dBias(1, 1, s, s)},
		{"dbias/HSk", options["bias/f32/BHSqSk"], dBias(1, heads, 1, s)},
		{"drelative/H", options["relative"], func(b *testing.B, g *backend.Gradients) { g.DRelative = alloc(b, backend.Shape{1, heads, 1, 2*s - 1}) }},
		{"drelative/1", options["relative"], func(b *testing.B, g *backend.Gradients) { g.DRelative = alloc(b, backend.Shape{1, 1, 1, 2*s - 1}) }},
		{"dslopes", options["alibi"], func(b *testing.B, g *backend.Gradients) { g.DSlopes = alloc(b, backend.Shape{1, heads, 1, 1}) }},
		{"dsinks", options["sinks"], func(b *testing.B, g *backend.Gradients) { g.DSinks = alloc(b, backend.Shape{1, heads, 1, 1}) }},
	}
}

// BenchmarkGradients is BenchmarkOptions for gradients of q, k and v, and for those of
// options: the rate of visible pairs in percent of that of plain attention.
//
//	go test -run '^$' -bench Gradients -benchtime 15x ./cpu
func BenchmarkGradients(b *testing.B) {
	bench := func(say string, do func(b *testing.B, c *backend.Call), request func(b *testing.B, g *backend.Gradients)) {
		b.Run(say, func(b *testing.B) {
			be := open(b, Options{Threads: 1})
			c := plain(b, 8, 2048, 64)
			base := backwardOf(b, be, *c)
			do(b, c)
			g := backwardOf(b, be, *c)
			if request != nil {
				request(b, g)
			}
			backward := func(g *backend.Gradients) func() error {
				return func() error { return be.Backward(b.Context(), g) }
			}
			benchAgainst(b, backward(base), backward(g), seenPairs(b, &base.Call), seenPairs(b, c))
			b.ReportMetric(60, "%wanted")
		})
	}
	for _, o := range optionCases(2048, 2048) {
		bench(o.say, o.do, nil)
	}
	for _, share := range []int{4, 8} {
		bench(fmt.Sprintf("heads8on%d", 8/share), func(b *testing.B, c *backend.Call) {
			shape := c.K.Shape()
			shape[backend.Heads] /= share
			c.K, c.V = random(b, 2, shape), random(b, 3, shape)
		}, nil)
	}
	for _, o := range gradientCases() {
		bench(o.say, o.do, o.request)
	}
	ids := make([]int32, 2048)
	for i := range ids {
		ids[i] = int32(i / 256)
	}
	for say, opt := range map[string]kernels.Options{
		"segments8": {QSegments: [][]int32{ids}}, "prefix1000": {Causal: true, Prefix: []int{1000}}, "packed8": {CuQ: []int{0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048}},
	} {
		b.Run(say, func(b *testing.B) { benchRegions(b, opt) })
	}
}

// benchRegions is BenchmarkGradients for options that the front computes by several calls.
func benchRegions(b *testing.B, opt kernels.Options) {
	be := open(b, Options{Threads: 1})
	c := plain(b, 8, 2048, 64)
	base := backwardOf(b, be, *c)
	opt.LSE = true
	call, err := kernels.NewDevice(be).Prepare(c.Q, c.K, c.V, opt)
	if err != nil {
		b.Fatal(err)
	}
	r, err := call.Run(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	grads, err := call.AllocGradients(b.Context(), true, false)
	if err != nil {
		b.Fatal(err)
	}
	plan, err := call.PlanBackward(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	benchAgainst(b, func() error { return be.Backward(b.Context(), base) },
		func() error { return call.Backward(b.Context(), grads, kernels.Result{O: base.DO}, r) }, seenPairs(b, &base.Call), float64(plan.Pairs))
	b.ReportMetric(60, "%wanted")
}
