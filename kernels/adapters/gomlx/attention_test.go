package gomlx

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/dtypes/bfloat16"
	"github.com/gomlx/compute/dtypes/float16"
	"github.com/gomlx/compute/shapes"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

const (
	bhsd = compute.AttentionAxesLayoutBHSD
	bshd = compute.AttentionAxesLayoutBSHD
)

// run builds main from the inputs, slices with their shapes, and returns its results.
func run(t *testing.T, b compute.Backend, inputs []any, in []shapes.Shape, main func(f compute.Function, v []compute.Value) ([]compute.Value, error)) []any {
	t.Helper()
	builder := b.Builder(t.Name())
	f := builder.Main()
	var values []compute.Value
	var buffers []compute.Buffer
	for i, x := range inputs {
		v := must.Get(f.Parameter("x"+string(rune('a'+i)), in[i], nil))(t)
		buf := must.Get(b.BufferFromFlatData(0, x, in[i]))(t)
		values, buffers = append(values, v), append(buffers, buf)
	}
	out := must.Get(main(f, values))(t)
	must.Do(t, f.Return(out, nil))
	exec := must.Get(builder.Compile())(t)
	defer exec.Finalize()
	results := must.Get(exec.Execute(buffers, nil, 0))(t)
	var flats []any
	for _, r := range results {
		flat := must.Get(r.Data())(t)
		flats = append(flats, flat)
	}
	return flats
}

// numbers returns n normally distributed numbers of a type.
func numbers(rng *rand.Rand, dtype dtypes.DType, n int) any {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	switch dtype {
	case dtypes.Float16:
		return float16.FromFloat32s(x...)
	case dtypes.BFloat16:
		y := make([]bfloat16.BFloat16, n)
		for i := range x {
			y[i] = bfloat16.FromFloat32(x[i])
		}
		return y
	}
	return x
}

