package speed

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// BenchmarkBackward measures gradients of q, k and v: 2.5 times the operations of the
// forward call.
func BenchmarkBackward(b *testing.B) {
	for _, r := range []row{
		{sq: 1024, dim: 64, want: [2]float64{78, 78}},
		{sq: 4096, dim: 64, want: [2]float64{78, 78}},
		{sq: 8192, dim: 64, want: [2]float64{78, 78}},
		{sq: 1024, dim: 128, want: [2]float64{78, 78}},
		{sq: 4096, dim: 128, want: [2]float64{78, 78}},
		{name: "causal", sq: 4096, dim: 64, option: causal, want: [2]float64{72, 72}},
		{name: "causal", sq: 4096, dim: 128, option: causal, want: [2]float64{72, 72}},
		{heads: 1, sq: 4096, dim: 64},
		{name: "bias", sq: 2048, dim: 64, option: bias(1, kernels.F32)},
		{name: "softcap", sq: 2048, dim: 64, option: softcap},
		{name: "f16", sq: 2048, dim: 64, dtype: kernels.F16},
	} {
		r.backward = true
		for threads := range min(2, runtime.GOMAXPROCS(0)) {
			b.Run(fmt.Sprintf("%s/threads%d", r.label(), threads+1), func(b *testing.B) { r.bench(b, threads+1) })
		}
	}
}

// BenchmarkGradients is BenchmarkOptions for gradients of q, k and v, and for those of
// options.
func BenchmarkGradients(b *testing.B) {
	const heads, s = 8, 2048
	base := row{sq: s, dim: 64, backward: true}
	rows := optionRows(base, 60)
	for _, g := range []struct {
		name    string
		do      option
		request func(g *backend.Gradients)
	}{
		{"dbias/BHSqSk", bias(heads, kernels.F32), func(g *backend.Gradients) { g.DBias = random(12, kernels.Shape{1, heads, s, s}) }},
		{"dbias/SqSk", bias(1, kernels.F32), func(g *backend.Gradients) { g.DBias = random(12, kernels.Shape{1, 1, s, s}) }},
		{"dbias/HSk", bias(heads, kernels.F32), func(g *backend.Gradients) { g.DBias = random(12, kernels.Shape{1, heads, 1, s}) }},
		{"drelative/H", relative, func(g *backend.Gradients) { g.DRelative = random(12, kernels.Shape{1, heads, 1, 2*s - 1}) }},
		{"drelative/1", relative, func(g *backend.Gradients) { g.DRelative = random(12, kernels.Shape{1, 1, 1, 2*s - 1}) }},
		{"dslopes", alibi, func(g *backend.Gradients) { g.DSlopes = random(12, kernels.Shape{1, heads, 1, 1}) }},
		{"dsinks", func(c *backend.Call) { c.Sinks = make([]float32, heads) }, func(g *backend.Gradients) { g.DSinks = random(12, kernels.Shape{1, heads, 1, 1}) }},
		{"heads8on2", func(c *backend.Call) { shareHeads(c, 2) }, nil},
		{"heads8on1", func(c *backend.Call) { shareHeads(c, 1) }, nil},
	} {
		r := base.with(namedOption{name: g.name, do: g.do}, 60)
		r.gradients = g.request
		rows = append(rows, r)
	}
	for _, r := range rows {
		b.Run(r.label(), func(b *testing.B) { r.bench(b, 1) })
	}
	for _, g := range regions {
		b.Run(g.name+"/s2048d64", func(b *testing.B) { benchRegions(b, g.options, true) })
	}
}

// shareHeads replaces keys and values by those of n heads.
func shareHeads(c *backend.Call, n int) {
	shape := c.K.Shape()
	shape[kernels.Heads] = n
	c.K, c.V = random(2, shape), random(3, shape)
}
