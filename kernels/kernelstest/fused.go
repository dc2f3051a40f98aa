package kernelstest

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// testCases runs every named case, fused and by stages.
func testCases(t *testing.T, dev *kernels.Device, h Harness, bits *digests) {
	for n, c := range Cases() {
		if !h.take(n%max(1, h.Extent.CasesEvery) == 0) {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			testCase(t, dev, c, bits)
		})
	}
}

func testCase(t testing.TB, dev *kernels.Device, c Case, bits *digests) {
	t.Helper()
	b := c.build()
	on := b.on(t, dev)
	defer on.release()
	for _, how := range []how{fused, staged} {
		if how == staged && (c.keyType().Quantised() || c.PageSize > 0 || c.Options.LowPrecision) {
			return // the stages take none of these
		}
		a := on.mustRun(t, how)
		bits.see(t, c, how, a)
		if err := b.compare(a); err != nil {
			t.Errorf("%v: %v: %v", how, c, err)
		}
	}
}

// edges are lengths around the multiples of powers of two, where tiles begin and end.
var edges = []int{1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 385, 511, 512, 513}

// largeScores returns cases in which rounding moves scores by more than they differ. From 2^23 on the LSE may be so far
// below a score that exp(score - LSE) exceeds 1, and from 2^30 on is infinite.
func largeScores() (cases []Case) {
	for n, exponent := range []int{20, 25, 31, 60} {
		gain := math.Ldexp(1, exponent)
		// Times log2 e and ln 2 in float32, the first and the last become less.
		sinks := []float32{float32(5.7 * gain), float32(math.Inf(-1)), float32(0.9 * gain), float32(7.2 * gain)}
		cases = append(cases,
			Case{Name: fmt.Sprintf("scores of 2^%d", exponent), Dims: dims(1, 4, 2, 33, 40, 8, 8), Gain: gain, Seed: uint64(n), Options: kernels.Options{Causal: true}},
			Case{Name: fmt.Sprintf("scores of 2^%d, few rows, sinks", exponent), Dims: dims(2, 4, 4, 3, 40, 8, 8), Gain: gain, Seed: uint64(n), Options: kernels.Options{Sinks: sinks}})
	}
	return cases
}

// testEdges runs numbers of queries and keys on both sides of every tile edge, also causal, and the largest scores.
func testEdges(t *testing.T, dev *kernels.Device, h Harness) {
	for _, c := range largeScores() {
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			testCase(t, dev, c, new(digests))
		})
	}
	for i, n := range edges {
		if !h.edge(i) {
			continue
		}
		for _, c := range []Case{
			{Name: "sq", Dims: kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: n, SeqK: 70, Dim: 12, ValueDim: 12}},
			{Name: "sk", Dims: kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 35, SeqK: n, Dim: 12, ValueDim: 12}},
			{Name: "sq = sk", Dims: kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: n, SeqK: n, Dim: 8, ValueDim: 8}, Options: kernels.Options{Causal: true}},
		} {
			c.Name = fmt.Sprintf("%s %d", c.Name, n)
			c.Seed = uint64(i)
			t.Run(c.Name, func(t *testing.T) { testCase(t, dev, c, new(digests)) })
		}
	}
}

// testHeadSizes runs D and Dv on both sides of every tile edge, and the sizes of absorbed multi-head latent attention,
// with enough rows for prefill and, at some sizes, few enough for decoding.
func testHeadSizes(t *testing.T, dev *kernels.Device, h Harness) {
	for i, d := range append(edges, 80, 112, 576) {
		if !h.edge(i) {
			continue
		}
		cases := []Case{
			{Name: "D", Dims: kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 21, SeqK: 40, Dim: d, ValueDim: d}},
			{Name: "Dv", Dims: kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 21, SeqK: 40, Dim: 5, ValueDim: d}},
		}
		if d%16 == 0 || d == 129 { // sizes that fill their tiles and one that does not
			cases = append(cases, Case{Name: "decode D", Dims: kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 4, SeqK: 40, Dim: d, ValueDim: d}})
		}
		for _, c := range cases {
			c.Name, c.Seed = fmt.Sprintf("%s %d", c.Name, d), uint64(i)
			t.Run(c.Name, func(t *testing.T) {
				if h.Extent.LargeHeads != backend.ErrUnsupported || d <= 256 {
					testCase(t, dev, c, new(digests))
					return
				}
				b := c.build()
				on := b.on(t, dev)
				defer on.release()
				a, err := on.run(t, fused)
				switch {
				case errors.Is(err, backend.ErrUnsupported):
					t.Logf("refused: %v", err)
				case err != nil:
					t.Errorf("%v: %v", c, err)
				default:
					if err := b.compare(a); err != nil {
						t.Errorf("%v: %v", c, err)
					}
				}
			})
		}
	}
}

