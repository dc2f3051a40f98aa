package gomlx

import (
	"math"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// stages is a graph whose second attention depends on the first, with constants, a closure, a
// named function and a loop before, between and after them.
func stages(f compute.Function, v []compute.Value, attention func(q, k, v compute.Value) compute.Value) ([]compute.Value, error) {
	var first error
	must := func(v compute.Value, err error) compute.Value {
		if first == nil {
			first = err
		}
		return v
	}
	half := must(f.Constant([]float32{0.5}))
	square, err := f.Builder().NewFunction("square")
	if err != nil {
		return nil, err
	}
	p := must(square.Parameter("p", shapes.Make(dtypes.Float32, 1, 2, 6, 4), nil))
	if err := square.Return([]compute.Value{must(square.Mul(p, p))}, nil); err != nil {
		return nil, err
	}
	twice := func(x compute.Value) compute.Value {
		out, err := f.Call(square, x)
		if err != nil {
			first = err
			return x
		}
		return out[0]
	}
	scalar := func(c compute.Function, x compute.Value) compute.Value {
		return must(c.BroadcastInDim(x, shapes.Make(dtypes.Float32, 1, 2, 6, 4), nil))
	}
	derived := must(f.Cos(v[1]))
	// The closures exist before the values of their loop.
	cond, body := must(f.Closure()).(compute.Function), must(f.Closure()).(compute.Function)
	n := must(cond.Parameter("n", shapes.Make(dtypes.Int32), nil))
	must(cond.Parameter("x", shapes.Make(dtypes.Float32, 1, 2, 6, 4), nil))
	if err := cond.Return([]compute.Value{must(cond.LessThan(n, must(cond.Constant([]int32{3}))))}, nil); err != nil {
		return nil, err
	}
	n = must(body.Parameter("n", shapes.Make(dtypes.Int32), nil))
	x := must(body.Parameter("x", shapes.Make(dtypes.Float32, 1, 2, 6, 4), nil))
	x = must(body.Mul(x, scalar(body, half)))                             // captures a constant
	x = must(body.Add(x, must(body.Tanh(must(body.Sub(derived, v[0])))))) // a value and a parameter
	if err := body.Return([]compute.Value{must(body.Add(n, must(body.Constant([]int32{1})))), x}, nil); err != nil {
		return nil, err
	}

	a := must(f.Mul(twice(v[0]), scalar(f, half)))
	y := attention(a, v[1], v[0])
	z := must(f.Add(must(f.Mul(y, scalar(f, half))), a)) // of two stages
	loop, err := f.While(cond, body, must(f.Constant([]int32{0})), z)
	if err != nil {
		return nil, err
	}
	w := attention(loop[1], twice(z), a)
	dead := must(f.Exp(must(f.Exp(w))))
	_ = dead
	return []compute.Value{w, w, y, v[1], half, must(f.Sub(w, v[0])), z}, first
}

// decomposed is unscaled attention by operations of the Go backend.
func decomposed(f compute.Function) func(q, k, v compute.Value) compute.Value {
	return func(q, k, v compute.Value) compute.Value {
		s, err := f.DotGeneral(q, []int{3}, []int{0, 1}, k, []int{3}, []int{0, 1}, compute.DotGeneralConfig{})
		if err != nil {
			panic(err)
		}
		if s, err = f.FusedSoftmax(s, 3); err != nil {
			panic(err)
		}
		if s, err = f.DotGeneral(s, []int{3}, []int{0, 1}, v, []int{2}, []int{0, 1}, compute.DotGeneralConfig{}); err != nil {
			panic(err)
		}
		return s
	}
}

// TestStages compares a graph of several stages with the same graph in one, run by the Go backend. The inputs may be
// donated; those that are not keep their numbers. Runs at the same time have the same bits.
func TestStages(t *testing.T) {
	b := on(t, open(t, "cpu"))
	shape := shapes.Make(dtypes.Float32, 1, 2, 6, 4)
	rng := rand.New(rand.NewPCG(3, 4))
	inputs := []any{numbers(rng, dtypes.Float32, 48), numbers(rng, dtypes.Float32, 48), numbers(rng, dtypes.Float32, 48)}
	in := []shapes.Shape{shape, shape, shape} // the last one is not used
	want := run(t, b.(*backend).Backend, inputs, in, func(f compute.Function, v []compute.Value) ([]compute.Value, error) {
		return stages(f, v, decomposed(f))
	})

	builder := b.Builder("stages")
	f := builder.Main()
	var v []compute.Value
	for i := range inputs {
		p := must.Get(f.Parameter(string(rune('a'+i)), shape, nil))(t)
		v = append(v, p)
	}
	out := must.Get(stages(f, v, func(q, k, v compute.Value) compute.Value {
		o, _, err := f.FusedScaledDotProductAttention(q, k, v, bhsd, &compute.ScaledDotProductAttentionConfig{Scale: 1})
		must.Do(t, err)
		return o
	}))(t)
	must.Do(t, f.Return(out, nil))
	exec := must.Get(builder.Compile())(t)
	if n := len(exec.(*program).stages); n != 3 {
		t.Errorf("there are %d stages, two dependent calls need 3", n)
	}
	if _, err := f.Neg(out[0]); err == nil {
		t.Error("a compiled builder takes operations")
	}

	execute := func(donate []bool) []any {
		buffers := make([]compute.Buffer, len(inputs))
		for i, x := range inputs {
			var err error
			if buffers[i], err = b.BufferFromFlatData(0, x, shape); err != nil {
				t.Error(err)
			}
		}
		results, err := exec.Execute(buffers, donate, 0)
		if err != nil {
			t.Error(err)
			return nil
		}
		for i, buf := range buffers {
			if len(donate) > 0 && donate[i] {
				if flat, _ := buf.Data(); i == 2 && flat != nil {
					t.Error("the program keeps a donated input that it does not need")
				}
				continue
			}
			if flat, err := buf.Data(); err != nil || !reflect.DeepEqual(flat, inputs[i]) {
				t.Errorf("input %d changed, %v", i, err)
			}
		}
		var flats []any
		for i, r := range results {
			if r.Backend() != b {
				t.Errorf("result %d belongs to another backend", i)
			}
			flat, err := r.Data()
			if err != nil {
				t.Error(err)
			}
			flats = append(flats, flat)
		}
		// Results share no memory with each other.
		flats[0].([]float32)[0]++
		if flats[0].([]float32)[0] == flats[1].([]float32)[0] {
			t.Error("two results are one buffer")
		}
		flats[0].([]float32)[0] = flats[1].([]float32)[0]
		return flats
	}
	got := execute(nil)
	for i := range want {
		for j := range want[i].([]float32) {
			x, y := want[i].([]float32)[j], got[i].([]float32)[j]
			if !(math.Abs(float64(x-y)) <= 1e-5*max(1, math.Abs(float64(x)))) {
				t.Errorf("element %d of result %d is %v, the Go backend has %v", j, i, y, x)
			}
		}
	}
	done := make(chan []any)
	donations := [][]bool{nil, {true, false, false}, {false, true, true}, {true, true, true}}
	for _, donate := range donations {
		go func() { done <- execute(donate) }()
	}
	for range donations {
		if again := <-done; !reflect.DeepEqual(again, got) {
			t.Error("another run has other bits")
		}
	}
	if _, err := exec.Execute(nil, nil, 0); err == nil {
		t.Error("a run without inputs is accepted")
	}
	foreign := must.Get(b.(*backend).Backend.BufferFromFlatData(0, inputs[0], shape))(t)
	if _, err := exec.Execute([]compute.Buffer{foreign, foreign, foreign}, nil, 0); err == nil {
		t.Error("a buffer of another backend is accepted")
	}
}
