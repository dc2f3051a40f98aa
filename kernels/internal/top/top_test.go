package top

import (
	"math"
	"slices"
	"testing"
)

// TestPick: equal weights are in the order of their keys, NaN comes first, zeros are left out.
func TestPick(t *testing.T) {
	nan := float32(math.NaN())
	for _, c := range []struct {
		row  []float32
		n    int
		keys []int32
	}{
		{[]float32{0.1, 0.3, 0.3, 0.2, 0.3}, 3, []int32{11, 12, 14}},
		{[]float32{0.1, 0.3, 0.3, 0.2, 0.3}, 4, []int32{11, 12, 14, 13}},
		{[]float32{0.5, 0, 0.5, 0}, 3, []int32{10, 12, -1}},
		{[]float32{0.5, nan, 0.5, nan}, 3, []int32{11, 13, 10}},
		{[]float32{0, 0}, 1, []int32{-1}},
		{[]float32{1, 2, 3, 4, 5, 6, 7, 8, 9}, 9, []int32{18, 17, 16, 15, 14, 13, 12, 11, 10}},
	} {
		keys, weights := slices.Repeat([]int32{-1}, c.n), make([]float32, c.n)
		Pick(c.row, 10, keys, weights)
		if !slices.Equal(keys, c.keys) {
			t.Errorf("%v: keys %v, should be %v", c.row, keys, c.keys)
		}
		for i, j := range keys {
			if j >= 0 && math.Float32bits(weights[i]) != math.Float32bits(c.row[j-10]) {
				t.Errorf("%v: weight %d is %v", c.row, i, weights[i])
			}
		}
	}
}
