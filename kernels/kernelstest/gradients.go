package kernelstest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
	"pgregory.net/rapid"
)

// gradients are the elements of gradients in row-major order, in the order of
// [backend.Gradients]; nil for those that a case lacks.
type gradients [7][]float32

var gradientNames = [7]string{"dq", "dk", "dv", "dbias", "drelative", "dslopes", "dsinks"}

// gradientShapes returns the shapes of the gradients; the zero Shape for those that the case lacks.
func (b *built) gradientShapes() [7]backend.Shape {
	s := [7]backend.Shape{b.q.shape, b.k.shape, b.v.shape, b.BiasShape, b.RelativeShape}
	if n := len(b.Options.ALiBi); n > 0 {
		s[5] = backend.Shape{n / b.Heads, b.Heads, 1, 1}
	}
	if b.Options.Sinks != nil {
		s[6] = backend.Shape{1, b.Heads, 1, 1}
	}
	return s
}

// gradientType returns the dtype of gradient n. Every other case has the operands' dtypes.
func (b *built) gradientType(n int) backend.DType {
	if n > 2 || b.Seed%2 == 0 {
		return backend.F32
	}
	return [3]operand{b.q, b.k, b.v}[n].dtype
}

// loss draws do and dlse, the gradients of the outputs. They are NaN in rows whose lse is -Inf. Every third case has no
// dlse. Every fifth case has a do in float32, some in the other 16-bit type, and the others in the dtype of q.
func (b *built) loss(lse []float32) (do, dlse operand) {
	rng := rand.New(rand.NewPCG(b.Seed, 0x67726164))
	draw := func(last int, dtype backend.DType) operand {
		o := drawn(rng, backend.Shape{b.Batch, b.Heads, b.SeqQ, last}, dtype)
		for i := range o.data {
			if math.IsInf(float64(lse[i/last]), -1) {
				o.data[i] = float32(math.NaN())
			}
		}
		return o
	}
	dtype := b.DType
	switch {
	case b.Seed%5 == 0:
		dtype = backend.F32
	case b.Seed%5 == 1 && dtype == backend.F16:
		dtype = backend.BF16
	case b.Seed%5 == 4 && dtype == backend.BF16:
		dtype = backend.F16
	}
	do = draw(b.ValueDim, dtype)
	b.edit("do", do)
	if b.Seed%3 > 0 {
		dlse = draw(1, backend.F32)
	}
	return do, dlse
}

// differentiate returns the exact gradients with their bounds.
func (b *built) differentiate(do, dlse operand) (sums [7][]oracle.Sum) {
	for n, s := range b.gradientShapes() {
		if s != (backend.Shape{}) {
			sums[n] = make([]oracle.Sum, s.Elements())
		}
	}
	d := b.Dims
	b.rows(func(n, batch, h, i int) {
		kv := (batch*d.KVHeads + h/(d.Heads/d.KVHeads)) * d.SeqK
		g := oracle.RowGradients{DQ: sums[0][n*d.Dim:][:d.Dim],
			DK: sums[1][kv*d.Dim:][:d.SeqK*d.Dim], DV: sums[2][kv*d.ValueDim:][:d.SeqK*d.ValueDim]}
		if sums[3] != nil {
			g.DBias = func(j int) *oracle.Sum { return &sums[3][broadcastIndex(b.BiasShape, batch, h, i, j)] }
		}
		if sums[4] != nil {
			g.DRelative = func(j int) *oracle.Sum {
				return &sums[4][broadcastIndex(b.RelativeShape, batch, h, 0, j-i+d.SeqQ-1)]
			}
		}
		if sums[5] != nil {
			s, _, _ := b.sequence(batch, i)
			g.DSlope = &sums[5][(s*d.Heads+h)%len(sums[5])]
		}
		if sums[6] != nil {
			g.DSink = &sums[6][h]
		}
		by := float32(0)
		if dlse.data != nil {
			by = dlse.data[n]
		}
		oracle.Differentiate(b.row(batch, h, i), do.data[n*d.ValueDim:][:d.ValueDim], by, g)
	})
	return sums
}

