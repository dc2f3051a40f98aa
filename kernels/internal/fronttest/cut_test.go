package fronttest

import (
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// cut slices t along an axis.
func cut(t *testing.T, x kernels.Tensor, axis, lo, hi int) kernels.Tensor {
	t.Helper()
	return must.Get(x.Slice(axis, lo, hi))(t)
}

// floats downloads x.
func floats(t *testing.T, dev *kernels.Device, x kernels.Tensor) []float32 {
	t.Helper()
	return must.Get(dev.ToFloat32(t.Context(), x))(t)
}

// sameBits fails unless x and y hold the same bits.
func sameBits(t *testing.T, what string, dev *kernels.Device, x, y kernels.Tensor) {
	t.Helper()
	a, b := floats(t, dev, x), floats(t, dev, y)
	if len(a) != len(b) {
		t.Fatalf("%s: %d and %d numbers", what, len(a), len(b))
	}
	for i := range a {
		if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
			t.Fatalf("%s: element %d is %v, alone it is %v", what, i, a[i], b[i])
		}
	}
}

// documents are the ranges of three documents in one sequence.
var documents = [][2]int{{0, 70}, {70, 75}, {75, 150}}

func segmentIDs() [][]int32 {
	ids := make([]int32, 150)
	for n, d := range documents {
		for i := d[0]; i < d[1]; i++ {
			ids[i] = int32(10 * n)
		}
	}
	return [][]int32{ids}
}

// TestSegmentsAreDocumentsAlone: documents in one sequence have the bits of calls with each
// document alone, fused and by stages, whatever the others contain.
func TestSegmentsAreDocumentsAlone(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		s, kv := kernels.Shape{2, 4, 150, 16}, kernels.Shape{2, 2, 150, 16}
		q, k := upload(t, dev, normal(s.Elements(), 1), s), upload(t, dev, normal(kv.Elements(), 2), kv)
		values := normal(kv.Elements(), 3)
		values[72*16] = float32(math.NaN()) // of the second document
		v := upload(t, dev, values, kv)
		opt := kernels.Options{Causal: true, Softcap: 20, KLen: []int{150, 110}, LSE: true, QSegments: segmentIDs()}
		for _, weights := range []bool{false, true} {
			opt.Weights = weights
			all := must.Get(dev.Attention(t.Context(), q, k, v, opt))(t)
			defer all.Release()
			for _, d := range documents {
				alone := opt
				alone.QSegments = nil
				alone.KLen = []int{d[1] - d[0], max(0, min(110, d[1])-d[0])}
				part := func(x kernels.Tensor) kernels.Tensor { return cut(t, x, kernels.Seq, d[0], d[1]) }
				one := must.Get(dev.Attention(t.Context(), part(q), part(k), part(v), alone))(t)
				defer one.Release()
				sameBits(t, "o", dev, part(all.O), one.O)
				sameBits(t, "lse", dev, part(all.LSE), one.LSE)
				if weights {
					rows := part(all.Weights)
					sameBits(t, "weights", dev, cut(t, rows, kernels.Dim, d[0], d[1]), one.Weights)
					for _, w := range append(floats(t, dev, cut(t, rows, kernels.Dim, 0, d[0])), floats(t, dev, cut(t, rows, kernels.Dim, d[1], 150))...) {
						if w != 0 {
							t.Fatalf("document %v gives another one the weight %v", d, w)
						}
					}
				}
			}
			check(t, "documents", prepare(t, dev, q, k, v, opt), all, 100)
		}
	})
}