// drawCase draws a problem with a random combination of options.
func drawCase(t *rapid.T) Case {
	n := func(name string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t, name) }
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	seldom := func(name string) bool { return n(name, 0, 3) == 0 }
	c := Case{Name: "drawn"}
	kvh, group := n("kv heads", 1, 3), n("group", 1, 3)
	c.Dims = kernels.Dims{
		Batch: n("batch", 1, 2), Heads: kvh * group, KVHeads: kvh,
		SeqQ: n("sq", 1, 70), SeqK: n("sk", 1, 140), Dim: n("d", 1, 72),
	}
	c.ValueDim = c.Dim
	if seldom("dv differs") {
		c.ValueDim = n("dv", 1, 72)
	}
	dtypes := []backend.DType{backend.F32, backend.F32, backend.F16, backend.BF16}
	c.DType = rapid.SampledFrom(dtypes).Draw(t, "dtype")
	c.Layout = Layout(n("layout", 0, 3))
	c.Seed = uint64(n("seed", 0, 1<<20))
	o := &c.Options
	o.Causal = yes("causal")
	if seldom("window") {
		o.Window = &kernels.Window{Left: n("left", 0, 50), Right: n("right", 0, 50)}
	}
	if yes("lower right") {
		o.Align = kernels.LowerRight
	}
	if seldom("offset?") {
		o.Offset = []int{n("offset", -40, 40)}
	}
	if seldom("offsets?") {
		var all []int
		for range c.Batch {
			all = append(all, n("offsets", -40, 40))
		}
		if o.Offset != nil {
			all = moved(all, o.Offset[0])
		}
		o.Offset = all
	}
	if seldom("scale?") {
		o.Scale = new(rapid.SampledFrom([]float64{0, 1, -0.25, 0.1}).Draw(t, "scale"))
	}
	if seldom("softcap?") {
		o.Softcap = rapid.SampledFrom([]float64{0.5, 5, 30}).Draw(t, "softcap")
	}
	if seldom("klen?") {
		for range c.Batch {
			o.KLen = append(o.KLen, n("klen", 0, c.SeqK))
		}
	}
	scores := backend.Shape{c.Batch, c.Heads, c.SeqQ, c.SeqK}
	broadcast := func(name string) backend.Shape {
		s := scores
		for axis := range s {
			if seldom(name) {
				s[axis] = 1
			}
		}
		if s[backend.Dim] > 2 && seldom(name+" is short") {
			s[backend.Dim] = n(name+" keys", 2, c.SeqK)
		}
		return s
	}
	if seldom("mask?") {
		c.MaskShape, c.HideRows = broadcast("mask"), yes("mask hides rows")
	}
	if seldom("bias?") {
		c.BiasShape, c.BiasHides = broadcast("bias"), yes("bias hides")
		c.BiasDType = rapid.SampledFrom(dtypes).Draw(t, "bias dtype")
	}
	if seldom("more?") {
		// One dtype and small heads, because a GPU compiles each other kernel for
		// seconds. Pairs combines dtypes and sizes with these options.
		c.DType, c.Dim, c.ValueDim = backend.F32, min(c.Dim, 32), min(c.ValueDim, 32)
		if yes("relative?") {
			c.RelativeShape = backend.Shape{1, c.Heads, 1, c.SeqQ + c.SeqK - 1}
			if c.BiasShape == (backend.Shape{}) {
				c.BiasDType = rapid.SampledFrom(dtypes).Draw(t, "relative dtype")
			}
		}
		if yes("blocks?") {
			size := n("block", 1, 40)
			c.BlockSize = size
			c.BlockShape = backend.Shape{1, c.Heads, (c.SeqQ + size - 1) / size, (c.SeqK + size - 1) / size}
		}
		if yes("alibi?") {
			o.ALiBi = slopes(c.Heads)
		}
		if yes("sinks?") {
			for range c.Heads {
				o.Sinks = append(o.Sinks, float32(n("sink", -5, 30)))
			}
		}
		if yes("score mod?") {
			mods := drawnMods(&c)
			o.ScoreMod = mods[n("score mod", 0, len(mods)-1)]
		}
		if yes("dropout?") {
			o.Dropout = kernels.Dropout{P: 0.4, Seed: c.Seed, First: [4]int{0, 0, n("first row", 0, 5), n("first key", 0, 5)}}
		}
	}
	if seldom("prefix?") {
		for range n("prefixes", 1, 2) / 2 * (c.Batch - 1) {
			o.Prefix = append(o.Prefix, n("prefix", 0, c.SeqK))
		}
		o.Prefix = append(o.Prefix, n("prefix", 0, c.SeqK))
	}
	if seldom("segments?") {
		// Ids grow along rows and along keys independently, so that some have no rows
		// and some no keys. Ids of keys change only between blocks.
		grow := func(name string, length, step int) []int32 {
			ids := make([]int32, length)
			id := int32(0)
			for i := range ids {
				if i%step == 0 && n(name, 0, 15) < min(step, 8) {
					id += int32(n(name, 1, 2))
				}
				ids[i] = id
			}
			return ids
		}
		for range n("lists", 1, 2)/2*(c.Batch-1) + 1 {
			o.QSegments = append(o.QSegments, grow("row's id", c.SeqQ, 1))
			o.KSegments = append(o.KSegments, grow("key's id", c.SeqK, max(c.BlockSize, 1)))
		}
	}
	poison := func(name string) map[int]float32 {
		if n(name+"?", 0, 7) > 0 {
			return nil
		}
		return map[int]float32{n(name, 0, c.SeqK-1): float32(math.NaN())}
	}
	c.PoisonK, c.PoisonV = poison("poison k"), poison("poison v")
	return c
}