// TestOperands compares attention and its gradients with float64, within the bounds of package
// oracle, for each kind of operand. The reference has one full mask and one full bias, made here.
func TestOperands(t *testing.T) {
	type dims struct{ b, h, hkv, sq, sk, d int }
	for name, test := range map[string]struct {
		dims
		dtype        dtypes.DType
		layout       compute.AttentionAxesLayout
		causal       bool
		scale        float64
		mask         string // axes of a boolean mask, "b" for B, "1" for a broadcast one
		additive     bool   // the mask is
		bias         string // axes
		qlens, klens []int32
	}{
		"plain":                        {dims: dims{2, 3, 3, 17, 17, 8}},
		"heads after rows":             {dims: dims{2, 3, 3, 17, 17, 8}, layout: bshd},
		"causal":                       {dims: dims{1, 2, 2, 33, 33, 16}, causal: true},
		"causal, more keys":            {dims: dims{1, 2, 2, 5, 33, 16}, causal: true, layout: bshd},
		"grouped heads":                {dims: dims{2, 6, 2, 9, 9, 8}, causal: true, layout: bshd},
		"one head of keys":             {dims: dims{1, 4, 1, 9, 12, 8}, scale: 0.3},
		"a mask of rows and keys":      {dims: dims{2, 4, 2, 7, 19, 8}, mask: "sk"},
		"a mask for each batch":        {dims: dims{2, 4, 2, 7, 19, 8}, mask: "bsk", layout: bshd},
		"a mask for each head":         {dims: dims{2, 4, 2, 7, 19, 8}, mask: "1hsk"},
		"a mask with heads after rows": {dims: dims{2, 4, 2, 7, 19, 8}, mask: "bshk", layout: bshd},
		"a mask of keys":               {dims: dims{2, 4, 2, 7, 19, 8}, mask: "b11k", causal: true},
		"an additive mask":             {dims: dims{2, 4, 2, 7, 19, 8}, mask: "bs1k", additive: true, layout: bshd},
		"a bias":                       {dims: dims{2, 4, 2, 7, 19, 8}, bias: "bhsk", causal: true},
		"a bias with heads first":      {dims: dims{2, 4, 2, 7, 19, 8}, bias: "1hsk", mask: "bsk", layout: bshd},
		"lengths":                      {dims: dims{3, 4, 2, 7, 9, 8}, qlens: []int32{7, 3, 0}, klens: []int32{4, 9, 5}, layout: bshd},
		"lengths and causal":           {dims: dims{3, 2, 2, 9, 9, 8}, qlens: []int32{9, 3, 100}, klens: []int32{9, 3, 2}, causal: true, layout: bshd},
		"f16":                          {dims: dims{1, 4, 2, 9, 9, 16}, dtype: dtypes.Float16, causal: true, bias: "bhsk"},
		"bf16":                         {dims: dims{1, 4, 2, 9, 9, 16}, dtype: dtypes.BFloat16, causal: true, layout: bshd, mask: "sk", additive: true},
	} {
		if test.dtype == dtypes.InvalidDType {
			test.dtype = dtypes.Float32
		}
		t.Run(name, func(t *testing.T) {
			eachDevice(t, func(t *testing.T, dev *kernels.Device) {
				rng := rand.New(rand.NewPCG(1, 2))
				length := map[rune]int{'b': test.b, 'h': test.h, 's': test.sq, 'k': test.sk, '1': 1}
				var inputs []any
				var in []shapes.Shape
				add := func(flat any, dtype dtypes.DType, dims ...int) {
					inputs, in = append(inputs, flat), append(in, shapes.Make(dtype, dims...))
				}
				operand := func(heads, seq int) {
					shape := []int{test.b, heads, seq, test.d}
					if test.layout == bshd {
						shape[1], shape[2] = seq, heads
					}
					add(numbers(rng, test.dtype, test.b*heads*seq*test.d), test.dtype, shape...)
				}
				operand(test.h, test.sq) // q, k, v, do
				operand(test.hkv, test.sk)
				operand(test.hkv, test.sk)
				operand(test.h, test.sq)

				// scores returns the shape of axes, and an index into it for each score.
				scores := func(axes string) (shape []int, index func(b, h, i, j int) int) {
					for _, a := range axes {
						shape = append(shape, length[a])
					}
					return shape, func(b, h, i, j int) int {
						at, of := 0, map[rune]int{'b': b, 'h': h, 's': i, 'k': j}
						for n, a := range axes {
							at = at*shape[n] + of[a]
						}
						return at
					}
				}
				shown := make([]bool, test.b*test.h*test.sq*test.sk)
				biases := make([]float32, len(shown))
				each := func(f func(n, b, h, i, j int)) {
					for n := range shown {
						j, row := n%test.sk, n/test.sk
						f(n, row/test.sq/test.h, row/test.sq%test.h, row%test.sq, j)
					}
				}
				each(func(n, b, h, i, j int) {
					shown[n] = (!test.causal || j <= i) && (test.qlens == nil || i < int(test.qlens[b]) && j < int(test.klens[b]))
				})
				var mask, bias, qlens, klens int // inputs, or 0
				product := func(shape []int) (n int) {
					n = 1
					for _, l := range shape {
						n *= l
					}
					return n
				}
				if test.mask != "" {
					shape, index := scores(test.mask)
					mask = len(inputs)
					if test.additive {
						x := numbers(rng, test.dtype, product(shape))
						each(func(n, b, h, i, j int) { biases[n] += single(x, index(b, h, i, j)) })
						add(x, test.dtype, shape...)
					} else {
						x := make([]bool, product(shape))
						for i := range x {
							x[i] = rng.Float64() < 0.6
						}
						each(func(n, b, h, i, j int) { shown[n] = shown[n] && x[index(b, h, i, j)] })
						add(x, dtypes.Bool, shape...)
					}
				}
				if test.bias != "" {
					shape, index := scores(test.bias)
					bias = len(inputs)
					x := numbers(rng, test.dtype, product(shape))
					each(func(n, b, h, i, j int) { biases[n] += single(x, index(b, h, i, j)) })
					add(x, test.dtype, shape...)
				}
				if test.qlens != nil {
					qlens, klens = len(inputs), len(inputs)+1
					add(test.qlens, dtypes.Int32, test.b)
					add(test.klens, dtypes.Int32, test.b)
				}

				got := run(t, on(t, dev), inputs, in, func(f compute.Function, v []compute.Value) ([]compute.Value, error) {
					options := &compute.ScaledDotProductAttentionConfig{Causal: test.causal, Scale: test.scale}
					for _, o := range []struct {
						at int
						to *compute.Value
					}{{mask, &options.Mask}, {bias, &options.Bias}, {qlens, &options.QuerySeqLen}, {klens, &options.KeyValueSeqLen}} {
						if o.at > 0 {
							*o.to = v[o.at]
						}
						if o.at > 0 && in[o.at].DType.IsFloat() { // a gradient would miss a parameter
							var err error
							if *o.to, err = f.Constant(inputs[o.at], in[o.at].Dimensions...); err != nil {
								return nil, err
							}
						}
					}
					o, states, err := f.FusedScaledDotProductAttention(v[0], v[1], v[2], test.layout, options)
					if err != nil {
						return nil, err
					}
					dq, dk, dv, err := f.FusedScaledDotProductAttentionVJP(v[0], v[1], v[2], test.layout, options, o, states, v[3])
					return append([]compute.Value{o, dq, dk, dv}, states...), err
				})

				cpu := open(t, "cpu")
				tensor := func(flat any, heads, seq, dim int) kernels.Tensor {
					shape := kernels.Shape{test.b, heads, seq, dim}
					swap := test.layout == bshd && dim > 1
					if swap {
						shape[1], shape[2] = seq, heads
					}
					x := must.Get(hostTensor(flat, shape))(t)
					if swap {
						x = must.Get(x.Swap(kernels.Heads, kernels.Seq))(t)
					}
					return must.Get(cpu.Upload(t.Context(), x))(t)
				}
				opt := kernels.Options{LSE: true}
				if test.scale != 0 {
					opt.Scale = &test.scale
				}
				opt.Mask = must.Get(kernels.HostBool(shown, kernels.Shape{test.b, test.h, test.sq, test.sk}))(t)
				opt.Bias = must.Get(kernels.HostF32(biases, opt.Mask.Shape()))(t)
				call := must.Get(cpu.Prepare(tensor(inputs[0], test.h, test.sq, test.d), tensor(inputs[1], test.hkv, test.sk, test.d), tensor(inputs[2], test.hkv, test.sk, test.d), opt))(t)
				result := kernels.Result{O: tensor(got[0], test.h, test.sq, test.d), LSE: tensor(got[4], test.h, test.sq, 1)}
				all := kernels.CheckOptions{Rows: 1 << 20}
				report, err := call.Check(t.Context(), result, all)
				if err != nil || !report.OK() {
					t.Errorf("attention: %+v, %v", report, err)
				}
				grads := kernels.Gradients{Q: tensor(got[1], test.h, test.sq, test.d), K: tensor(got[2], test.hkv, test.sk, test.d), V: tensor(got[3], test.hkv, test.sk, test.d)}
				report, err = call.CheckBackward(t.Context(), grads, kernels.Result{O: tensor(inputs[3], test.h, test.sq, test.d)}, result, all)
				if err != nil || !report.OK() || report.Rows == 0 {
					t.Errorf("gradients: %+v, %v", report, err)
				}
			})
		})
	}
}

