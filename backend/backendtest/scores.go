package backendtest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// testScores compares scores at every point with the oracle, for the named cases and for some
// with many options.
func testScores(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Scorer](dev) {
		t.Skip("the backend gives no scores out")
	}
	var cases []Case
	for n, c := range append(Cases(), Pairs()...) {
		if n%3 == 0 && !(testing.Short() && n%9 > 0) {
			cases = append(cases, c)
		}
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			b := c.build()
			on := b.on(t, dev)
			defer on.release()
			for _, at := range []backend.ScorePoint{backend.Scaled, backend.Capped, backend.Biased} {
				s, err := dev.Scores(t.Context(), on.q.view, on.k.view, at, on.opt)
				if err != nil {
					t.Fatalf("%v: point %d: %v", c, at, err)
				}
				if err := b.compareScores(read(t, dev, s), at); err != nil {
					t.Errorf("%v: point %d: %v", c, at, err)
				}
				s.Release()
			}
		})
	}
}

// compareScores compares scores at a point with the oracle. Its error bound has the terms of
// package oracle: λ√D for the dot product, 3 for the scale, 8 for the softcap and 5 for the
// biases, each times u and the magnitudes in it.
func (b *built) compareScores(got []float32, at backend.ScorePoint) error {
	var worst oracle.Worst
	n := 0
	for batch := range b.Batch {
		for h := range b.Heads {
			for i := range b.SeqQ {
				r := b.row(batch, h, i)
				r.V, r.Dv, r.Sink, r.Keeps = nil, 0, nil, nil
				if at < backend.Biased {
					r.Hidden, r.Bias, r.Relative, r.Slope = nil, nil, nil, 0
				}
				if at < backend.Capped {
					r.Softcap = 0
				}
				ref := oracle.Solve(r)
				for j, want := range ref.Scores {
					x := float64(got[n])
					n++
					hidden := r.Hidden != nil && r.Hidden(j) || r.Bias != nil && math.IsInf(r.Bias(j), -1) || r.Relative != nil && math.IsInf(r.Relative(j), -1)
					if hidden {
						if !math.IsInf(x, -1) {
							return fmt.Errorf("s[%d,%d,%d,%d] is %v, the key is hidden: it must be -Inf", batch, h, i, j, x)
						}
						continue
					}
					_, size := dot(r.Q, r.K[j*b.Dim:(j+1)*b.Dim])
					size *= math.Abs(float64(r.Scale))
					if r.Bias != nil {
						size += math.Abs(r.Bias(j))
					}
					if r.Relative != nil {
						size += math.Abs(r.Relative(j))
					}
					if r.Slope != 0 {
						size += math.Abs(r.Slope * r.Distance(j))
					}
					bound := u*(oracle.Lambda*math.Sqrt(float64(b.Dim))+16)*size + 0x1p-125
					worst.See(x, want, bound, func() string { return fmt.Sprintf("s[%d,%d,%d,%d]", batch, h, i, j) })
				}
			}
		}
	}
	return worst.Err()
}

// testTopWeights compares TopWeights with the largest of all weights, to the bit.
func testTopWeights(t *testing.T, dev *kernels.Device) {
	for n, c := range Pairs() {
		if n%8 > 0 || testing.Short() && n%32 > 0 {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			on := c.build().on(t, dev)
			defer on.release()
			all := must(on.run(t, weighed))(t)
			const most = 5
			top := must(dev.TopWeights(t.Context(), on.q.view, on.k.view, most, on.opt))(t)
			rank := func(w float32) float64 { // NaN first
				if w != w {
					return math.Inf(1)
				}
				return float64(w)
			}
			for r := range len(all.weights) / c.SeqK {
				row := all.weights[r*c.SeqK : (r+1)*c.SeqK]
				order := make([]int, c.SeqK)
				for j := range order {
					order[j] = j
				}
				slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(rank(row[y]), rank(row[x])) })
				for i, j := range order[:most] {
					key, w := int(top.Keys[r*most+i]), top.Weights[r*most+i]
					if row[j] == 0 {
						j = -1
					}
					if key != j || !sameNumber(w, row[max(j, 0)]) && j >= 0 || j < 0 && w != 0 {
						t.Fatalf("%v: row %d: number %d is key %d with %v, should be %d of %v", c, r, i, key, w, j, row)
					}
				}
			}
		})
	}
}
