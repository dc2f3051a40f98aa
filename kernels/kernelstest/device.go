package kernelstest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// flat is the device memory of an operand, gaps included, and the view that is the operand.
type flat struct {
	all, view backend.Tensor
	before    []float32 // the memory before the call
}

// put uploads an operand in a layout, with NaN in the gaps.
func put(tb testing.TB, dev *kernels.Device, o operand, l Layout) flat {
	tb.Helper()
	if len(o.data) == 0 {
		all := must(dev.Alloc(tb.Context(), o.dtype, o.shape))(tb)
		return flat{all: all, view: all}
	}
	if o.dtype.Quantised() {
		return putQuantised(tb, dev, o, l)
	}
	st, offset, size := l.place(o.shape)
	return putAt(tb, dev, o, st, offset, size)
}

// putAt is put for strides and an offset in memory of size elements.
func putAt(tb testing.TB, dev *kernels.Device, o operand, st backend.Strides, offset, size int) flat {
	tb.Helper()
	mem := slices.Repeat([]float32{float32(math.NaN())}, size)
	for i, x := range o.data {
		mem[offset+index(i, o.shape, st)] = x
	}
	all := must(dev.FromFloat32(tb.Context(), o.dtype, mem, backend.Shape{1, 1, 1, size}))(tb)
	return flat{all, must(all.View(o.shape, st, offset))(tb), slices.Clone(mem)}
}

// index returns the position of the i-th element, in row-major order, by strides.
func index(i int, s backend.Shape, st backend.Strides) int {
	at := 0
	for axis := backend.Dim; axis >= 0; axis-- {
		at += i % s[axis] * st[axis]
		i /= s[axis]
	}
	return at
}

// get downloads the view in row-major order, and fails when a gap has changed.
func (f flat) get(tb testing.TB, dev *kernels.Device, name string) []float32 {
	tb.Helper()
	mem := read(tb, dev, f.all)
	s, st, off := f.view.Shape(), f.view.Strides(), f.view.Offset()
	out := make([]float32, s.Elements())
	mine := make([]bool, len(mem))
	for i := range out {
		at := off + index(i, s, st)
		out[i], mine[at] = mem[at], true
	}
	for i, x := range mem {
		if !mine[i] && !sameNumber(x, f.before[i]) {
			tb.Errorf("%s: element %d of the memory is padding, it was %v and is now %v", name, i, f.before[i], x)
			break
		}
	}
	return out
}

func (f flat) release() { f.all.Release() }