// single returns number i of a slice as float32.
func single(x any, i int) float32 {
	switch x := x.(type) {
	case []float16.Float16:
		return x[i].Float32()
	case []bfloat16.BFloat16:
		return x[i].Float32()
	}
	return x.([]float32)[i]
}

// TestRefused: what attn does not compute is ErrNotImplemented, so that gomlx decomposes it, and
// what is wrong is another error.
func TestRefused(t *testing.T) {
	b := on(t, open(t, "cpu"))
	type options = compute.ScaledDotProductAttentionConfig
	f32 := func(dims ...int) shapes.Shape { return shapes.Make(dtypes.Float32, dims...) }
	x := f32(1, 2, 4, 8)
	closure := func(f compute.Function) compute.Function {
		return must.Get(f.Closure())(t)
	}
	for name, test := range map[string]struct {
		shapes []shapes.Shape // of q, k, v and more
		option func(v []compute.Value) *options
		in     func(f compute.Function) compute.Function
		want   error // nil for any
		text   string
	}{
		"float64":                     {shapes: []shapes.Shape{shapes.Make(dtypes.Float64, 1, 2, 4, 8)}, want: compute.ErrNotImplemented, text: "query is"},
		"a closure":                   {shapes: []shapes.Shape{x}, in: closure, want: compute.ErrNotImplemented, text: "closure"},
		"a dynamic axis":              {shapes: []shapes.Shape{x, x, x, shapes.MakeDynamic(dtypes.Float32, []int{shapes.DynamicDim}, []string{"n"})}, want: compute.ErrNotImplemented, text: "unknown length"},
		"an additive mask and a bias": {shapes: []shapes.Shape{x, x, x, f32(4, 4)}, option: func(v []compute.Value) *options { return &options{Mask: v[3], Bias: v[3]} }, want: compute.ErrNotImplemented, text: "next to a bias"},
		"a bias of three axes":        {shapes: []shapes.Shape{x, x, x, f32(2, 4, 4)}, option: func(v []compute.Value) *options { return &options{Bias: v[3]} }, want: compute.ErrNotImplemented, text: "bias has shape"},
		"three axes":                  {shapes: []shapes.Shape{f32(2, 4, 8)}, want: kernels.ErrShape, text: "query has shape"},
		"heads that do not divide":    {shapes: []shapes.Shape{f32(1, 3, 4, 8), x, x}, want: kernels.ErrShape, text: "heads"},
		"a mask of other keys":        {shapes: []shapes.Shape{x, x, x, f32(4, 5)}, option: func(v []compute.Value) *options { return &options{Mask: v[3]} }, want: kernels.ErrShape, text: "bias"},
		"lengths of queries alone":    {shapes: []shapes.Shape{x, x, x, shapes.Make(dtypes.Int32, 1)}, option: func(v []compute.Value) *options { return &options{QuerySeqLen: v[3]} }, want: kernels.ErrOption, text: "both be set"},
		"lengths of another type":     {shapes: []shapes.Shape{x, x, x, f32(1)}, option: func(v []compute.Value) *options { return &options{QuerySeqLen: v[3], KeyValueSeqLen: v[3]} }, text: "int32"},
	} {
		t.Run(name, func(t *testing.T) {
			f := b.Builder(name).Main()
			var v []compute.Value
			for i, s := range test.shapes {
				p := must.Get(f.Parameter(string(rune('a'+i)), s, nil))(t)
				v = append(v, p)
			}
			for len(v) < 3 {
				v = append(v, v[0])
			}
			var o *options
			if test.option != nil {
				o = test.option(v)
			}
			if test.in != nil {
				f = test.in(f)
			}
			_, _, err := f.FusedScaledDotProductAttention(v[0], v[1], v[2], bhsd, o)
			if err == nil || test.want != nil && !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.text) {
				t.Errorf("the error is %v, should be %v with %q", err, test.want, test.text)
			}
			if test.want != compute.ErrNotImplemented && compute.IsNotImplemented(err) {
				t.Errorf("gomlx would take %v for ErrNotImplemented", err)
			}
			if _, _, _, err := f.FusedScaledDotProductAttentionVJP(v[0], v[1], v[2], bhsd, o, v[0], nil, v[0]); err == nil {
				t.Error("a gradient without the state of the forward pass is accepted")
			}
		})
	}
}

