package nn_test

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// small is a layer whose weights all have different shapes.
var small = nn.MultiHeadConfig{Model: 6, Memory: 4, Heads: 2, ValueDim: 5, Bias: true}

// fresh returns new weights with biases that are not 0.
func fresh(t *testing.T, seed uint64) nn.MultiHeadWeights {
	t.Helper()
	w := must.Get(small.Initialise(nn.Initialiser{Seed: seed}))(t)
	for i, b := range numbers(t, w)[4:] {
		for j := range b {
			b[j] = float32(100*i + j)
		}
	}
	return w
}

// numbers returns the elements of the weights, nil for those that are absent.
func numbers(t *testing.T, w nn.MultiHeadWeights) (all [][]float32) {
	t.Helper()
	for _, x := range []kernels.Tensor{w.Wq, w.Wk, w.Wv, w.Wo, w.Bq, w.Bk, w.Bv, w.Bo, w.QNorm, w.KNorm, w.Sinks, w.Wg, w.Bg} {
		var data []float32
		if !x.IsZero() {
			data = must.Get(x.Float32s())(t)
		}
		all = append(all, data)
	}
	return all
}

func same(a, b [][]float32) bool {
	return slices.EqualFunc(a, b, func(x, y []float32) bool { return slices.Equal(x, y) })
}

// written returns the file of w.
func written(t *testing.T, w nn.MultiHeadWeights) []byte {
	t.Helper()
	var b bytes.Buffer
	must.Do(t, w.WriteSafetensors(&b))
	return b.Bytes()
}

// TestWeightsRoundTrip writes weights and loads them.
func TestWeightsRoundTrip(t *testing.T) {
	w := fresh(t, 1)
	file := written(t, w)
	got, err := small.LoadSafetensors(bytes.NewReader(file), int64(len(file)), "")
	if err != nil || !same(numbers(t, got), numbers(t, w)) || got.Wv.Shape() != (kernels.Shape{1, 1, 4, 10}) || got.Bv.Shape() != (kernels.Shape{1, 1, 1, 10}) {
		t.Errorf("loaded %v, %v", got, err)
	}
	if n := binary.LittleEndian.Uint64(file); n%8 != 0 {
		t.Errorf("the data starts at byte %d, not at a multiple of 8", 8+n)
	}
	plain := small
	plain.Bias = false
	must.Fail(t, "biases too many", must.Err(plain.LoadSafetensors(bytes.NewReader(file), int64(len(file)), "")), kernels.ErrFile, `loading would ignore ["bk" "bo" "bq" "bv"]: set the field of the config`)
}

// full is a file that has room for n bytes.
type full struct{ n int }

func (f *full) Write(p []byte) (int, error) {
	if f.n -= len(p); f.n < 0 {
		return 0, io.ErrShortWrite
	}
	return len(p), nil
}

// TestWriteRefuses: wrong weights are found before anything is written, and errors of the writer are returned.
func TestWriteRefuses(t *testing.T) {
	released, turned, half := fresh(t, 2), fresh(t, 3), fresh(t, 4)
	released.Wo.Release()
	turned.Wv = must.Get(turned.Wv.Swap(kernels.Seq, kernels.Dim))(t)
	half.Bq = must.Get(kernels.AllocHost(kernels.F16, half.Bq.Shape()))(t)
	for _, c := range []struct {
		name string
		w    nn.MultiHeadWeights
		want error
		text string
	}{
		{"released", released, kernels.ErrReleased, "wo"},
		{"strides", turned, kernels.ErrShape, "wv has strides"},
		{"type", half, kernels.ErrDType, "bq: tensor is f16"},
	} {
		var b bytes.Buffer
		if err := c.w.WriteSafetensors(&b); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) || b.Len() > 0 {
			t.Errorf("%s: error is %v after %d bytes, should be %v and contain %q", c.name, err, b.Len(), c.want, c.text)
		}
	}
	w := fresh(t, 1)
	size := len(written(t, w))
	for _, n := range []int{0, 1, size / 2, size - 1} {
		must.Fail(t, fmt.Sprintf("room for %d of %d bytes", n, size), w.WriteSafetensors(&full{n}), io.ErrShortWrite)
	}
	must.Pass(t, fmt.Sprintf("room for all %d bytes", size), w.WriteSafetensors(&full{size}))
}