// sameNumber reports whether a and b have the same bits or are both NaN.
func sameNumber(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

func read(tb testing.TB, dev *kernels.Device, t backend.Tensor) []float32 {
	tb.Helper()
	return must(dev.ToFloat32(tb.Context(), t))(tb)
}

// prepare returns a prepared call.
func prepare(tb testing.TB, dev *kernels.Device, q, k, v backend.Tensor, opt kernels.Options) *kernels.Call {
	tb.Helper()
	return must(dev.Prepare(q, k, v, opt))(tb)
}

// runInto prepares a call and runs it into out.
func runInto(ctx context.Context, dev *kernels.Device, out kernels.Result, q, k, v backend.Tensor, opt kernels.Options) error {
	c, err := dev.Prepare(q, k, v, opt)
	if err != nil {
		return err
	}
	return c.RunInto(ctx, out)
}

// plan prepares a call and plans it.
func plan(ctx context.Context, dev *kernels.Device, q, k, v backend.Tensor, opt kernels.Options) (kernels.Plan, error) {
	c, err := dev.Prepare(q, k, v, opt)
	if err != nil {
		return kernels.Plan{}, err
	}
	return c.Plan(ctx)
}

// onDevice is a built case with its operands on a device.
type onDevice struct {
	*built
	dev     *kernels.Device
	q, k, v flat
	opt     kernels.Options
	held    []backend.Tensor
}

func (b *built) on(tb testing.TB, dev *kernels.Device) *onDevice {
	tb.Helper()
	o := &onDevice{built: b, dev: dev, opt: b.Options}
	o.q = put(tb, dev, b.q, b.Layout)
	if b.PageSize > 0 {
		o.paged(tb)
	} else {
		o.k, o.v = put(tb, dev, b.k, b.Layout), put(tb, dev, b.v, b.Layout)
	}
	o.held = append(o.held, o.q.all, o.k.all, o.v.all)
	mask := func(seen []bool, shape backend.Shape) (t backend.Tensor) {
		if seen != nil {
			t = must(dev.Upload(tb.Context(), must(backend.Host(seen, backend.Bool, shape))(tb)))(tb)
			o.held = append(o.held, t)
		}
		return t
	}
	o.opt.Mask, o.opt.BlockMask = mask(b.mask, b.MaskShape), mask(b.blocks, b.BlockShape)
	o.opt.BlockSize = b.BlockSize
	for _, x := range []struct {
		from operand
		to   *backend.Tensor
	}{{b.bias, &o.opt.Bias}, {b.relative, &o.opt.RelativeBias}} {
		if x.from.data != nil {
			// The rows of a padded bias start at odd elements.
			f := put(tb, dev, x.from, b.Layout)
			*x.to = f.view
			o.held = append(o.held, f.all)
		}
	}
	return o
}

func (o *onDevice) release() {
	for _, t := range o.held {
		t.Release()
	}
}

// blank returns an output full of NaN in the layout of the case.
func (o *onDevice) blank(tb testing.TB, shape backend.Shape, dtype backend.DType) flat {
	tb.Helper()
	return put(tb, o.dev, filled(float32(math.NaN()), shape, dtype), o.Layout)
}

// outputs returns the outputs of the case.
func (o *onDevice) outputs(tb testing.TB) (out, lse flat) {
	tb.Helper()
	shape := backend.Shape{o.Batch, o.Heads, o.SeqQ, o.ValueDim}
	out = o.blank(tb, shape, o.DType)
	shape[backend.Dim] = 1
	return out, o.blank(tb, shape, backend.F32)
}

// answer is the result of a call in row-major order.
type answer struct{ o, lse, weights []float32 }

// how a case is computed.
type how int

const (
	fused   how = iota
	staged      // by the functions of the three stages
	weighed     // with Options.Weights
	bare        // without the LSE
)

func (h how) String() string {
	return [...]string{"fused", "stages", "with weights", "without lse"}[h]
}

// run computes the case with outputs in its layout.
func (o *onDevice) run(tb testing.TB, how how) (answer, error) {
	tb.Helper()
	out, lse := o.outputs(tb)
	defer out.release()
	defer lse.release()
	r := kernels.Result{O: out.view, LSE: lse.view}
	if how == bare {
		r.LSE = backend.Tensor{}
	}
	var w flat
	if how == staged || how == weighed {
		w = o.blank(tb, backend.Shape{o.Batch, o.Heads, o.SeqQ, o.SeqK}, backend.F32)
		defer w.release()
		r.Weights = w.view
	}
	var err error
	if how == staged {
		err = o.stages(tb.Context(), r)
	} else {
		err = runInto(tb.Context(), o.dev, r, o.q.view, o.k.view, o.v.view, o.opt)
	}
	if err != nil {
		return answer{}, err
	}
	a := answer{o: out.get(tb, o.dev, "o")}
	if how != bare {
		a.lse = lse.get(tb, o.dev, "lse")
	}
	if how == staged || how == weighed {
		a.weights = w.get(tb, o.dev, "weights")
	}
	return a, nil
}

// stages computes the case by the functions of the three stages.
func (o *onDevice) stages(ctx context.Context, r kernels.Result) error {
	if err := o.dev.Backend().QK(ctx, r.Weights, o.q.view, o.k.view); err != nil {
		return err
	}
	opt := o.opt
	if opt.Scale == nil {
		opt.Scale = new(1 / math.Sqrt(float64(o.Dim)))
	}
	if err := o.dev.Softmax(ctx, r.Weights, r.LSE, opt); err != nil {
		return err
	}
	return o.dev.Backend().PV(ctx, r.O, r.Weights, o.v.view)
}

// mustRun is run for problems that every backend supports.
func (o *onDevice) mustRun(tb testing.TB, how how) answer {
	tb.Helper()
	a, err := o.run(tb, how)
	if err != nil {
		tb.Fatalf("%v: %v: %v", how, o.Case, err)
	}
	return a
}

// row returns the inputs of the oracle for a query row.
func (b *built) row(batch, h, i int) oracle.Row {
	d := b.Dims
	kvh := h / (d.Heads / d.KVHeads)
	n, rows, keys := b.sequence(batch, i)
	cut := func(o operand, head, from, n int) []float32 {
		at := ((batch*o.shape[1]+head)*o.shape[2] + from) * o.shape[3]
		return o.data[at : at+n*o.shape[3]]
	}
	vis := b.visibility()
	scale := 1 / math.Sqrt(float64(d.Dim))
	if b.Options.Scale != nil {
		scale = *b.Options.Scale
	}
	r := oracle.Row{
		Q: cut(b.q, h, i, 1), K: cut(b.k, kvh, 0, d.SeqK), V: cut(b.v, kvh, 0, d.SeqK), Dv: d.ValueDim,
		Scale: float32(scale), Softcap: float32(b.Options.Softcap), Out: b.DType,
		Rounded: b.weightType(), Fixed: b.Options.LowPrecision && b.keyType() == backend.Q8, Split: b.Options.LowPrecision && b.DType == backend.F32 && b.keyType() == backend.F32,
		Hidden: func(j int) bool {
			return !vis(batch, i, j) || lacks(b.MaskShape, j) || lacks(b.BiasShape, j) ||
				b.mask != nil && !b.mask[broadcastIndex(b.MaskShape, batch, h, i, j)] ||
				b.blocks != nil && !b.blocks[broadcastIndex(b.BlockShape, batch, h, i/b.BlockSize, j/b.BlockSize)]
		},
	}
	if b.relative.data != nil {
		r.Relative = func(j int) float64 {
			return float64(b.relative.data[broadcastIndex(b.RelativeShape, batch, h, 0, j-i+d.SeqQ-1)])
		}
	}
	if slopes := b.Options.ALiBi; slopes != nil {
		r.Slope = float64(slopes[(n*d.Heads+h)%len(slopes)])
		r.Distance = func(j int) float64 { return math.Abs(float64(b.position(batch, i) - j)) }
	}
	if b.Options.KeyIndices != nil {
		list, hidden := b.listOf(batch, h, i), r.Hidden
		r.Listed = max(1, len(list))
		r.Hidden = func(j int) bool { return !slices.Contains(list, int32(j)) || hidden(j) }
	}
	r.Mod, r.ModDerivative = b.scoreMod(batch, h, i)
	if b.Options.Sinks != nil {
		r.Sink = &b.Options.Sinks[h]
	}
	if drop := b.Options.Dropout; drop.P > 0 {
		r.Keeps = func(j int) bool { return drop.Keeps(n, h, i-rows.lo, j-keys.lo) }
		r.KeepFactor = 1 / (1 - float64(drop.P))
	}
	if b.bias.data != nil {
		r.Bias = func(j int) float64 {
			if lacks(b.BiasShape, j) {
				return 0 // hidden above
			}
			return float64(b.bias.data[broadcastIndex(b.BiasShape, batch, h, i, j)])
		}
	}
	return r
}

// weightType returns the type to which weights are rounded before they multiply values.
func (b *built) weightType() backend.DType {
	switch t := b.keyType(); {
	case b.Options.LowPrecision && (t == backend.F16 || t == backend.BF16):
		return t
	case b.Options.LowPrecision && t == backend.F8:
		return backend.F16
	}
	return backend.F32
}

// lacks reports whether a mask or bias of shape s has no element for key j. The zero Shape lacks none.
func lacks(s backend.Shape, j int) bool { return s[backend.Dim] > 1 && j >= s[backend.Dim] }

// forBatch returns the element of a batch, or the only element.
func forBatch[T any](list []T, batch int) T { return list[batch%len(list)] }

// moved returns the offsets of Options, each greater by n.
func moved(offsets []int, n int) []int {
	if offsets == nil {
		return []int{n}
	}
	all := slices.Clone(offsets)
	for i := range all {
		all[i] += n
	}
	return all
}

// visibility returns the visibility rule, implemented independently of the code under test.
func (b *built) visibility() func(batch, i, j int) bool {
	o := b.Options
	return func(batch, i, j int) bool {
		position := b.position(batch, i)
		n, _, keys := b.sequence(batch, i)
		if o.QSegments != nil {
			keys := o.KSegments
			if keys == nil {
				keys = o.QSegments
			}
			if forBatch(o.QSegments, batch)[i] != forBatch(keys, batch)[j] {
				return false
			}
		}
		ahead := o.Causal && j > position || o.Window != nil && j-position > o.Window.Right
		behind := o.Window != nil && position-j > o.Window.Left
		if o.Spans != nil {
			for _, s := range forBatch(o.Spans, n) {
				if in := func(x int) bool { return s[0] <= x && x < s[1] }; in(position) && in(j) {
					ahead, behind = false, false
				}
			}
		}
		inPrefix := o.Prefix != nil && j-keys.lo < forBatch(o.Prefix, n)
		return j >= keys.lo && j < keys.hi && !(o.KLen != nil && j-keys.lo >= o.KLen[n]) && !behind && (inPrefix || !ahead)
	}
}

// position returns the position of row i of a batch among the keys.
func (b *built) position(batch, i int) int {
	n, rows, keys := b.sequence(batch, i)
	i += keys.lo - rows.lo
	if b.Options.Offset != nil {
		i += forBatch(b.Options.Offset, n)
	}
	if b.Options.Align == kernels.LowerRight {
		i += keys.hi - keys.lo - (rows.hi - rows.lo)
	}
	return i
}

// span is the rows or keys [lo, hi).
type span struct{ lo, hi int }

// sequence returns the number of the sequence that row i of a batch belongs to, which is the batch
// unless sequences are packed, and its rows and keys.
func (b *built) sequence(batch, i int) (n int, rows, keys span) {
	q, k := b.Options.CuQ, b.Options.CuK
	if q == nil {
		return batch, span{0, b.SeqQ}, span{0, b.SeqK}
	}
	for q[n+1] <= i {
		n++
	}
	return n, span{q[n], q[n+1]}, span{k[n], k[n+1]}
}

// eachRow calls f with the oracle's answer for every row; n counts rows.
func (b *built) eachRow(f func(n, batch, h, i int, ref oracle.Answer)) {
	b.rows(func(n, batch, h, i int) { f(n, batch, h, i, oracle.Solve(b.row(batch, h, i))) })
}

// rows calls f for every row; n counts them.
func (b *built) rows(f func(n, batch, h, i int)) {
	for n := range b.Batch * b.Heads * b.SeqQ {
		f(n, n/b.SeqQ/b.Heads, n/b.SeqQ%b.Heads, n%b.SeqQ)
	}
}

// once computes the case once.
func (b *built) once(tb testing.TB, dev *kernels.Device, how how) answer {
	tb.Helper()
	on := b.on(tb, dev)
	defer on.release()
	return on.mustRun(tb, how)
}

// compare compares an answer with the oracle.
func (b *built) compare(a answer) error {
	var o, lse, weights oracle.Worst
	var leak error
	b.eachRow(func(n, batch, h, i int, ref oracle.Answer) {
		name := func(what string, x int) func() string {
			return func() string { return fmt.Sprintf("%s[%d,%d,%d,%d]", what, batch, h, i, x) }
		}
		for x, want := range ref.O {
			o.See(float64(a.o[n*b.ValueDim+x]), want, ref.OBound[x], name("o", x))
		}
		if a.lse != nil {
			lse.See(float64(a.lse[n]), ref.LSE, ref.LSEBound, name("lse", 0))
		}
		if a.weights == nil {
			return
		}
		for j, want := range ref.Weights {
			got := a.weights[n*b.SeqK+j]
			weights.See(float64(got), want, ref.WeightBounds[j], name("weight", j))
			if math.IsNaN(ref.Scores[j]) && !math.IsNaN(want) && want == 0 && got != 0 && leak == nil {
				leak = fmt.Errorf("%s is hidden, its weight is %v, it must be exactly 0", name("weight", j)(), got)
			}
		}
	})
	return cmp.Or(o.Err(), lse.Err(), weights.Err(), leak)
}

// ender is a test, a benchmark or a rapid property.
type ender interface {
	Helper()
	Fatal(args ...any)
}

// must returns the result of a call, and ends the test when the call failed: must(f())(t).
func must[T any](x T, err error) func(t ender) T {
	return func(t ender) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
}

// errorOf returns the error of a call.
func errorOf[T any](_ T, err error) error { return err }

// wantError fails when the error of a call is not want.
func wantError(t testing.TB, call string, want, err error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: error is %v, should be %v", call, err, want)
	}
}

// noError ends the test when err is not nil.
func noError(t ender, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