// TestLearned: gomlx takes the gradients of biases and of additive masks for zero. The gradient of
// attention with one that could be learned is an error, that with another one is not.
func TestLearned(t *testing.T) {
	b := on(t, open(t, "cpu"))
	type build func(f compute.Function, float, ints compute.Value) (compute.Value, error)
	for name, test := range map[string]struct {
		learned bool
		bias    build
	}{
		"a parameter": {true, func(_ compute.Function, x, _ compute.Value) (compute.Value, error) { return x, nil }},
		"computed from a parameter": {true, func(f compute.Function, x, _ compute.Value) (compute.Value, error) {
			y, err := f.Sin(x)
			if err != nil {
				return nil, err
			}
			return f.Mul(y, y)
		}},
		"a constant": {false, func(f compute.Function, _, _ compute.Value) (compute.Value, error) {
			return f.Constant(make([]float32, 16), 4, 4)
		}},
		"from integers": {false, func(f compute.Function, _, n compute.Value) (compute.Value, error) {
			return f.ConvertDType(n, dtypes.Float32)
		}},
		"of 2^60 paths": {false, func(f compute.Function, _, n compute.Value) (compute.Value, error) {
			x, err := f.ConvertDType(n, dtypes.Float32)
			for range 60 {
				if err == nil {
					x, err = f.Add(x, x)
				}
			}
			return x, err
		}},
	} {
		for _, additive := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, as a mask %t", name, additive), func(t *testing.T) {
				f := b.Builder(name).Main()
				var v []compute.Value
				for _, s := range []shapes.Shape{shapes.Make(dtypes.Float32, 1, 2, 4, 8), shapes.Make(dtypes.Float32, 4, 4), shapes.Make(dtypes.Int32, 4, 4)} {
					p := must.Get(f.Parameter(s.String(), s, nil))(t)
					v = append(v, p)
				}
				bias := must.Get(test.bias(f, v[1], v[2]))(t)
				opt := &compute.ScaledDotProductAttentionConfig{Bias: bias}
				if additive {
					opt = &compute.ScaledDotProductAttentionConfig{Mask: bias}
				}
				o, states, err := f.FusedScaledDotProductAttention(v[0], v[0], v[0], bhsd, opt)
				must.Do(t, err)
				_, _, _, err = f.FusedScaledDotProductAttentionVJP(v[0], v[0], v[0], bhsd, opt, o, states, o)
				if errors.Is(err, kernels.ErrUnsupported) != test.learned || !test.learned && err != nil {
					t.Errorf("the gradient returns %v", err)
				}
			})
		}
	}
}
