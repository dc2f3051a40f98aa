package kernelstest

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// eachScore returns a score mod that calls f, and its derivative, for each score and key. wgsl has the same as
// expressions.
func eachScore(f, derivative func(s float32, j int, at kernels.Position) float32, values []float32, wgsl [2]string) *kernels.ScoreMod {
	over := func(f func(s float32, j int, at kernels.Position) float32) func([]float32, kernels.Position) {
		return func(scores []float32, at kernels.Position) {
			for n, s := range scores {
				scores[n] = f(s, at.Key+n, at)
			}
		}
	}
	return &kernels.ScoreMod{Go: over(f), Derivative: over(derivative), Values: values,
		WGSL: "return " + wgsl[0] + ";", WGSLDerivative: "return " + wgsl[1] + ";"}
}

func derivativeOne(float32, int, kernels.Position) float32 { return 1 }

// linearMod adds a slope for each head times the distance of key and row.
func linearMod(slopes []float32) *kernels.ScoreMod {
	return eachScore(func(s float32, j int, at kernels.Position) float32 {
		return s + float32(at.Values[at.Head]*float32(j-at.Row))
	}, derivativeOne, slopes, [2]string{"score + value(h) * f32(i32(j - i))", "1.0"})
}

// capMod is a softcap.
func capMod(c float32) *kernels.ScoreMod {
	return eachScore(func(s float32, _ int, at kernels.Position) float32 {
		return at.Values[0] * float32(math.Tanh(float64(s/at.Values[0])))
	}, func(s float32, _ int, at kernels.Position) float32 {
		cosh := math.Cosh(float64(s / at.Values[0]))
		return float32(1 / (cosh * cosh))
	}, []float32{c}, [2]string{"value(0u) * precise_tanh(score / value(0u))", "1.0 - precise_tanh(score / value(0u)) * precise_tanh(score / value(0u))"})
}

// documentMod hides the keys of documents other than the row's. Values has the document of each key.
func documentMod(documents []float32) *kernels.ScoreMod {
	return eachScore(func(s float32, j int, at kernels.Position) float32 {
		if at.Row < 0 || at.Row >= len(at.Values) || at.Values[j] != at.Values[at.Row] {
			return float32(math.Inf(-1))
		}
		return s
	}, derivativeOne, documents, [2]string{"select(hidden(), score, i < values() && value(i) == value(j))", "1.0"})
}

// placeMod reads all of a position.
func placeMod() *kernels.ScoreMod {
	return eachScore(func(s float32, j int, at kernels.Position) float32 {
		n := (at.Batch*5 + at.Head*3 + at.Row*7 + j) % len(at.Values)
		return s*-0.75 + at.Values[max(n, -n)]
	}, func(float32, int, kernels.Position) float32 { return -0.75 }, []float32{0.5, -1, 2, 0, 1.5, -2.5, 3},
		[2]string{"score * -0.75 + value(u32(abs(i32(b * 5u + h * 3u + i * 7u + j) % 7)))", "-0.75"})
}

// drawnMods are the score mods of random cases.
func drawnMods(c *Case) []*kernels.ScoreMod {
	documents := make([]float32, c.SeqK)
	for j := range documents {
		documents[j] = float32(j / 9)
	}
	return []*kernels.ScoreMod{linearMod(slopes(c.Heads)), capMod(3), documentMod(documents), placeMod()}
}

// scoreMod returns the score mod of a row for the oracle.
func (b *built) scoreMod(batch, h, i int) (f, derivative func(j int, s float32) float32) {
	m := b.Options.ScoreMod
	if m == nil {
		return nil, nil
	}
	n, _, keys := b.sequence(batch, i)
	at := kernels.Position{Batch: n, Head: h, Row: b.position(batch, i) - keys.lo, Values: m.Values}
	of := func(f func([]float32, kernels.Position)) func(j int, s float32) float32 {
		return func(j int, s float32) float32 {
			here, one := at, []float32{s}
			here.Key = j - keys.lo
			f(one, here)
			return one[0]
		}
	}
	return of(m.Go), of(m.Derivative)
}

// builtIn is a case with an option, and the score mod that does the same.
type builtIn struct {
	name string
	c    Case
	mod  *kernels.ScoreMod
}