// TestCheckSeesSegments: Check finds a result computed without the segments, and a weight
// outside of the row's segment.
func TestCheckSeesSegments(t *testing.T) {
	dev := onCPU(t)
	s := kernels.Shape{1, 2, 150, 8}
	q, k, v := upload(t, dev, normal(s.Elements(), 1), s), upload(t, dev, normal(s.Elements(), 2), s), upload(t, dev, normal(s.Elements(), 3), s)
	opt := kernels.Options{QSegments: segmentIDs(), Weights: true}
	plain := must.Get(dev.Attention(t.Context(), q, k, v, kernels.Options{}))(t)
	report, err := prepare(t, dev, q, k, v, opt).Check(t.Context(), plain, kernels.CheckOptions{})
	if err != nil || report.OK() {
		t.Errorf("a result without segments: %+v, %v", report, err)
	}
	r := must.Get(dev.Attention(t.Context(), q, k, v, opt))(t)
	w := must.Get(r.Weights.Float32s())(t)
	w[(150+80)*150+3] = 1e-3 // head 1, row 80 is of the third document, key 3 of the first
	report, err = prepare(t, dev, q, k, v, opt).Check(t.Context(), r, kernels.CheckOptions{Rows: 300})
	if err != nil || report.OK() || !strings.Contains(report.Worst, "weights[0,1,80,3]") {
		t.Errorf("a weight outside: %+v, %v", report, err)
	}
}

// TestSubcallsTogether: a call of several subcalls is planned as their sum, each of them is
// warmed up, and outputs may not overlap the inputs of any.
func TestSubcallsTogether(t *testing.T) {
	dev := onCPU(t)
	s := kernels.Shape{1, 2, 150, 8}
	q, k, v := upload(t, dev, normal(s.Elements(), 1), s), upload(t, dev, normal(s.Elements(), 2), s), upload(t, dev, normal(s.Elements(), 3), s)
	opt := kernels.Options{QSegments: segmentIDs()}
	for _, weights := range []bool{false, true} {
		opt.Weights = weights
		p, err := prepare(t, dev, q, k, v, opt).Plan(t.Context())
		pairs := int64(2 * (70*70 + 5*5 + 75*75))
		if err != nil || p.Pairs != pairs || p.FLOPs != pairs*4*8 || !strings.Contains(p.Why+p.Cut, "3 ") || p.Backend != "cpu" || p.Chunks < 3 {
			t.Errorf("plan: %+v, %v", p, err)
		}
	}
	opt.Weights = false
	w := &warmer{differentiator: dev.Backend().(differentiator)}
	if err := prepare(t, kernels.NewDevice(w), q, k, v, opt).Warmup(t.Context()); err != nil || len(w.calls) != 3 || w.calls[1].Q.Shape() != (kernels.Shape{1, 2, 5, 8}) {
		t.Errorf("warmed %d calls, %v", len(w.calls), err)
	}
	call := prepare(t, kernels.NewDevice(w), q, k, v, opt)
	if err := call.WarmupBackward(t.Context(), call.Gradients()); err != nil || len(w.gradients) != 3 || !w.gradients[1].Add {
		t.Errorf("warmed %d backward passes, %v", len(w.gradients), err)
	}
	// The outputs of the first document overlap the queries of the second one.
	all := upload(t, dev, make([]float32, 2*s.Elements()), kernels.Shape{1, 1, 1, 2 * s.Elements()})
	view := func(at int) kernels.Tensor {
		return must.Get(all.View(kernels.Shape{1, 1, 150, 8}, kernels.Shape{1, 1, 150, 8}.Contiguous(), at))(t)
	}
	one := view(0)
	must.Fail(t, "outputs over inputs", prepare(t, dev, one, one, one, opt).RunInto(t.Context(), kernels.Result{O: view(75 * 8)}), kernels.ErrOverlap)
}