// check runs a rapid property n times.
func check(t *testing.T, n int, property func(rt *rapid.T)) {
	t.Helper()
	for _, f := range []struct{ name, value string }{{"rapid.checks", fmt.Sprint(n)}, {"rapid.nofailfile", "true"}} {
		noError(t, setFlag(t, f.name, f.value))
	}
	rapid.Check(t, property)
}

// testDrawn compares random problems with the oracle, fused and by stages. With weights they
// have the output and the LSE of the fused call and the weights of the stages.
func testDrawn(t *testing.T, dev *kernels.Device, n int) {
	check(t, n, func(rt *rapid.T) {
		b := supported(dev, drawCase(rt)).build()
		on := b.on(t, dev)
		defer on.release()
		var answers [3]answer
		for _, how := range []how{fused, staged, weighed} {
			a, err := on.run(t, how)
			if err == nil {
				err = b.compare(a)
			}
			if err != nil {
				rt.Fatalf("%v: %v: %v", how, b.Case, err)
			}
			answers[how] = a
		}
		want := answers[fused]
		want.weights = answers[staged].weights
		if err := differ(want, answers[weighed]); err != nil {
			rt.Fatalf("with weights: %v: %v", b.Case, err)
		}
	})
}

// testAgainst compares two backends with each other on random problems. Each is within the bound of the exact result,
// so that they differ by at most twice the bound; NaN and fully masked rows are the same.
func testAgainst(t *testing.T, one, two *kernels.Device, n int) {
	check(t, n, func(rt *rapid.T) {
		b := supported(one, drawCase(rt)).build()
		var answers [2]answer
		for i, dev := range []*kernels.Device{one, two} {
			on := b.on(t, dev)
			a, err := on.run(t, fused)
			on.release()
			if err != nil {
				rt.Fatalf("%s: %v: %v", dev.Info().Name, b.Case, err)
			}
			answers[i] = a
		}
		x, y := answers[0], answers[1]
		var worst oracle.Worst
		b.eachRow(func(n, batch, h, i int, ref oracle.Answer) {
			for d := range ref.O {
				at := n*b.ValueDim + d
				worst.See(float64(x.o[at]), float64(y.o[at]), 2*ref.OBound[d], func() string { return fmt.Sprintf("o[%d,%d,%d,%d]", batch, h, i, d) })
			}
			worst.See(float64(x.lse[n]), float64(y.lse[n]), 2*ref.LSEBound, func() string { return fmt.Sprintf("lse[%d,%d,%d]", batch, h, i) })
		})
		if err := worst.Err(); err != nil {
			rt.Fatalf("%s against %s: %v: %v", one.Info().Name, two.Info().Name, b.Case, err)
		}
	})
}

// testGradientsAgainst compares the gradients of random problems on two backends with each other.
func testGradientsAgainst(t *testing.T, one, two *kernels.Device, n int) {
	for _, dev := range []*kernels.Device{one, two} {
		if !implements[backend.Differentiator](dev) {
			t.Skipf("%s has no gradients", dev.Info().Name)
		}
	}
	check(t, n, func(rt *rapid.T) {
		b := supported(one, drawCase(rt)).build()
		var got [2]gradients
		var x *differentiated
		for i, dev := range []*kernels.Device{one, two} {
			on := b.on(t, dev)
			x = on.forward(t)
			got[i] = x.mustBackward(t)
			on.release()
		}
		var worst oracle.Worst
		for n, sums := range x.differentiate(x.do, x.dlse) {
			for i := range sums {
				if ref := &sums[i]; !math.IsNaN(ref.Value) {
					worst.See(float64(got[0][n][i]), float64(got[1][n][i]), 2*ref.Bound(b.gradientType(n)), func() string {
						return fmt.Sprintf("%s, element %d", gradientNames[n], i)
					})
				}
			}
		}
		if err := worst.Err(); err != nil {
			rt.Fatalf("%s against %s: %v: %v", one.Info().Name, two.Info().Name, b.Case, err)
		}
	})
}

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
