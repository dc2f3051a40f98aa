package kernelstest

import (
	"cmp"
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels"
)

// indexMistake changes a score, given the product of a head and its weight, or the end of the keys that a row sees.
type indexMistake struct {
	term func(w, product float64) float64
	more int
	low  bool // chooses the least scores
}

// TestIndexMutants shows that the cases find mistakes, and that a second computation without one passes.
func TestIndexMutants(t *testing.T) {
	right := func(w, product float64) float64 { return w * max(product, 0) }
	for name, m := range map[string]indexMistake{
		"":                        {term: right},
		"no max":                  {term: func(w, product float64) float64 { return w * product }},
		"max after the weight":    {term: func(w, product float64) float64 { return max(w*product, 0) }},
		"weights without signs":   {term: func(w, product float64) float64 { return max(w, -w) * max(product, 0) }},
		"weights forgotten":       {term: func(_, product float64) float64 { return max(product, 0) }},
		"the least scores":        {term: right, low: true},
		"one key after the end":   {term: right, more: 1},
		"the last key is missing": {term: right, more: -1},
	} {
		found := false
		for n, c := range indexCases() {
			x := c.draw(uint64(n))
			err := x.check(x.mutant(m))
			found = found || err != nil
			if name == "" && err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		if found != (name != "") {
			t.Errorf("mistake %q: found %t", name, found)
		}
	}
}

// mutant returns the lists of x by plain loops, with a mistake.
func (x *drawnIndex) mutant(m indexMistake) *kernels.KeyIndices {
	lists := &kernels.KeyIndices{TopK: min(x.n, x.seqK)}
	for n := range x.batch * x.seqQ {
		b, i := n/x.seqQ, n%x.seqQ
		lo, hi := x.visible(b, i)
		hi = max(lo, min(hi+m.more, x.seqK))
		q, k, w := x.row(b, i)
		scores, keys := make([]float64, x.seqK), []int32{}
		for j := lo; j < hi; j++ {
			for h, weight := range w {
				product := 0.0
				for c := range x.d {
					product += float64(q[h*x.d+c]) * float64(k[j*x.d+c])
				}
				scores[j] += m.term(float64(weight), product)
			}
			keys = append(keys, int32(j))
		}
		slices.SortStableFunc(keys, func(a, b int32) int {
			if m.low {
				a, b = b, a
			}
			return cmp.Compare(scores[b], scores[a])
		})
		keys = keys[:min(len(keys), lists.TopK)]
		slices.Sort(keys)
		for len(keys) < lists.TopK {
			keys = append(keys, -1)
		}
		lists.Indices = append(lists.Indices, keys...)
	}
	return lists
}