// TestSoftmaxInRegions: Softmax alone takes prefix, segments and short masks.
func TestSoftmaxInRegions(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		s := kernels.Shape{1, 2, 150, 16}
		q, k := upload(t, dev, normal(s.Elements(), 1), s), upload(t, dev, normal(s.Elements(), 2), s)
		bits := make([]bool, 100)
		for i := range bits {
			bits[i] = i%3 > 0
		}
		mask := must.Get(kernels.HostBool(bits, kernels.Shape{1, 1, 1, 100}))(t)
		mask = must.Get(dev.Upload(t.Context(), mask))(t)
		defer mask.Release()
		opt := kernels.Options{Scale: new(0.25), Causal: true, Prefix: []int{90}, QSegments: segmentIDs(), Mask: mask}
		attention := opt
		attention.Weights = true
		want := must.Get(dev.Attention(t.Context(), q, k, k, attention))(t)
		defer want.Release()
		w := must.Get(dev.QK(t.Context(), q, k))(t)
		defer w.Release()
		lse := upload(t, dev, make([]float32, 300), kernels.Shape{1, 2, 150, 1})
		must.Do(t, dev.Softmax(t.Context(), w, lse, opt))
		sameBits(t, "weights", dev, w, want.Weights)
		check(t, "softmax", prepare(t, dev, q, k, k, attention), kernels.Result{O: want.O, LSE: lse, Weights: w}, 300)
	})
}

// TestRegionsOfPages: prefix, segments and short masks yield the same bits over pools of pages
// and over the same keys in one tensor.
func TestRegionsOfPages(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		const pages, size, keys = 9, 16, 70
		s, pool, own := kernels.Shape{2, 4, 70, 16}, kernels.Shape{pages, 2, size, 16}, kernels.Shape{2, 2, keys, 16}
		table := [][]int32{{8, 0, 3, 1, 7}, {2, 0, 5, 6, 4}}
		klen := []int{70, 50}
		q := upload(t, dev, normal(s.Elements(), 1), s)
		var pooled, whole [2]kernels.Tensor
		for n := range pooled {
			data := normal(pool.Elements(), uint64(2+n))
			rows := make([]float32, 0, own.Elements())
			for b := range table {
				for h := range 2 {
					for j := range keys {
						at := ((int(table[b][j/size])*2+h)*size + j%size) * 16
						rows = append(rows, data[at:at+16]...)
					}
				}
			}
			pooled[n], whole[n] = upload(t, dev, data, pool), upload(t, dev, rows, own)
		}
		mask := must.Get(kernels.HostBool(make([]bool, 70*40), kernels.Shape{1, 1, 70, 40}))(t)
		bits := must.Get(mask.Bools())(t)
		for i := range bits {
			bits[i] = i%5 > 0
		}
		mask = must.Get(dev.Upload(t.Context(), mask))(t)
		defer mask.Release()
		segments := func(at int) [][]int32 {
			ids := make([]int32, 70)
			for i := at; i < 70; i++ {
				ids[i] = 1
			}
			return [][]int32{ids}
		}
		for name, opt := range map[string]kernels.Options{
			"prefix":   {Causal: true, Prefix: []int{33, 20}},
			"spans":    {Causal: true, Window: &kernels.Window{Left: 4}, Spans: [][][2]int{{{1, 5}, {size, 2*size + 3}}}},
			"segments": {QSegments: segments(11), KSegments: segments(2 * size)},
			"short":    {Mask: mask, Causal: true},
		} {
			opt.KLen, opt.LSE = klen, true
			want := must.Get(dev.Attention(t.Context(), q, whole[0], whole[1], opt))(t)
			defer want.Release()
			opt.Pages = &kernels.Pages{Table: table, Keys: keys}
			got := must.Get(dev.Attention(t.Context(), q, pooled[0], pooled[1], opt))(must.In(t, "%s", name))
			defer got.Release()
			sameBits(t, name+": o", dev, got.O, want.O)
			sameBits(t, name+": lse", dev, got.LSE, want.LSE)
		}
		inside := kernels.Options{KLen: klen, Pages: &kernels.Pages{Table: table, Keys: keys}, QSegments: segments(size + 1)}
		must.Fail(t, "a segment that begins inside a page", must.Err(dev.Attention(t.Context(), q, pooled[0], pooled[1], inside)), kernels.ErrUnsupported, "begins at key 17, inside a page")
	})
}
