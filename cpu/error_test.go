package cpu

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestErrorIsFlat shows that the relative L2 error against float64 does not grow
// with the number of keys: 64 times the keys leave it within a factor of 4, and
// below 1e-6. The conformance suite bounds every element; this is the property
// that summing each key block from zero buys.
func TestErrorIsFlat(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("-short, or the race detector: 65,536 keys take too long")
	}
	const rows, d = 8, 64
	var first float64
	for _, keys := range []int{1024, 8192, 65536} {
		q, k, v := random(t, 1, backend.Shape{1, 1, rows, d}), random(t, 2, backend.Shape{1, 1, keys, d}), random(t, 3, backend.Shape{1, 1, keys, d})
		o := alloc(t, backend.Shape{1, 1, rows, d})
		c := backend.Call{Q: q, K: k, V: v, O: o, Problem: backend.Problem{Scale: 0.5, Visible: backend.Everything()}}
		must(t, open(t, Options{}).Attention(t.Context(), &c))
		e := relativeL2(t, &c)
		t.Logf("%6d keys: %.2g", keys, e)
		if first == 0 {
			first = e
		}
		if e > 1e-6 || e > 4*first {
			t.Errorf("relative L2 error is %.2g with %d keys, %.2g with 1024", e, keys, first)
		}
	}
}

// relativeL2 returns |O - ref| / |ref| over all of a plain call of one head, with
// ref computed in float64.
func relativeL2(t *testing.T, c *backend.Call) float64 {
	var x [4][]float32
	for i, tensor := range []backend.Tensor{c.Q, c.K, c.V, c.O} {
		data := floats(t, tensor)
		x[i] = data
	}
	q, k, v, o := x[0], x[1], x[2], x[3]
	n := c.Dims()
	var diff, size float64
	for i := range n.SeqQ {
		ref, sum := make([]float64, n.ValueDim), 0.0
		for j := range n.SeqK {
			s := 0.0
			for x := range n.Dim {
				s += float64(q[i*n.Dim+x]) * float64(k[j*n.Dim+x])
			}
			p := math.Exp(float64(c.Scale) * s) // no maximum: these scores are small
			sum += p
			for x := range ref {
				ref[x] += p * float64(v[j*n.ValueDim+x])
			}
		}
		for x, r := range ref {
			r /= sum
			e := float64(o[i*n.ValueDim+x]) - r
			diff += e * e
			size += r * r
		}
	}
	return math.Sqrt(diff / size)
}