// compareGradients compares gradients with the exact ones.
func (b *built) compareGradients(got gradients, sums [7][]oracle.Sum) (worst [7]oracle.Worst, err error) {
	for n, s := range b.gradientShapes() {
		if len(got[n]) != len(sums[n]) {
			return worst, fmt.Errorf("%s has %d elements, should have %d", gradientNames[n], len(got[n]), len(sums[n]))
		}
		for i, x := range got[n] {
			if ref := &sums[n][i]; !math.IsNaN(ref.Value) { // NaN is unspecified
				worst[n].See(float64(x), ref.Value, ref.Bound(b.gradientType(n)), func() string {
					return fmt.Sprintf("%s of shape %v, element %d", gradientNames[n], s, i)
				})
			}
		}
		err = cmp.Or(err, worst[n].Err())
	}
	return worst, err
}

// differentiated is a case on a device with the results of the forward pass and of a loss.
type differentiated struct {
	*onDevice
	call     *kernels.Call
	r, d     kernels.Result
	do, dlse operand
}

// forward runs the forward pass of the case and draws a loss.
func (o *onDevice) forward(tb testing.TB) *differentiated {
	tb.Helper()
	opt := o.opt
	opt.LSE = true
	x := &differentiated{onDevice: o, call: prepare(tb, o.dev, o.q.view, o.k.view, o.v.view, opt)}
	out, lse := o.outputs(tb)
	o.held = append(o.held, out.all, lse.all)
	x.r = kernels.Result{O: out.view, LSE: lse.view}
	if err := x.call.RunInto(tb.Context(), x.r); err != nil {
		tb.Fatalf("%v: %v", o.Case, err)
	}
	x.do, x.dlse = o.loss(lse.get(tb, o.dev, "lse"))
	f := put(tb, o.dev, x.do, o.Layout)
	o.held = append(o.held, f.all)
	x.d.O = f.view
	if x.dlse.data != nil {
		f := put(tb, o.dev, x.dlse, o.Layout)
		o.held = append(o.held, f.all)
		x.d.LSE = f.view
	}
	return x
}

// backward computes gradients of the case, in its layout: those that are listed, or all.
func (x *differentiated) backward(tb testing.TB, only ...int) (got gradients, err error) {
	tb.Helper()
	var grads kernels.Gradients
	var out [7]flat
	for n, to := range []*backend.Tensor{&grads.Q, &grads.K, &grads.V, &grads.Bias, &grads.RelativeBias, &grads.ALiBi, &grads.Sinks} {
		if s := x.gradientShapes()[n]; s != (backend.Shape{}) && (only == nil || slices.Contains(only, n)) {
			out[n] = x.blank(tb, s, x.gradientType(n))
			defer out[n].release()
			*to = out[n].view
		}
	}
	if err := x.call.Backward(tb.Context(), grads, x.d, x.r); err != nil {
		return got, err
	}
	for n, f := range out {
		if !f.view.IsZero() {
			got[n] = f.get(tb, x.dev, gradientNames[n])
		}
	}
	return got, nil
}

// mustBackward is backward for problems that every backend supports.
func (x *differentiated) mustBackward(tb testing.TB) gradients {
	tb.Helper()
	got, err := x.backward(tb)
	if err != nil {
		tb.Fatalf("%v: %v", x.Case, err)
	}
	return got
}

// checkGradients runs the case forward and backward and compares the gradients.
func checkGradients(tb testing.TB, dev *kernels.Device, c Case) (worst [7]oracle.Worst, err error) {
	on := c.build().on(tb, dev)
	defer on.release()
	x := on.forward(tb)
	got, err := x.backward(tb)
	if err == nil {
		worst, err = x.compareGradients(got, x.differentiate(x.do, x.dlse))
	}
	if err != nil {
		err = fmt.Errorf("%v: %w", c, err)
	}
	return worst, err
}

// CheckGradients runs the case forward and backward. It returns an error when a gradient is off by more than its bound.
func CheckGradients(tb testing.TB, dev *kernels.Device, c Case) error {
	_, err := checkGradients(tb, dev, c)
	return err
}

