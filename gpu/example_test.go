package gpu_test

import (
	"math"
	"testing"
)

// TestExampleShared runs the example of a shared device, which has no Output because there
// are machines without an adapter, and compares its result with float64.
func TestExampleShared(t *testing.T) {
	needAdapter(t)
	got, err := attendToOwnBuffer()
	if err != nil {
		t.Fatal(err)
	}
	const tokens, dim = 4, 8
	x := func(row, i int) float64 { return float64((row*dim+i)*5%8) / 4 }
	for row := range tokens {
		var sum float64
		var o [dim]float64
		for key := range row + 1 {
			var dot float64
			for i := range dim {
				dot += x(row, i) * x(key, i)
			}
			w := math.Exp(dot / math.Sqrt(dim))
			sum += w
			for i := range dim {
				o[i] += w * x(key, i)
			}
		}
		for i := range dim {
			if want := 2 * o[i] / sum; math.Abs(float64(got[row*dim+i])-want) > 1e-5 {
				t.Errorf("row %d, column %d: %v, want %v", row, i, got[row*dim+i], want)
			}
		}
	}
}
