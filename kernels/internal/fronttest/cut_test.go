package fronttest

import (
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"pgregory.net/rapid"
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

// TestCheckSeesSegments: Check finds a result computed without the segments, and a weight outside of the row's segment.
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

// visible is the documentation of Options in code: whether row i of batch b sees key j.
func visible(o *kernels.Options, d kernels.Dims, b, i, j int) bool {
	at := i + o.Offset[b%len(o.Offset)]
	if o.Align == kernels.LowerRight {
		at += d.SeqK - d.SeqQ
	}
	if o.KLen != nil && j >= o.KLen[b] || o.QSegments != nil && o.QSegments[b][i] != o.KSegments[b][j] {
		return false
	}
	for _, s := range spansOf(o, b) {
		if at >= s[0] && at < s[1] && j >= s[0] && j < s[1] {
			return true
		}
	}
	if o.Window != nil && j < at-o.Window.Left {
		return false
	}
	if o.Prefix != nil && j < o.Prefix[b] {
		return true
	}
	return (!o.Causal || j <= at) && (o.Window == nil || j <= at+o.Window.Right)
}

// spansOf returns the spans of batch b.
func spansOf(o *kernels.Options, b int) [][2]int {
	if o.Spans == nil {
		return nil
	}
	return o.Spans[b%len(o.Spans)]
}

// TestParts: each row belongs to one part, whose rule shows the keys that the options show.
func TestParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := kernels.Dims{Batch: rapid.IntRange(1, 3).Draw(t, "batch"), Heads: 2, KVHeads: 1, Dim: 4, ValueDim: 4,
			SeqQ: rapid.IntRange(1, 9).Draw(t, "rows"), SeqK: rapid.IntRange(1, 9).Draw(t, "keys")}
		o := kernels.Options{Causal: rapid.Bool().Draw(t, "causal"), Offset: []int{rapid.IntRange(-4, 4).Draw(t, "offset")},
			Align: rapid.SampledFrom([]kernels.Align{kernels.UpperLeft, kernels.LowerRight}).Draw(t, "align")}
		ofEach := func(name string, lo, hi int) (n []int) {
			if rapid.Bool().Draw(t, "with "+name) {
				n = rapid.SliceOfN(rapid.IntRange(lo, hi), d.Batch, d.Batch).Draw(t, name)
			}
			return n
		}
		o.KLen, o.Prefix = ofEach("klen", 0, d.SeqK), ofEach("prefix", 0, d.SeqK)
		for range rapid.IntRange(0, 1).Draw(t, "lists of spans") * d.Batch {
			o.Prefix = nil
			var spans [][2]int
			for lo := rapid.IntRange(0, 3).Draw(t, "first"); lo < d.SeqK; {
				hi := rapid.IntRange(lo+1, d.SeqK).Draw(t, "end of span")
				spans, lo = append(spans, [2]int{lo, hi}), hi+rapid.IntRange(0, 3).Draw(t, "gap")
			}
			o.Spans = append(o.Spans, spans)
		}
		if each := ofEach("offsets", -6, 6); each != nil {
			o.Offset = each
		}
		if rapid.Bool().Draw(t, "windowed") {
			sides := []int{0, 1, 3, kernels.Unbounded}
			o.Window = &kernels.Window{Left: rapid.SampledFrom(sides).Draw(t, "left"), Right: rapid.SampledFrom(sides).Draw(t, "right")}
		}
		if rapid.Bool().Draw(t, "segmented") {
			for range d.Batch {
				at := rapid.IntRange(0, d.SeqK).Draw(t, "second segment")
				keys, rows := make([]int32, d.SeqK), make([]int32, d.SeqQ)
				for j := range keys {
					keys[j] = int32(min(1, (j+1)/(at+1)))
				}
				for i := range rows {
					rows[i] = rapid.Int32Range(0, 2).Draw(t, "segment of row")
				}
				o.QSegments, o.KSegments = append(o.QSegments, rows), append(o.KSegments, keys)
			}
		}
		parts := must.Get(o.Parts(d))(t)
		for b := range d.Batch {
			for i := range d.SeqQ {
				owners := 0
				seen := make([]bool, d.SeqK)
				for _, p := range parts {
					if b < p.Lo[0] || b >= p.Hi[0] || i < p.Lo[1] || i >= p.Hi[1] {
						continue
					}
					owners++
					lo, hi := p.Visible.Range(b-p.Lo[0], i-p.Lo[1], p.Hi[2]-p.Lo[2])
					for j := lo; j < hi; j++ {
						seen[p.Lo[2]+j] = true
					}
				}
				if owners != 1 {
					t.Fatalf("row %d of batch %d belongs to %d parts", i, b, owners)
				}
				for j := range seen {
					if want := visible(&o, d, b, i, j); seen[j] != want {
						t.Fatalf("row %d and key %d of batch %d: visible %t, want %t", i, j, b, seen[j], want)
					}
				}
			}
		}
	})
	must.Fail(t, "3 heads on 2", must.Err((&kernels.Options{}).Parts(kernels.Dims{Batch: 1, Heads: 3, KVHeads: 2, SeqQ: 1, SeqK: 1, Dim: 1, ValueDim: 1})), kernels.ErrShape)
	if parts, err := (&kernels.Options{}).Parts(kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 1, Dim: 1, ValueDim: 1}); len(parts) != 0 || err != nil {
		t.Errorf("no keys: %v, %v", parts, err)
	}
}
