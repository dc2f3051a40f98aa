package nn_test

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// drawn returns the four weights of a layer, which have different shapes.
func drawn(t *testing.T, in nn.Initialiser) [][]float32 {
	t.Helper()
	w := must.Get(nn.MultiHeadConfig{Model: 96, Memory: 150, Heads: 8, KVHeads: 4, HeadDim: 20, ValueDim: 30, Bias: true}.Initialise(in))(t)
	var all [][]float32
	for _, x := range []kernels.Tensor{w.Wq, w.Wk, w.Wv, w.Wo} {
		data := must.Get(x.Float32s())(t)
		all = append(all, data)
	}
	for _, x := range []kernels.Tensor{w.Bq, w.Bk, w.Bv, w.Bo} {
		data, err := x.Float32s()
		if err != nil || slices.ContainsFunc(data, func(b float32) bool { return b != 0 }) {
			t.Errorf("a bias is not 0, %v", err)
		}
	}
	return all
}

// fans are fanIn and fanOut of the weights of drawn.
var fans = [][2]float64{{96, 160}, {150, 80}, {150, 120}, {240, 96}}

// TestInitialiser compares the moments and the range of the weights with those of the paper's
// distribution, within five standard deviations of each estimate.
func TestInitialiser(t *testing.T) {
	for _, in := range []nn.Initialiser{{}, {Seed: 1}, {Seed: 1, Gain: 5. / 3}} {
		for i, w := range drawn(t, in) {
			std, n := cmp.Or(in.Gain, 1)*math.Sqrt(2/(fans[i][0]+fans[i][1])), float64(len(w))
			var mean, variance, largest, inside float64
			for _, x := range w {
				mean += float64(x) / n
				variance += float64(x) * float64(x) / n
				largest = max(largest, math.Abs(float64(x)))
				if math.Abs(float64(x)) < std {
					inside++
				}
			}
			// The variance of x² is (kurtosis - 1)·std⁴: 4/5 for a uniform distribution, of which the
			// share 1/√3 lies within one std.
			spread, share := 0.8, 1/math.Sqrt(3)
			if !(math.Abs(mean) <= 5*std/math.Sqrt(n)) {
				t.Errorf("%+v, weight %d: mean is %v, std %v of %v numbers", in, i, mean, std, n)
			}
			if !(math.Abs(variance/(std*std)-1) <= 5*math.Sqrt(spread/n)) {
				t.Errorf("%+v, weight %d: variance is %v, should be %v", in, i, variance, std*std)
			}
			if !(math.Abs(inside/n-share) <= 5*math.Sqrt(share*(1-share)/n)) {
				t.Errorf("%+v, weight %d: %v of the numbers lie within one standard deviation, should be %v", in, i, inside/n, share)
			}
			if edge := math.Sqrt(3) * std; largest > edge*(1+0x1p-24) || largest < edge*0.99 {
				t.Errorf("%+v, weight %d: the largest number is %v, std %v", in, i, largest, std)
			}
		}
	}
}

// TestInitialiserIsSeeded: a seed determines a weight, whatever the shapes of the others.
// Another seed draws other weights, and the weights of a layer are not correlated.
func TestInitialiserIsSeeded(t *testing.T) {
	one, again, other := drawn(t, nn.Initialiser{Seed: 7}), drawn(t, nn.Initialiser{Seed: 7}), drawn(t, nn.Initialiser{Seed: 8})
	for i := range one {
		if !slices.Equal(one[i], again[i]) {
			t.Errorf("weight %d: the same seed draws other numbers", i)
		}
		for what, with := range map[string][]float32{"with another seed": other[i], "the next weight": one[(i+1)%4]} {
			n := min(len(one[i]), len(with))
			var xy, xx, yy float64
			for k := range n {
				x, y := float64(one[i][k]), float64(with[k])
				xy, xx, yy = xy+x*y, xx+x*x, yy+y*y
			}
			if r := xy / math.Sqrt(xx*yy); !(math.Abs(r) <= 5/math.Sqrt(float64(n))) {
				t.Errorf("weight %d: correlation with %s is %v", i, what, r)
			}
		}
	}
	w := must.Get(nn.MultiHeadConfig{Model: 96, Heads: 8, HeadDim: 20}.Initialise(nn.Initialiser{Seed: 7}))(t)
	if wq, err := w.Wq.Float32s(); err != nil || !slices.Equal(wq, one[0]) {
		t.Errorf("wq depends on the shape of other weights, %v", err)
	}
}

func TestInitialiseRefuses(t *testing.T) {
	for _, c := range []struct {
		in   nn.Initialiser
		text string
	}{
		{nn.Initialiser{Gain: -1}, "gain is -1"},
		{nn.Initialiser{Gain: math.NaN()}, "gain is NaN"},
		{nn.Initialiser{Gain: 1e300}, "gain is 1e+300"},
	} {
		must.Fail(t, fmt.Sprintf("%+v", c.in), must.Err((nn.MultiHeadConfig{Model: 4}).Initialise(c.in)), kernels.ErrOption, c.text)
	}
}
