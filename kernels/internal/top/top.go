// Package top selects the largest weights of a row.
package top

import (
	"container/heap"
	"math"
	"sort"
)

// Pick writes the largest weights of row, which begins with key first, in descending order,
// as many as keys and weights hold.
func Pick(row []float32, first int, keys []int32, weights []float32) {
	n, top := 0, topHeap{keys, weights}
	for j, w := range row {
		switch {
		case w == 0:
		case n < len(keys):
			keys[n], weights[n] = int32(first+j), w
			if n++; n == len(keys) {
				heap.Init(top)
			}
		case rank(w) > rank(weights[0]): // equal ones came earlier and have lower keys
			keys[0], weights[0] = int32(first+j), w
			heap.Fix(top, 0)
		}
	}
	sort.Sort(sort.Reverse(topHeap{keys[:n], weights[:n]}))
}

// topHeap is a heap of weights with their keys, the smallest on top; of equal weights the one
// with the highest key. Its size does not change.
type topHeap struct {
	keys    []int32
	weights []float32
}

func (t topHeap) Len() int { return len(t.keys) }

func (t topHeap) Less(i, j int) bool {
	a, b := rank(t.weights[i]), rank(t.weights[j])
	return a < b || a == b && t.keys[i] > t.keys[j]
}

func (t topHeap) Swap(i, j int) {
	t.keys[i], t.keys[j] = t.keys[j], t.keys[i]
	t.weights[i], t.weights[j] = t.weights[j], t.weights[i]
}

func (topHeap) Push(any) {}
func (topHeap) Pop() any { return nil }

// rank returns w for comparison, with NaN as the largest.
func rank(w float32) float32 {
	if w != w {
		return float32(math.Inf(1))
	}
	return w
}
