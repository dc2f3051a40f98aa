package bench

import (
	"math"
	"slices"
)

// median returns the middle of xs in order, or the mean of the two middle ones;
// 0 when xs is empty. It leaves xs as it is.
func median(xs []float64) float64 { return quantile(xs, 0.5) }

// quantile returns the value below which the part q of xs lies, between neighbours in
// proportion; 0 when xs is empty. It leaves xs as it is.
func quantile(xs []float64, q float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(xs))
	at := q * float64(len(s)-1)
	i := min(int(at), len(s)-1)
	if i == len(s)-1 {
		return s[i]
	}
	return s[i] + (s[i+1]-s[i])*(at-float64(i))
}

// sum returns the sum of xs.
func sum(xs []float64) float64 {
	s := 0.0
	for _, x := range xs {
		s += x
	}
	return s
}

// sureness is the chance with which an interval shall hold the median.
const sureness = 0.95

// medianInterval returns the narrowest pair of values of xs, the k-th from either
// end, between which the median of what they are drawn from lies with a chance of at
// least sureness, whatever its distribution: each value is below that median with a
// chance of one half, so how many are is binomial. confidence is the chance itself,
// which is less than sureness where there are fewer than six.
func medianInterval(xs []float64) (low, high, confidence float64) {
	n := len(xs)
	if n == 0 {
		return 0, 0, 0
	}
	s := slices.Sorted(slices.Values(xs))
	// below is the chance that at most k-1 values are below the median.
	p := math.Pow(0.5, float64(n))
	below, k := p, 1
	for k < n/2 {
		p *= float64(n-k+1) / float64(k)
		if 1-2*(below+p) < sureness {
			break
		}
		below += p
		k++
	}
	return s[k-1], s[n-k], max(1-2*below, 0)
}

// rankTest returns the chance that two samples of the same distribution differ in
// their ranks at least as much as xs and ys do, in either direction: the test of
// Mann and Whitney (1947). It is exact where no two values are alike and there
// are at most exactRanks of each, else by the normal distribution with the
// correction for ties.
func rankTest(xs, ys []float64) float64 {
	n, m := len(xs), len(ys)
	if n == 0 || m == 0 {
		return 1
	}
	// u counts the pairs in which x is the larger, ties as one half.
	u, ties := 0.0, 0.0
	for _, x := range xs {
		for _, y := range ys {
			switch {
			case x > y:
				u++
			case x == y:
				u += 0.5
			}
		}
	}
	all := slices.Sorted(slices.Values(slices.Concat(xs, ys)))
	for i := 0; i < len(all); {
		j := i
		for j < len(all) && all[j] == all[i] {
			j++
		}
		t := float64(j - i)
		ties += t*t*t - t
		i = j
	}
	u = min(u, float64(n*m)-u)
	if ties == 0 && max(n, m) <= exactRanks {
		return min(1, 2*rankChance(int(u), n, m))
	}
	N := float64(n + m)
	deviation := math.Sqrt(float64(n*m) / 12 * (N + 1 - ties/(N*(N-1))))
	if deviation == 0 {
		return 1
	}
	z := (u - float64(n*m)/2 + 0.5) / deviation // half a pair for continuity
	return min(1, 2*0.5*math.Erfc(-z/math.Sqrt2))
}

// exactRanks bounds the work of the exact test: with more values of each the normal
// distribution is within a tenth of it.
const exactRanks = 40

// rankChance returns the chance that the x of n and m values of one distribution are
// larger in at most u pairs. The orders with exactly u such pairs follow from those with
// one value less: the largest value is a y, or it is an x, larger than m others.
func rankChance(u, n, m int) float64 {
	// chances[j][v]: of v pairs among i x and j y, the table being built up over i.
	chances := make([][]float64, m+1)
	for j := range chances {
		chances[j] = make([]float64, u+1)
		chances[j][0] = 1
	}
	for i := 1; i <= n; i++ {
		next := make([][]float64, m+1)
		for j := range next {
			next[j] = make([]float64, u+1)
			if j == 0 {
				next[0][0] = 1
				continue
			}
			x := float64(i) / float64(i+j) // that the largest is an x
			for v := range next[j] {
				next[j][v] = (1 - x) * next[j-1][v]
				if v >= j {
					next[j][v] += x * chances[j][v-j]
				}
			}
		}
		chances = next
	}
	return sum(chances[m])
}