// testGradients compares the gradients of all cases and pairs of options, and of n random
// problems, with the oracle, and tests properties that need no reference.
func testGradients(t *testing.T, dev *kernels.Device, h Harness) {
	if !implements[backend.Differentiator](dev) {
		t.Skipf("%s has no gradients", dev.Info().Name)
	}
	var worst [7]oracle.Worst
	see := func(t interface{ Error(args ...any) }, of [7]oracle.Worst, err error) {
		if err != nil {
			t.Error(err)
		}
		for n := range of {
			worst[n].Off = max(worst[n].Off, of[n].Off)
			worst[n].Considered += of[n].Considered
		}
	}
	every, problems, sizes := h.every(), draws(h.Extent.Draws, 1000), []int{80, 96, 129, 256, 576}
	few := h.hurries()
	if few {
		every, problems, sizes = max(every, h.Extent.GradientsEvery), 5, sizes[:2] // rapid divides by 5
	}
	for n, c := range slices.Concat(Cases(), Pairs()) {
		if n%every == h.Extent.PairsFrom%every {
			t.Run(c.Name, func(t *testing.T) {
				needs(t, dev, c)
				of, err := checkGradients(t, dev, c)
				see(t, of, err)
			})
		}
	}
	for _, c := range append(largeScores(), []Case{
		{Name: "packed, one sequence has everything", Dims: dims(1, 2, 1, 5, 7, 8, 8), Seed: 1,
			Options: kernels.Options{CuQ: []int{0, 0, 5, 5}, CuK: []int{0, 0, 7, 7}, ALiBi: slopes(3 * 2)}},
		{Name: "packed, some are empty", Dims: dims(1, 4, 2, 9, 11, 8, 4), Seed: 2,
			Options: kernels.Options{CuQ: []int{0, 0, 5, 7, 9}, CuK: []int{0, 3, 7, 7, 11}, ALiBi: slopes(4 * 4), Sinks: []float32{1, 2, -3, 0}}},
		{Name: "no keys, sinks", Dims: dims(2, 2, 1, 5, 0, 8, 8), Seed: 4, Options: kernels.Options{Sinks: []float32{0.5, -2}}},
		{Name: "bias of rows, relative bias, alibi, over several chunks of keys", Dims: dims(2, 4, 2, 37, 1100, 16, 12), Seed: 8,
			BiasShape: backend.Shape{1, 4, 37, 1}, RelativeShape: backend.Shape{2, 1, 1, 1136}, Options: kernels.Options{ALiBi: slopes(4)}},
		{Name: "bias of keys over several chunks of them", Dims: dims(2, 4, 2, 37, 1100, 16, 12), Seed: 10, BiasShape: backend.Shape{1, 1, 1, 1100}},
	}...) {
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			of, err := checkGradients(t, dev, c)
			see(t, of, err)
		})
	}
	t.Run("drawn", func(t *testing.T) {
		check(t, problems, func(rt *rapid.T) {
			of, err := checkGradients(t, dev, supported(dev, drawCase(rt)))
			see(rt, of, err)
		})
	})
	for _, d := range sizes {
		if h.Extent.LargeHeads != backend.ErrUnsupported || d <= 256 {
			t.Run(fmt.Sprintf("head size %d", d), func(t *testing.T) {
				of, err := checkGradients(t, dev, Case{Name: "head size", Dims: dims(1, 2, 1, 21, 40, d, d), Seed: 6})
				if h.Extent.LargeHeads == backend.ErrMemory && d > 256 && errors.Is(err, backend.ErrMemory) {
					t.Skip(err)
				}
				see(t, of, err)
			})
		}
	}
	t.Run("same bits in any batch", func(t *testing.T) {
		needsAll(t, dev, "softcap")
		testGradientsInBatch(t, dev)
	})
	t.Run("key ranges", func(t *testing.T) {
		needsAll(t, dev, "alibi", "dropout")
		testGradientsOfRanges(t, dev)
	})
	t.Run("fully masked rows with an LSE of +Inf", func(t *testing.T) {
		needsAll(t, dev, "sinks")
		testGradientsUnseen(t, dev)
	})
	t.Run("add", func(t *testing.T) { testGradientsAdd(t, dev) })
	if !few {
		t.Run("one at a time", func(t *testing.T) {
			needsAll(t, dev, "bias", "relative bias", "alibi", "sinks")
			testGradientsAlone(t, dev)
		})
		t.Run("PyTorch", func(t *testing.T) { testTorchGradients(t, dev) })
	}
	for n, w := range worst {
		t.Logf("%s: %d elements, at most %.2g of the bound", gradientNames[n], w.Considered, w.Off)
	}
}

