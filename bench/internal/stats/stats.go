// Package stats has the statistics of repeated measurements.
package stats

import (
	"math"
	"slices"
)

// Median returns the middle value of xs, or the mean of the two middle values; 0 when
// xs is empty.
func Median(xs []float64) float64 { return Quantile(xs, 0.5) }

// Quantile returns the q-quantile of xs by linear interpolation; 0 when xs is empty.
func Quantile(xs []float64, q float64) float64 {
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

// Sum returns the sum of xs.
func Sum(xs []float64) float64 {
	s := 0.0
	for _, x := range xs {
		s += x
	}
	return s
}

// Confidence is the probability that an interval should cover the median with.
const Confidence = 0.95

// MedianInterval returns the narrowest interval between the k-th smallest and the k-th
// largest value of xs that covers the median of their distribution with a probability of
// at least Confidence. It assumes nothing about the distribution: the number of values
// below the median is binomial with p = 1/2. confidence is the probability reached, which
// is less than Confidence for fewer than six values.
func MedianInterval(xs []float64) (low, high, confidence float64) {
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
		if 1-2*(below+p) < Confidence {
			break
		}
		below += p
		k++
	}
	return s[k-1], s[n-k], max(1-2*below, 0)
}

// RankTest returns the p-value of the two-sided test of Mann and Whitney (1947): the
// probability that two samples of one distribution differ in their ranks at least as much
// as xs and ys. It is exact without ties and with at most exactRanks values in each
// sample, else the normal approximation with the correction for ties.
func RankTest(xs, ys []float64) float64 {
	n, m := len(xs), len(ys)
	if n == 0 || m == 0 {
		return 1
	}
	// u counts the pairs with x > y; a tie counts one half.
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
	z := (u - float64(n*m)/2 + 0.5) / deviation // continuity correction
	return min(1, 2*0.5*math.Erfc(-z/math.Sqrt2))
}

// exactRanks bounds the work of the exact test. Beyond it the normal approximation is
// within a tenth of the exact value.
const exactRanks = 40

// rankChance returns the probability that n values x and m values y of one distribution
// have at most u pairs with x > y. The recursion removes the largest value: it is a y, or
// it is an x and larger than m values y.
func rankChance(u, n, m int) float64 {
	// chances[j][v] is the probability of v pairs among i values x and j values y.
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
			x := float64(i) / float64(i+j) // probability that the largest is an x
			for v := range next[j] {
				next[j][v] = (1 - x) * next[j-1][v]
				if v >= j {
					next[j][v] += x * chances[j][v-j]
				}
			}
		}
		chances = next
	}
	return Sum(chances[m])
}

// Exponent fits y = c·x^e by least squares in logarithms and returns e.
func Exponent(x, y []float64) float64 {
	n := float64(len(x))
	var mx, my float64
	for i := range x {
		mx += math.Log(x[i]) / n
		my += math.Log(y[i]) / n
	}
	var covariance, variance float64
	for i := range x {
		dx := math.Log(x[i]) - mx
		covariance += dx * (math.Log(y[i]) - my)
		variance += dx * dx
	}
	return covariance / variance
}
