package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-12*max(1, math.Abs(b)) }

func TestQuantile(t *testing.T) {
	for _, tc := range []struct {
		xs      []float64
		q, want float64
	}{
		{nil, 0.5, 0},
		{[]float64{7}, 0.05, 7},
		{[]float64{3, 1, 2}, 0, 1},
		{[]float64{3, 1, 2}, 1, 3},
		{[]float64{5, 1, 3, 9, 7}, 0.25, 3},
		{[]float64{0, 10}, 0.3, 3},
	} {
		if got := Quantile(tc.xs, tc.q); !near(got, tc.want) {
			t.Errorf("the part %v of %v lies below %v, want %v", tc.q, tc.xs, got, tc.want)
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
		{1, 1, 0}, {2, 1, 0.5}, {3, 1, 0.75}, {5, 1, 0.9375}, {6, 1, 1 - 2.0/64}, {8, 1, 1 - 2.0/256}, {9, 2, 1 - 2*10.0/512},
		{20, 6, 0.9586}, {50, 18, 0.9672},
	} {
		xs := make([]float64, tc.n)
		for i := range xs {
			xs[i] = float64(tc.n - i)
		}
		low, high, sure := MedianInterval(xs)
		if low != float64(tc.k) || high != float64(tc.n-tc.k+1) || math.Abs(sure-tc.sure) > 5e-5 {
			t.Errorf("of %d: %v to %v with %v, want the %d. from either end with %v", tc.n, low, high, sure, tc.k, tc.sure)
		}
	}
	if low, high, sure := MedianInterval(nil); low != 0 || high != 0 || sure != 0 {
		t.Error("nothing has a median")
	}
}

// The interval covers the median with its confidence, for a distribution with a long tail.
func TestMedianIntervalHoldsTheMedian(t *testing.T) {
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
}

// Against every order of so few values, each as likely as the others.
func TestRankTestCountsOrders(t *testing.T) {
	for _, size := range [][2]int{{1, 1}, {3, 3}, {2, 5}, {4, 4}, {5, 3}} {
		n, m := size[0], size[1]
		type order struct{ xs, ys []float64 }
		orders := map[int][]order{} // by the number of pairs with x > y
		total := 0
		for set := range 1 << (n + m) {
			var o order
			u := 0
			for i := range n + m {
				if set>>i&1 == 1 {
					o.xs, u = append(o.xs, float64(i)), u+len(o.ys)
				} else {
					o.ys = append(o.ys, float64(i))
				}
			}
			if len(o.xs) == n {
				orders[u] = append(orders[u], o)
				total++
			}
		}
		extreme := 0
		for u := 0; 2*u <= n*m; u++ {
			extreme += len(orders[u])
			want := min(1, 2*float64(extreme)/float64(total))
			for _, o := range slices.Concat(orders[u], orders[n*m-u]) {
				if got := RankTest(o.xs, o.ys); !near(got, want) {
					t.Errorf("%v and %v: %v, want %v", o.xs, o.ys, got, want)
				}
			}
		}
	}
}

func TestRankTest(t *testing.T) {
	seq := func(from, n int) []float64 {
		xs := make([]float64, n)
		for i := range xs {
			xs[i] = float64(from + i)
		}
		return xs
	}
	if got := RankTest(seq(0, 6), seq(10, 6)); !near(got, 2.0/924) {
		t.Errorf("six below six: %v, want 2 of 924 orders", got)
	}
	if a, b := RankTest(seq(0, 6), seq(3, 7)), RankTest(seq(3, 7), seq(0, 6)); !near(a, b) {
		t.Errorf("it depends on the order of samples: %v and %v", a, b)
	}
	if got := RankTest([]float64{1, 1, 1}, []float64{1, 1}); got != 1 {
		t.Errorf("all alike: %v", got)
	}
	if RankTest(nil, seq(0, 3)) != 1 {
		t.Error("nothing differs from something")
	}
}

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
		before := append([]float64(nil), tc.xs...)
		if got := Median(tc.xs); got != tc.want {
			t.Errorf("median of %v is %v, want %v", tc.xs, got, tc.want)
		}
		if !slices.Equal(before, tc.xs) {
			t.Errorf("Median changed its argument: %v", tc.xs)
		}
	}
}