// testGradientsAlone requests each gradient without the others.
func testGradientsAlone(t *testing.T, dev *kernels.Device) {
	c := Case{Name: "alone", Dims: dims(2, 4, 2, 37, 75, 16, 12), BiasShape: backend.Shape{1, 4, 37, 75}, RelativeShape: backend.Shape{1, 1, 1, 111},
		Options: kernels.Options{Causal: true, Offset: []int{30}, ALiBi: slopes(4), Sinks: []float32{1, 2, -1, 0}}, Seed: 2}
	on := c.build().on(t, dev)
	defer on.release()
	x := on.forward(t)
	sums := x.differentiate(x.do, x.dlse)
	for n := range sums {
		got := must(x.backward(t, n))(t)
		var alone [7][]oracle.Sum
		alone[n] = sums[n]
		if _, err := x.compareGradients(got, alone); err != nil {
			t.Errorf("%s alone: %v", gradientNames[n], err)
		}
	}
	if _, err := x.backward(t, len(sums)); err != nil {
		t.Errorf("no gradients: %v", err)
	}
}

// testGradientsInBatch: a call repeated has the same bits, and so has each batch alone.
func testGradientsInBatch(t *testing.T, dev *kernels.Device) {
	c := Case{Name: "in batch", Dims: dims(3, 4, 2, 70, 300, 24, 20), Options: kernels.Options{Causal: true, Offset: []int{200}, Softcap: 9}, Seed: 98}
	on := c.build().on(t, dev)
	defer on.release()
	x := on.forward(t)
	all := x.mustBackward(t)
	again := x.mustBackward(t)
	for n := range all {
		if err := differIn(gradientNames[n], all[n], again[n]); err != nil {
			t.Errorf("again: %v", err)
		}
	}
	for batch := range c.Batch {
		alone := *on.built
		alone.Batch = 1
		alone.q, alone.k, alone.v = oneBatch(on.built.q, batch), oneBatch(on.built.k, batch), oneBatch(on.built.v, batch)
		one := alone.on(t, dev)
		y := one.forward(t)
		do, dlse := put(t, dev, oneBatch(x.do, batch), c.Layout), put(t, dev, oneBatch(x.dlse, batch), c.Layout)
		one.held = append(one.held, do.all, dlse.all)
		y.d = kernels.Result{O: do.view, LSE: dlse.view}
		for n, got := range y.mustBackward(t) {
			part := len(all[n]) / c.Batch
			if err := differIn(gradientNames[n], all[n][batch*part:(batch+1)*part], got); err != nil {
				t.Errorf("batch %d alone: %v", batch, err)
			}
		}
		one.release()
	}
}

// testGradientsOfRanges computes gradients over spans of the keys with the result over all keys. dk and dv
// have the bits of one call, and the other gradients of the spans add up to those of one call.
func testGradientsOfRanges(t *testing.T, dev *kernels.Device) {
	c := Case{Name: "ranges", Dims: dims(2, 2, 1, 70, 300, 16, 12), Seed: 4, Options: kernels.Options{Causal: true, Offset: []int{230},
		ALiBi: slopes(2), Dropout: kernels.Dropout{P: 0.2, Seed: 7}}}
	var sums [7][]oracle.Sum // of all cuts
	for _, cuts := range [][]int{{0, 150, 300}, {0, 1, 300}, {0, 128, 299, 300}} {
		on := c.build().on(t, dev)
		x := on.forward(t)
		var parts []*differentiated
		for i, lo := range cuts[:len(cuts)-1] {
			hi := cuts[i+1]
			b := *on.built
			b.SeqK, b.k.shape[backend.Seq], b.v.shape[backend.Seq] = hi-lo, hi-lo, hi-lo
			k, v, opt := on.keys(t, lo, hi)
			parts = append(parts, &differentiated{onDevice: &onDevice{built: &b, dev: dev}, call: prepare(t, dev, on.q.view, k, v, opt)})
			r := must(parts[i].call.Run(t.Context()))(t)
			on.held = append(on.held, r.O, r.LSE)
			if i == 0 {
				x.r = r
			} else if err := dev.Merge(t.Context(), x.r, r); err != nil {
				t.Fatal(err)
			}
		}
		want := x.mustBackward(t)
		var got gradients
		var keys [2][7][]float32 // of each batch
		for _, p := range parts {
			p.d, p.r = x.d, x.r
			for n, part := range p.mustBackward(t) {
				switch {
				case n == 1 || n == 2:
					for batch := range keys {
						half := len(part) / 2
						keys[batch][n] = append(keys[batch][n], part[batch*half:(batch+1)*half]...)
					}
				case got[n] == nil:
					got[n] = part
				default:
					for i, y := range part {
						got[n][i] += y
					}
				}
			}
		}
		for n := 1; n <= 2; n++ {
			if err := differIn(gradientNames[n], want[n], slices.Concat(keys[0][n], keys[1][n])); err != nil {
				t.Errorf("cut at %v: %v", cuts, err)
			}
		}
		if sums[0] == nil {
			sums = on.differentiate(x.do, x.dlse)
		}
		var worst oracle.Worst
		for _, n := range []int{0, 5} {
			for i, y := range got[n] {
				worst.See(float64(y), float64(want[n][i]), 2*sums[n][i].Bound(backend.F32), func() string { return fmt.Sprintf("%s, element %d", gradientNames[n], i) })
			}
		}
		if err := worst.Err(); err != nil {
			t.Errorf("cut at %v: %v", cuts, err)
		}
		on.release()
	}
}