// builtIns returns cases of lengths d.
func builtIns(d kernels.Dims, opt kernels.Options) []builtIn {
	with := func(name string, set func(c *Case)) Case {
		c := Case{Name: name, Dims: d, Options: opt, Seed: 5}
		set(&c)
		return c
	}
	// Rows and keys of a causal call lie on one side of each other.
	slopes := slopes(d.Heads)
	distances := make([]float32, d.Heads)
	copy(distances, slopes)
	alibi := with("alibi", func(c *Case) { c.Options.ALiBi, c.Options.Causal = slopes, true })
	relative := with("relative bias", func(c *Case) { c.RelativeShape = backend.Shape{1, d.Heads, 1, d.SeqQ + d.SeqK - 1} })
	table, all := relative.build().relative.data, d.SeqQ+d.SeqK-1
	first := 0 // position of row 0
	if opt.Align == kernels.LowerRight {
		first = d.SeqK - d.SeqQ
	}
	documents, ends := make([]float32, d.SeqK), []int{d.SeqK / 3, 1, d.SeqK / 2, 2, d.SeqK, 3}
	keys := ids(d.SeqK, ends...)
	for j := range documents {
		documents[j] = float32(keys[0][j])
	}
	return []builtIn{
		{"alibi", alibi, linearMod(distances)},
		{"relative bias", relative, eachScore(func(s float32, j int, at kernels.Position) float32 {
			return s + at.Values[at.Head*all+j-(at.Row-first)+d.SeqQ-1]
		}, derivativeOne, table, [2]string{fmt.Sprintf("score + value(h * %du + j - i + %du)", all, first+d.SeqQ-1), "1.0"})},
		{"softcap", with("softcap", func(c *Case) { c.Options.Softcap = 2 }), capMod(2)},
		{"documents, softcap", with("documents, softcap", func(c *Case) {
			c.Options.Softcap, c.Options.KSegments = 2, keys
			c.Options.QSegments = [][]int32{keys[0][first : first+d.SeqQ]}
		}), documentMod(documents)},
		{"documents", with("documents", func(c *Case) {
			c.Options.KSegments = keys
			c.Options.QSegments = [][]int32{keys[0][first : first+d.SeqQ]}
			c.PoisonK, c.PoisonV = map[int]float32{1: float32(math.NaN())}, map[int]float32{2: float32(math.Inf(1)), d.SeqK - 1: float32(math.NaN())}
		}), documentMod(documents)},
	}
}

// testScoreMods compares score mods that do what an option does with the reference of that option,
// and random ones with their own.
func testScoreMods(t *testing.T, dev *kernels.Device, h Harness) {
	needsAll(t, dev, "score mod")
	lower := kernels.Options{Align: kernels.LowerRight}
	q8 := backend.Q8
	for i, of := range []struct {
		name string
		d    kernels.Dims
		opt  kernels.Options
		set  func(c *Case)
	}{
		{"prefill", dims(2, 4, 2, 70, 70, 16, 24), kernels.Options{}, nil},
		{"prefill, over several key blocks", dims(1, 2, 1, 150, 300, 32, 32), lower, nil},
		{"few rows", dims(2, 6, 2, 3, 200, 24, 16), lower, nil},
		{"decode", dims(2, 4, 2, 1, 300, 64, 64), lower, nil},
		{"small", dims(3, 2, 2, 2, 9, 8, 8), lower, nil},
		{"bf16", dims(1, 2, 2, 40, 140, 32, 32), lower, func(c *Case) { c.DType, c.Layout = backend.BF16, BSHD }},
		{"low precision", dims(1, 2, 2, 40, 140, 32, 32), lower, func(c *Case) { c.DType, c.Options.LowPrecision = backend.BF16, true }},
		{"q8 decode in low precision", dims(1, 4, 1, 1, 140, 64, 64), lower, func(c *Case) { c.Keys, c.Options.LowPrecision = &q8, true }},
		{"pages", dims(2, 4, 2, 70, 150, 32, 32), lower, func(c *Case) { c.PageSize = 16 }},
		{"pages, decode", dims(2, 4, 2, 1, 150, 32, 32), lower, func(c *Case) { c.PageSize = 16 }},
	} {
		all := builtIns(of.d, of.opt)
		for j, x := range all {
			if !h.takes(i*len(all) + j) {
				continue
			}
			if of.set != nil {
				of.set(&x.c)
			}
			t.Run(of.name+"/"+x.name, func(t *testing.T) { x.test(t, dev) })
		}
	}
	t.Run("large", func(t *testing.T) { // maxima of scores before the function would overflow
		c := Case{Name: "large", Dims: dims(1, 2, 1, 70, 150, 16, 16), Seed: 3}
		c.Options.ScoreMod = eachScore(func(s float32, _ int, _ kernels.Position) float32 { return s + 500 }, derivativeOne, nil, [2]string{"score + 500.0", "1.0"})
		testCase(t, dev, c, new(digests))
	})
	t.Run("visible keys alone", func(t *testing.T) {
		c := Case{Name: "visible", Dims: dims(2, 2, 1, 70, 150, 16, 16), Seed: 4, Options: kernels.Options{Causal: true, Align: kernels.LowerRight, KLen: []int{150, 90}}}
		c.Options.ScoreMod = eachScore(func(s float32, j int, at kernels.Position) float32 { // a table of distances ends at the diagonal
			return s + at.Values[at.Row-j]
		}, derivativeOne, make([]float32, 150), [2]string{"score + value(i - j)", "1.0"})
		testCase(t, dev, c, new(digests))
		if implements[backend.Differentiator](dev) {
			noError(t, CheckGradients(t, dev, c))
		}
	})
	t.Run("refused", func(t *testing.T) { testModRefused(t, dev) })
	t.Run("positions", func(t *testing.T) { testModPositions(t, dev, h) })
}

