package backendtest

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"pgregory.net/rapid"
)

// testExtremes compares random problems at the limits that [backend.Problem] states with the
// oracle, fused and by stages: elements, scores, values, scales and softcaps of any size.
func testExtremes(t *testing.T, dev *kernels.Device, n int) {
	check(t, n, func(rt *rapid.T) {
		power := func(name string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(rt, name) }
		c := Case{Name: "extremes", Seed: uint64(power("seed", 0, 1000)),
			Dims: kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1,
				SeqQ: rapid.SampledFrom([]int{1, 40}).Draw(rt, "sq"), SeqK: rapid.SampledFrom([]int{1, 9, 200}).Draw(rt, "sk"), Dim: 16, ValueDim: 16},
			Options: kernels.Options{Causal: rapid.Bool().Draw(rt, "causal")}}
		scale := power("scale", -60, 60)
		c.Options.Scale = new(math.Ldexp(1, scale))
		factor := scale
		if rapid.Bool().Draw(rt, "capped") && !lacking(dev, "softcap") {
			softcap := power("softcap", max(-60, scale-60), 60)
			c.Options.Softcap = math.Ldexp(1, softcap)
			factor = max(scale, scale-softcap)
		}
		b := c.build()
		q := power("q", -60, 60)
		k := power("k", -60, min(60, 120-4-q-max(0, factor))) // 2^4 products
		stretch(b.q.data, q)
		stretch(b.k.data, k)
		stretch(b.v.data, power("v", -60, 60-8)) // at most 2^8 values
		on := b.on(t, dev)
		defer on.release()
		for _, how := range []how{fused, staged} {
			a, err := on.run(t, how)
			a.weights = nil // a relative bound is infinite where scores are huge
			if err == nil {
				err = b.compare(a)
			}
			if err != nil {
				rt.Fatalf("%v, scale 2^%d, softcap %g, q to 2^%d, k to 2^%d: %v: %v", how, scale, c.Options.Softcap, q, k, b.Case, err)
			}
		}
	})
}

// stretch multiplies x by the power of two with which its largest magnitude is at most 2^to.
func stretch(x []float32, to int) {
	most := 0.0
	for _, y := range x {
		most = max(most, math.Abs(float64(y)))
	}
	_, at := math.Frexp(most)
	for i, y := range x {
		x[i] = float32(math.Ldexp(float64(y), to-at))
	}
}
