package cpu

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// reference returns the outputs and log-sum-exps of c, a call with one batch, computed
// in float64.
func reference(t *testing.T, c *backend.Call) (o, lse []float32) {
	t.Helper()
	d := c.Dims()
	open := func(x backend.Tensor) *strided.Tensor {
		v := strided.Of(&x)
		return &v
	}
	kernels := vec.Tiers()[0]
	q, k, v := open(c.Q), open(c.K), open(c.V)
	mask, bias, relative, blocks := open(c.Mask), open(c.Bias), open(c.Relative), open(c.Blocks)
	for h := range d.Heads {
		hk := h / (d.Heads / d.KVHeads)
		keys, values := make([]float32, d.SeqK*d.Dim), make([]float32, d.SeqK*d.ValueDim)
		k.Load(kernels, keys, d.Dim, 0, hk, 0, d.SeqK, 0, d.Dim)
		v.Load(kernels, values, d.ValueDim, 0, hk, 0, d.SeqK, 0, d.ValueDim)
		for i := range d.SeqQ {
			lo, hi := c.Visible.Range(0, i, d.SeqK)
			r := oracle.Row{Q: make([]float32, d.Dim), K: keys, V: values, Dv: d.ValueDim, Scale: c.Scale, Softcap: c.Softcap,
				Hidden: func(j int) bool {
					return j < lo || j >= hi ||
						!mask.IsZero() && !mask.Bools[mask.Index(0, h, i)+j*mask.Stride[backend.Dim]] ||
						!blocks.IsZero() && !blocks.Bools[blocks.Index(0, h, i/c.BlockQ)+j/c.BlockK*blocks.Stride[backend.Dim]]
				}}
			q.Load(kernels, r.Q, d.Dim, 0, h, i, 1, 0, d.Dim)
			if !bias.IsZero() {
				r.Bias = func(j int) float64 { return float64(bias.At(0, h, i, j)) }
			}
			if !relative.IsZero() {
				r.Relative = func(j int) float64 { return float64(relative.At(0, h, 0, j-i+d.SeqQ-1)) }
			}
			if c.Slopes != nil {
				r.Slope = float64(c.Slope(0, h, d.Heads))
				r.Distance = func(j int) float64 { return math.Abs(float64(i + c.Visible.Offset - j)) }
			}
			if c.Sinks != nil {
				r.Sink = &c.Sinks[h]
			}
			if c.Dropout.P > 0 {
				r.Keeps = func(j int) bool { return c.Dropout.Keeps(0, h, i, j) }
				r.KeepFactor = float64(c.Dropout.Factor())
			}
			a := oracle.Solve(r)
			for _, x := range a.O {
				o = append(o, float32(x))
			}
			lse = append(lse, float32(a.LSE))
		}
	}
	return o, lse
}

// compareTiers fails when a tier's outputs or log-sum-exps of c are not near the
// reference. It allocates the results.
func compareTiers(t *testing.T, what string, threads int, c backend.Call) {
	t.Helper()
	wantO, wantLSE := reference(t, &c)
	d := c.Dims()
	for _, tier := range Tiers() {
		c.O, c.LSE = alloc(t, backend.Shape{1, d.Heads, d.SeqQ, d.ValueDim}), alloc(t, backend.Shape{1, d.Heads, d.SeqQ, 1})
		must.Do(t, open(t, Options{Tier: tier, Threads: threads}).Attention(t.Context(), &c))
		o := floats(t, c.O)
		lse := floats(t, c.LSE)
		near(t, tier+", "+what, o, wantO)
		near(t, tier+", lse, "+what, lse, wantLSE)
	}
}