// TestFactorsOfFiles loads the factors of a cache in fp8 under each name. The layer's keys are 3 times numbers of e4m3fn,
// its values 5 times, or 3 times where a file has one factor, up to more than 448: with the factors the cache stores them
// exactly, and outputs are those of a call without a cache. A cache in f32 has no factors and the same outputs.
func TestFactorsOfFiles(t *testing.T) {
	const d, tokens = 4, 3
	q := []float32{0x1p-9, -0x1p-10, 0x1p-8, 0, 0x1p-9, 0x1p-9, -0x1p-9, 0x1p-8, -0x1p-10, 0x1p-9, 0x1p-9, 0x1p-9}
	k := []float32{3 * 448, 3 * 13, 3 * 0.5, -3 * 208, 3 * 26, -3 * 416, 3 * 320, 3 * 1.125, -3 * 240, 3 * 288, 0, 3 * 15}
	numbers := []float32{448, -0x1p-9, 1, 72, -384, 11, 3.5, 0, 176, 448, -7, 0.0625}
	// x has q, k and v of a token next to each other, and the projections pick them.
	c := nn.MultiHeadConfig{Model: 3 * d, HeadDim: d}
	tensors := map[string]stored{"a.o_proj.weight": {"F32", []int{3 * d, d}, make([]float32, 3*d*d)}}
	for i, name := range []string{"a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"} {
		s := stored{"F32", []int{d, 3 * d}, make([]float32, 3*d*d)}
		for e := range d {
			s.data[e*3*d+i*d+e], tensors["a.o_proj.weight"].data[e*d+e] = 1, 1
		}
		tensors[name] = s
	}
	dev := onCPU(t)
	for _, names := range [][2]string{{"k_proj.k_scale", "v_proj.v_scale"}, {"qkv_proj.k_scale", "qkv_proj.v_scale"}, {"attn.k_scale", "attn.v_scale"},
		{"k_scale", "v_scale"}, {"k_proj.output_scale", "v_proj.output_scale"}, {"kv_scale", "kv_scale"}} {
		factor := float32(5)
		if names[0] == names[1] {
			factor = 3
		}
		var x, v []float32
		for _, number := range numbers {
			v = append(v, factor*number)
		}
		for i := 0; i < tokens*d; i += d {
			x = slices.Concat(x, q[i:i+d], k[i:i+d], v[i:i+d])
		}
		want := must.Get(dev.AttentionFloat32(t.Context(), kernels.Dims{SeqQ: tokens, SeqK: tokens, Dim: d}, kernels.BHSD, q, k, v, kernels.Options{Causal: true}))(t)
		file := map[string]stored{"a." + names[0]: {"F32", []int{}, []float32{3}}, "a." + names[1]: {"BF16", []int{1}, []float32{factor}}}
		maps.Copy(file, tensors)
		content := safetensors(file)
		w := must.Get(c.LoadSafetensors(bytes.NewReader(content), int64(len(content)), "a."))(t)
		content = written(t, w)
		w = must.Get(c.LoadSafetensors(bytes.NewReader(content), int64(len(content)), ""))(t)
		layer := must.Get(nn.NewMultiHeadAttention(t.Context(), dev, c, w))(t)
		defer layer.Release()
		for _, dtype := range []kernels.DType{kernels.F8, kernels.F32} {
			shape := layer.CacheConfig(dtype)
			if shape.Capacity = tokens; shape.KScale.IsZero() != (dtype == kernels.F32) || shape.VScale.IsZero() != (dtype == kernels.F32) {
				t.Errorf("%s, %v: the config is %v", names, dtype, shape)
			}
			cache := must.Get(kvcache.New(t.Context(), dev, shape))(t)
			defer cache.Release()
			y, _, err := layer.ApplyFloat32(t.Context(), x, 1, nn.MultiHeadOptions{Cache: cache})
			must.Do(t, err)
			for i, o := range want {
				// A score adds up products of less than 4 in magnitude, so it is off by less than 2^6 roundings of 2^-24,
				// and so is each weight. Values are less than 2^12.
				if got := y[i/d*3*d+i%d]; !(math.Abs(float64(got-o)) <= 0x1p-5) {
					t.Errorf("%s, %v: element %d of row %d is %v, should be %v", names, dtype, i%d, i/d, got, o)
				}
			}
		}
	}
	for _, bad := range []float32{0, -1, float32(math.NaN())} {
		w := must.Get(c.Initialise(nn.Initialiser{}))(t)
		w.VScale = must.Get(kernels.HostF32([]float32{bad}, kernels.Shape{1, 1, 1, 1}))(t)
		layer := must.Get(nn.NewMultiHeadAttention(t.Context(), dev, c, w))(t)
		defer layer.Release()
		shape := layer.CacheConfig(kernels.F8)
		shape.Capacity = 1
		text := fmt.Sprintf("VScale has a factor of %v, it must be from 2^-100 to 2^100", bad)
		must.Fail(t, text, must.Err(kvcache.New(t.Context(), dev, shape)), kernels.ErrOption, text)
	}
}

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