// testGradientsUnseen: an LSE of +Inf, which FlashAttention 2 has for fully masked rows, is like one of -Inf.
func testGradientsUnseen(t *testing.T, dev *kernels.Device) {
	on := Case{Name: "unseen", Dims: dims(2, 2, 1, 37, 30, 8, 8), Options: kernels.Options{Sinks: []float32{1, 2}}, Seed: 4}.build().on(t, dev)
	defer on.release()
	x := on.forward(t)
	backward := func(unseen float64) gradients {
		lse, do := read(t, dev, x.r.LSE), slices.Clone(x.do.data)
		for i := 0; i < len(lse); i += 3 {
			lse[i], do[8*i] = float32(unseen), float32(math.NaN())
		}
		y := *x
		y.r.LSE, y.d.O = up(t, dev, lse, x.r.LSE.Shape()), up(t, dev, do, x.d.O.Shape())
		return y.mustBackward(t)
	}
	want := backward(math.Inf(-1))
	for n, got := range backward(math.Inf(1)) {
		noError(t, differIn(gradientNames[n], want[n], got))
	}
	noError(t, differIn("NaN", nil, slices.DeleteFunc(slices.Concat(want[:]...), func(x float32) bool { return x == x })))
}

// testGradientsAdd tests Gradients.Add, and the errors that the contract states.
func testGradientsAdd(t *testing.T, dev *kernels.Device) {
	c := Case{Name: "add", Dims: dims(2, 4, 2, 37, 75, 16, 12), Options: kernels.Options{Causal: true}, Seed: 2}
	on := c.build().on(t, dev)
	defer on.release()
	x := on.forward(t)
	g := backend.Gradients{DO: x.d.O, DLSE: x.d.LSE, Call: backend.Call{Q: on.q.view, K: on.k.view, V: on.v.view, O: x.r.O, LSE: x.r.LSE,
		Problem: backend.Problem{Scale: 0.25, Visible: backend.Visibility{Left: backend.Unbounded}}}}
	for n, to := range []*backend.Tensor{&g.DQ, &g.DK, &g.DV} {
		out := on.blank(t, on.gradientShapes()[n], backend.F32)
		on.held = append(on.held, out.all)
		*to = out.view
	}
	diff := dev.Backend().(backend.Differentiator)
	const times = 3
	for range times {
		noError(t, diff.Backward(t.Context(), &g))
		g.Add = true
	}
	sums := on.differentiate(x.do, x.dlse)
	var worst oracle.Worst
	for n, of := range []backend.Tensor{g.DQ, g.DK, g.DV} {
		for i, y := range read(t, dev, of) {
			// Each call may round at the magnitude of all before: 1 + 2 + 3 bounds.
			worst.See(float64(y), times*sums[n][i].Value, 6*sums[n][i].Bound(backend.F32), func() string { return fmt.Sprintf("%s, element %d, 3 times", gradientNames[n], i) })
		}
	}
	if err := worst.Err(); err != nil {
		t.Error(err)
	}

	gone := up(t, dev, make([]float32, g.DO.Shape().Elements()), g.DO.Shape())
	gone.Release()
	dead, cancel := context.WithCancel(t.Context())
	cancel()
	for _, bad := range []struct {
		ctx   context.Context
		spoil func(g *backend.Gradients)
		want  error
	}{
		{dead, func(*backend.Gradients) {}, context.Canceled},
		{t.Context(), func(g *backend.Gradients) { g.DO = gone }, backend.ErrReleased},
		{t.Context(), func(g *backend.Gradients) { g.DQ = g.Q }, backend.ErrOverlap},
		{t.Context(), func(g *backend.Gradients) { g.DV = g.DK }, backend.ErrOverlap},
	} {
		g := g
		bad.spoil(&g)
		wantError(t, "call", bad.want, diff.Backward(bad.ctx, &g))
	}
}
