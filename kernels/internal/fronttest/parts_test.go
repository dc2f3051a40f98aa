package fronttest

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

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
