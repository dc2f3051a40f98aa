package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, tc := range []struct {
		xs   []float64
		want float64
	}{
		{nil, 0},
		{[]float64{3}, 3},
		{[]float64{4, 1}, 2.5},
		{[]float64{9, 1, 5}, 5},
		{[]float64{1, 100, 2, 3}, 2.5},
	} {
		before := slices.Clone(tc.xs)
		if got := Median(tc.xs); got != tc.want {
			t.Errorf("median of %v is %v, want %v", tc.xs, got, tc.want)
		}
		if !slices.Equal(before, tc.xs) {
			t.Errorf("Median changed its argument: %v", tc.xs)
		}
	}
}

// The ranks are those of the table of the sign test for a 95% interval of the median, from
// 1 of 6 to 18 of 50 (Conover 1999, table of binomial quantiles).
func TestMedianInterval(t *testing.T) {
	for _, tc := range []struct {
		n, k int
		sure float64
	}{
		{0, 0, 0}, {1, 1, 0}, {2, 1, 0.5}, {3, 1, 0.75}, {5, 1, 0.9375}, {6, 1, 1 - 2.0/64}, {8, 1, 1 - 2.0/256}, {9, 2, 1 - 2*10.0/512},
		{20, 6, 0.9586}, {50, 18, 0.9672},
	} {
		xs := make([]float64, tc.n)
		for i := range xs {
			xs[i] = float64(tc.n - i)
		}
		low, high, sure := MedianInterval(xs)
		if low != float64(tc.k) || high != float64(tc.n-tc.k+min(tc.n, 1)) || math.Abs(sure-tc.sure) > 5e-5 {
			t.Errorf("of %d: %v to %v with %v, want the %d. from either end with %v", tc.n, low, high, sure, tc.k, tc.sure)
		}
	}
}

// The intervals cover the median with their confidence. One of independent values may have any distribution. One of
// drifting values covers it with 95% for independent measurements, and with 90% for a drift of which half remains from
// one measurement to the next, where order statistics miss it more often.
func TestIntervalsHoldTheMedian(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	const trials = 4000
	for _, n := range []int{6, 11, 30} {
		held, sure := 0, 0.0
		for range trials {
			xs := make([]float64, n)
			for i := range xs {
				xs[i] = math.Exp(rng.NormFloat64()) // the median is 1
			}
			low, high, s := MedianInterval(xs)
			if sure = s; low <= 1 && 1 <= high {
				held++
			}
		}
		if got, dev := float64(held)/trials, math.Sqrt(sure*(1-sure)/trials); !(math.Abs(got-sure) <= 4*dev) {
			t.Errorf("of %d: held %v of the time, should be %v", n, got, sure)
		}
	}
	for _, tc := range []struct {
		n           int
		keeps, want float64
	}{{2, 0, 0.95}, {3, 0, 0.95}, {10, 0, 0.95}, {30, 0, 0.95}, {10, 0.5, 0.9}, {30, 0.5, 0.9}} {
		held, ordered := 0.0, 0.0
		for range trials {
			xs, x := make([]float64, tc.n), rng.NormFloat64()
			for i := range xs {
				x = tc.keeps*x + math.Sqrt(1-tc.keeps*tc.keeps)*rng.NormFloat64()
				xs[i] = 100 + x
			}
			if math.Abs(Median(xs)-100) <= DriftingInterval(xs)*Median(xs) {
				held += 1.0 / trials
			}
			if low, high, _ := MedianInterval(xs); low <= 100 && 100 <= high {
				ordered += 1.0 / trials
			}
		}
		dev := math.Sqrt(tc.want * (1 - tc.want) / trials)
		if held < tc.want-4*dev || tc.keeps == 0 && held > tc.want+4*dev || tc.keeps > 0 && ordered > tc.want-4*dev {
			t.Errorf("%+v: held %v of the time, the one by order statistics %v", tc, held, ordered)
		}
	}
	if !math.IsInf(DriftingInterval([]float64{1}), 1) || !math.IsInf(DriftingInterval(nil), 1) {
		t.Error("a single measurement shows no variation")
	}
}
