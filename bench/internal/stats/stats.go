// Package stats has the statistics of repeated measurements.
package stats

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"
)

// Median returns the middle value of xs, or the mean of the two middle values; 0 when xs is empty.
func Median(xs []float64) float64 {
	n := len(xs)
	if n == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(xs))
	return s[(n-1)/2] + (s[n/2]-s[(n-1)/2])/2
}

// Confidence is the probability that an interval should cover the median with.
const Confidence = 0.95

// MedianInterval returns the narrowest interval between the k-th smallest and the k-th largest value of xs that covers
// the median of their distribution with a probability of at least Confidence. It assumes that the values are
// independent and nothing else: the number of values below the median is binomial with p = 1/2. confidence is the
// probability reached, which is less than Confidence for fewer than six values.
func MedianInterval(xs []float64) (low, high, confidence float64) {
	n := len(xs)
	if n == 0 {
		return 0, 0, 0
	}
	below := func(k int) float64 { return distuv.Binomial{N: float64(n), P: 0.5}.CDF(float64(k)) }
	k := 1
	for k < n/2 && 1-2*below(k) >= Confidence {
		k++
	}
	s := slices.Sorted(slices.Values(xs))
	return s[k-1], s[n-k], max(1-2*below(k-1), 0)
}

// DriftingInterval returns half of a 95% confidence interval of the median of xs, relative to it, for measurements in
// order of time that are not independent: machines drift. The medians of three consecutive parts stand for the run
// (batch means, Schmeiser 1982), and their range is multiplied by the quantile of Lord (1947) of the ratio of a mean's
// error to the range, which is the t interval in terms of the range. It is infinite for a single measurement.
func DriftingInterval(xs []float64) float64 {
	n, parts := len(xs), min(len(xs), 3)
	if parts < 2 {
		return math.Inf(1)
	}
	var medians []float64
	for i := range parts {
		medians = append(medians, Median(xs[i*n/parts:(i+1)*n/parts]))
	}
	lord := [...]float64{2: 6.353, 3: 1.304}
	return lord[parts] * (slices.Max(medians) - slices.Min(medians)) / Median(xs)
}