// test runs the call with the score mod in place of the option, and compares it with the reference of the option.
func (x *builtIn) test(t *testing.T, dev *kernels.Device) {
	needs(t, dev, x.c)
	b := x.c.build()
	on := b.on(t, dev)
	defer on.release()
	opt := &on.opt
	opt.ScoreMod, opt.ALiBi, opt.RelativeBias, opt.QSegments, opt.KSegments = x.mod, nil, backend.Tensor{}, nil, nil
	if x.name == "softcap" {
		opt.Softcap = 0
	}
	for _, how := range []how{fused, staged, weighed} {
		if how != fused && (b.keyType().Quantised() || b.PageSize > 0 || opt.LowPrecision) {
			break
		}
		if err := b.compare(on.mustRun(t, how)); err != nil {
			t.Errorf("%v: %v: %v", how, x.c, err)
		}
	}
	if b.PageSize > 0 || opt.LowPrecision || !implements[backend.Differentiator](dev) {
		return
	}
	f := on.forward(t)
	var got gradients
	grads := must(f.call.AllocGradients(t.Context(), f.call.Gradients().Operands()))(t)
	defer grads.Release()
	noError(t, f.call.Backward(t.Context(), grads, f.d, f.r))
	for n, g := range []backend.Tensor{grads.Q, grads.K, grads.V} {
		got[n] = read(t, dev, g)
	}
	sums := f.differentiate(f.do, f.dlse)
	own := *b // without gradients of the option, in the dtypes of the operands
	own.Options.ALiBi, own.RelativeShape, own.Seed = nil, backend.Shape{}, 1
	sums[4], sums[5] = nil, nil
	if _, err := own.compareGradients(got, sums); err != nil {
		t.Errorf("%v: %v", x.c, err)
	}
}

// testModPositions runs a score mod that reads all of a position, in calls that are divided into
// several, forward and backward. Paths that take part of the long lists take two of the eight.
func testModPositions(t *testing.T, dev *kernels.Device, h Harness) {
	d := dims(2, 2, 1, 41, 41, 16, 16)
	for i, opt := range []kernels.Options{
		{}, {Causal: true, Align: kernels.LowerRight, Offset: []int{-3}}, {Offset: []int{5, -9}}, {Causal: true, Prefix: []int{9, 30}},
		{QSegments: ids(41, 12, 1, 41, 2)}, {CuQ: []int{0, 7, 7, 41}, CuK: []int{0, 20, 22, 41}}, {Softcap: 2, KLen: []int{41, 13}},
		{Causal: true, ALiBi: slopes(2), Dropout: kernels.Dropout{P: 0.3, Seed: 9}},
	} {
		if h.every() > 1 && i%4 != h.Extent.PairsFrom%4 {
			continue
		}
		c := Case{Name: fmt.Sprint("positions ", i), Dims: d, Options: opt, Seed: uint64(i)}
		if opt.CuQ != nil {
			c.Batch = 1
		}
		c.Options.ScoreMod = placeMod()
		needs(t, dev, c)
		on := c.build().on(t, dev)
		if err := on.compare(on.mustRun(t, fused)); err != nil {
			t.Errorf("%v: %v", c, err)
		}
		call := prepare(t, dev, on.q.view, on.k.view, on.v.view, on.opt)
		out := must(call.Run(t.Context()))(t)
		report := must(call.Check(t.Context(), out, kernels.CheckOptions{}))(t)
		if !report.OK() {
			t.Errorf("%v: Check: %+v", c, report)
		}
		out.Release()
		on.release()
		if !implements[backend.Differentiator](dev) {
			continue
		}
		if err := CheckGradients(t, dev, c); err != nil {
			t.Error(err)
		}
	}
}

// testModRefused: what a score mod cannot do is an error by name.
func testModRefused(t *testing.T, dev *kernels.Device) {
	c := Case{Name: "refused", Dims: dims(1, 2, 1, 5, 9, 8, 8), Options: kernels.Options{ScoreMod: placeMod()}}
	on := c.build().on(t, dev)
	defer on.release()
	says := func(call, text string, err error) {
		if !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: error is %v, should be %v with %q", call, err, backend.ErrUnsupported, text)
		}
	}
	if implements[backend.Scorer](dev) {
		says("Scores", "ScoreMod is set", errorOf(dev.Scores(t.Context(), on.q.view, on.k.view, kernels.Capped, on.opt)))
	}
	if !implements[backend.Differentiator](dev) {
		return
	}
	on.opt.ScoreMod = &kernels.ScoreMod{Go: on.opt.ScoreMod.Go, WGSL: on.opt.ScoreMod.WGSL, Values: on.opt.ScoreMod.Values}
	x := on.forward(t)
	_, err := x.backward(t)
	says("Backward", "Derivative is nil", err)
	says("PlanBackward", "Derivative is nil", errorOf(x.call.PlanBackward(t.Context(), x.call.Gradients())))
}
