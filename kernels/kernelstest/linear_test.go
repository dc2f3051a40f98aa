package kernelstest

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// slip is a mistake in linear attention.
type slip int

const (
	none slip = iota
	decayBefore
	decayAfter
	oldState
	betaForgotten
	deltaOfOld
	stateOfGroup
)

// recur computes a head in float64 with a mistake.
func recur(l oracle.Linear, slip slip) (o, state []float64) {
	state = make([]float64, l.K*l.V)
	for i, x := range l.State {
		state[i] = float64(x)
	}
	decay := func(t, i int) float64 {
		if slip == decayBefore {
			t = max(0, t-1)
		}
		switch len(l.Decay) {
		case 0:
			return 1
		case len(l.Beta):
			return math.Exp(float64(l.Decay[t]))
		}
		return math.Exp(float64(l.Decay[t*l.K+i]))
	}
	for t := range l.Beta {
		for c := range l.V {
			column, before := make([]float64, l.K), make([]float64, l.K)
			beta, d, sum := float64(l.Beta[t]), float64(l.Value[t*l.V+c]), 0.0
			for i := range column {
				before[i] = state[i*l.V+c]
				if column[i] = before[i]; slip != decayAfter {
					column[i] *= decay(t, i)
				}
				read := column[i]
				if slip == deltaOfOld {
					read = before[i]
				}
				d -= read * float64(l.Key[t*l.K+i])
			}
			if slip == betaForgotten {
				beta = 1
			}
			for i := range column {
				if column[i] += float64(l.Key[t*l.K+i]) * beta * d; slip == decayAfter {
					column[i] *= decay(t, i)
				}
				read := column[i]
				if slip == oldState {
					read = before[i]
				}
				sum += read * float64(l.Q[t*l.K+i])
				state[i*l.V+c] = column[i]
			}
			o = append(o, sum*float64(l.Scale))
		}
	}
	return o, state
}

// TestLinearMutants shows that each case finds each mistake, and that a second recurrence without one is within the bound.
func TestLinearMutants(t *testing.T) {
	for i, c := range linearCases() {
		if c.beta == 0 || c.decay == 0 || c.t < 2 || c.g != nil || c.length != 0 || c.dtype != backend.F32 {
			continue
		}
		p := c.draw(uint64(i))
		for slip := none; slip <= stateOfGroup; slip++ {
			outs := max(c.hq, c.hv)
			o, state := make([]float32, c.batch*outs*c.t*c.v), make([]float32, p.sequences*c.hv*c.k*c.v)
			for n := range p.sequences {
				for h := range outs {
					l, b, lo, _ := p.head(n, h)
					if slip == stateOfGroup {
						l, b, lo, _ = p.head(n, 0)
					}
					out, s := recur(l, slip)
					for i, x := range out {
						o[((b*outs+h)*c.t+lo)*c.v+i] = float32(x)
					}
					for i, x := range s {
						state[(n*c.hv+h*c.hv/outs)*c.k*c.v+i] = float32(x)
					}
				}
			}
			worst := p.worst("a mutant", o, state)
			if err := worst.Err(); (err == nil) != (slip == none) {
				t.Errorf("%s: mistake %d: %v", c.name, slip, err)
			}
			t.Logf("%s: mistake %d: %.3g", c.name, slip, worst.Off)
		}
	}
}

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
