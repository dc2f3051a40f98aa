package cpu

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
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
		must.Do(t, open(t, Options{}).Attention(t.Context(), &c))
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

// relativeL2 returns |O - ref| / |ref| over all of a call of one batch, with ref computed in
// float64.
func relativeL2(t *testing.T, c *backend.Call) float64 {
	ref, _ := reference(t, c)
	var diff, size float64
	for i, o := range floats(t, c.O) {
		e := float64(o) - float64(ref[i])
		diff += e * e
		size += float64(ref[i]) * float64(ref[i])
	}
	return math.Sqrt(diff / size)
}
