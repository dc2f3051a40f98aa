package born_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/born-ml/born/autodiff"
	"github.com/born-ml/born/backend/cpu"
	"github.com/born-ml/born/models/llama"
	"github.com/born-ml/born/nn"
	"github.com/born-ml/born/tensor"
	"github.com/seed90331342/attn/backend/oracle"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	attnborn "github.com/seed90331342/attn/kernels/adapters/born"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

type (
	Backend = *autodiff.Backend[*cpu.Backend]
	Tensor  = *tensor.Tensor[float32, Backend]
)

var (
	ctx     = context.Background()
	backend = autodiff.New(cpu.New())
	inf     = float32(math.Inf(1))
)

// eachDevice runs f on the CPU, which shares memory with born, and on a GPU, which does not.
func eachDevice(t *testing.T, f func(t *testing.T, dev *kernels.Device)) {
	for _, name := range []string{"cpu", "gpu"} {
		t.Run(name, func(t *testing.T) {
			dev, err := kernels.Open(name)
			if name == "gpu" && errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true" {
				t.Skip(err)
			}
			must.Do(t, err)
			defer dev.Close()
			f(t, dev)
		})
	}
}

// random returns a tensor of normally distributed numbers.
func random(rng *rand.Rand, shape ...int) Tensor {
	x := tensor.Zeros[float32](shape, backend)
	for i := range x.Data() {
		x.Data()[i] = float32(rng.NormFloat64())
	}
	return x
}

// hidden returns a mask of random biases that hides each key with probability p, but the first.
func hidden(rng *rand.Rand, p float64, shape ...int) Tensor {
	x := random(rng, shape...)
	for i := range x.Data() {
		if i%shape[len(shape)-1] > 0 && rng.Float64() < p {
			x.Data()[i] = -inf
		}
	}
	return x
}

// within compares each element of o with float64. The bound is that of package oracle, which
// holds for sums in any order, those of born's own function among them.
func within(t *testing.T, name string, o, q, k, v, mask Tensor, scale float32) {
	t.Helper()
	qs, ks, dv := q.Shape(), k.Shape(), v.Shape()[3]
	if want := (tensor.Shape{qs[0], qs[1], qs[2], dv}); !o.Shape().Equal(want) {
		t.Fatalf("%s has shape %v, should have %v", name, o.Shape(), want)
	}
	if mask != nil {
		mask = mask.Expand(tensor.Shape{qs[0], qs[1], qs[2], ks[2]})
	}
	if scale == 0 {
		scale = float32(1 / math.Sqrt(float64(qs[3])))
	}
	var worst oracle.Worst
	for row := range qs[0] * qs[1] * qs[2] {
		head := row / qs[2]
		r := oracle.Row{Q: q.Data()[row*qs[3]:][:qs[3]], K: k.Data()[head*ks[2]*qs[3]:][:ks[2]*qs[3]],
			V: v.Data()[head*ks[2]*dv:][:ks[2]*dv], Dv: dv, Scale: scale}
		if mask != nil {
			r.Bias = func(j int) float64 { return float64(mask.Data()[row*ks[2]+j]) }
		}
		ref := oracle.Solve(r)
		for i, x := range o.Data()[row*dv:][:dv] {
			worst.See(float64(x), ref.O[i], ref.OBound[i], func() string { return fmt.Sprintf("%s, element %d of row %d", name, i, row) })
		}
	}
	must.Do(t, worst.Err())
}

// TestAttention compares the function, and born's own, with float64 on each kind of operand.
func TestAttention(t *testing.T) {
	for name, test := range map[string]struct {
		b, h, sq, sk, d, dv int
		mask                func(rng *rand.Rand) Tensor
		scale               float32
	}{
		"no mask":                       {2, 3, 17, 17, 8, 8, nil, 0},
		"a step of decoding":            {1, 4, 1, 33, 64, 64, nil, 0.125},
		"other keys than queries":       {1, 2, 5, 40, 16, 16, nil, 0},
		"values of another size":        {1, 2, 5, 9, 16, 24, nil, 0.5},
		"born's causal mask":            {2, 2, 33, 33, 32, 32, func(*rand.Rand) Tensor { return nn.CausalMask(33, backend) }, 0},
		"a causal mask of one row":      {1, 2, 1, 1, 8, 8, func(*rand.Rand) Tensor { return nn.CausalMask(1, backend) }, 0},
		"a mask that is nearly causal":  {1, 2, 9, 9, 8, 8, func(*rand.Rand) Tensor { m := nn.CausalMask(9, backend); m.Data()[3] = 0.5; return m }, 0},
		"a bias below the diagonal":     {1, 2, 9, 9, 8, 8, func(*rand.Rand) Tensor { m := nn.CausalMask(9, backend); m.Data()[9] = 0.5; return m }, 0},
		"a mask for each batch":         {2, 2, 7, 19, 8, 8, func(rng *rand.Rand) Tensor { return hidden(rng, 0.5, 2, 1, 7, 19) }, 0},
		"a mask for each head":          {2, 2, 7, 19, 8, 8, func(rng *rand.Rand) Tensor { return hidden(rng, 0.5, 1, 2, 7, 19) }, 0},
		"a mask of keys":                {2, 2, 7, 19, 8, 8, func(rng *rand.Rand) Tensor { return hidden(rng, 0.5, 2, 1, 1, 19) }, 0},
		"a mask without batch and head": {2, 2, 7, 19, 8, 8, func(rng *rand.Rand) Tensor { return hidden(rng, 0.5, 7, 19) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			eachDevice(t, func(t *testing.T, dev *kernels.Device) {
				rng := rand.New(rand.NewPCG(1, 2))
				q, k, v := random(rng, test.b, test.h, test.sq, test.d), random(rng, test.b, test.h, test.sk, test.d), random(rng, test.b, test.h, test.sk, test.dv)
				var mask Tensor
				if test.mask != nil {
					mask = test.mask(rng)
				}
				o, weights := attnborn.New[Backend](ctx, dev, nil)(q, k, v, mask, test.scale)
				if weights != nil {
					t.Error("the function returned weights")
				}
				within(t, "attn", o, q, k, v, mask, test.scale)
				own, _ := nn.ScaledDotProductAttention(q, k, v, mask, test.scale)
				within(t, "born", own, q, k, v, mask, test.scale)
			})
		})
	}
}

// TestHiddenRows: a row that sees no key yields zeros, where born's own function yields NaN.
func TestHiddenRows(t *testing.T) {
	eachDevice(t, func(t *testing.T, dev *kernels.Device) {
		rng := rand.New(rand.NewPCG(3, 4))
		q, mask := random(rng, 1, 1, 2, 4), tensor.Full(tensor.Shape{1, 1, 2, 2}, -inf, backend)
		o, _ := attnborn.New[Backend](ctx, dev, nil)(q, q, q, mask, 0)
		for i, x := range o.Data() {
			if x != 0 {
				t.Errorf("element %d is %v, should be 0", i, x)
			}
		}
	})
}

// config is a model with grouped-query attention: two query heads share a key head.
var config = llama.Config{VocabSize: 64, HiddenSize: 64, NumLayers: 3, NumHeads: 4, NumKVHeads: 2, HeadDim: 16,
	FFNSize: 96, MaxSeqLen: 64, RopeTheta: 10000, NormEpsilon: 1e-5}

// tokens returns ids [batch, n] that begin with the given one.
func tokens(batch, n, first int) *tensor.RawTensor {
	ids, err := tensor.NewRaw(tensor.Shape{batch, n}, tensor.Int32, tensor.CPU)
	if err != nil {
		panic(err)
	}
	for i := range ids.AsInt32() {
		ids.AsInt32()[i] = int32((first + 7*i) % config.VocabSize)
	}
	return ids
}

// TestModel runs born's model with and without attn: a prompt of two batches, and steps over a cache. Each call of the
// attention function is within its bound; so are the calls of born's own. The logits agree.
func TestModel(t *testing.T) {
	eachDevice(t, func(t *testing.T, dev *kernels.Device) {
		model := llama.NewModel(config, backend)
		function := attnborn.New[Backend](ctx, dev, nil)
		calls := 0
		checked := func(q, k, v, mask Tensor, scale float32) (Tensor, Tensor) {
			calls++
			o, w := function(q, k, v, mask, scale)
			within(t, "attn", o, q, k, v, mask, scale)
			own, _ := nn.ScaledDotProductAttention(q, k, v, mask, scale)
			within(t, "born", own, q, k, v, mask, scale)
			return o, w
		}
		run := func(attention llama.AttentionFunc[Backend]) (logits [][]float32) {
			model.SetAttentionFunc(attention)
			logits = append(logits, model.Forward(tokens(2, 33, 1), nil, 0).AsFloat32())
			cache := llama.NewModelCache(config, config.MaxSeqLen, backend)
			logits = append(logits, model.Forward(tokens(1, 9, 5), cache, 0).AsFloat32())
			for at := 9; at < 13; at++ {
				logits = append(logits, model.Forward(tokens(1, 1, at), cache, at).AsFloat32())
			}
			return logits
		}
		want, got := run(nil), run(checked)
		if n := 6 * config.NumLayers; calls != n {
			t.Errorf("the function ran %d times, should run %d times", calls, n)
		}
		for i := range want {
			agree(t, fmt.Sprintf("run %d", i), got[i], want[i])
		}
	})
}

// agree compares logits: after three layers that multiply the differences, those of a model with attn
// and of born alone agree to 2^-16 of the largest.
func agree(t *testing.T, name string, got, want []float32) {
	t.Helper()
	most, largest := 0.0, 0.0
	for j, x := range want {
		most = max(most, math.Abs(float64(got[j]-x)))
		largest = max(largest, math.Abs(float64(x)))
	}
	if !(most <= largest*0x1p-16) {
		t.Errorf("logits of %s differ by %g, the largest is %g", name, most, largest)
	}
}

// TestNoCopy: on a device that computes in host memory, o is the memory that born reads, and no
// operand is copied: a call allocates its result and little else.
func TestNoCopy(t *testing.T) {
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	function := attnborn.New[Backend](ctx, dev, nil)
	x := random(rand.New(rand.NewPCG(5, 6)), 1, 8, 256, 64)
	mask := nn.CausalMask(256, backend)
	function(x, x, x, mask, 0)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const calls = 10
	for range calls {
		function(x, x, x, mask, 0)
	}
	runtime.ReadMemStats(&after)
	bytes, size := (after.TotalAlloc-before.TotalAlloc)/calls, uint64(4*x.NumElements())
	if bytes > size+size/4 {
		t.Errorf("a call allocates %d bytes, its output has %d", bytes, size)
	}
}

// TestErrors: errors name the argument and wrap a sentinel, as a panic or through fail, which then yields NaN.
func TestErrors(t *testing.T) {
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	rng := rand.New(rand.NewPCG(7, 8))
	q, k := random(rng, 1, 2, 3, 8), random(rng, 1, 2, 5, 8)
	remote := must.Get(tensor.NewRaw(tensor.Shape{1, 2, 5, 8}, tensor.Float32, tensor.WebGPU))(t)
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	for name, test := range map[string]struct {
		ctx           context.Context
		q, k, v, mask Tensor
		scale         float32
		want          error
		text          string
	}{
		"no k":                      {ctx, q, nil, k, nil, 0, kernels.ErrShape, "k is nil"},
		"no q":                      {ctx, nil, k, k, nil, 0, kernels.ErrShape, "q is nil"},
		"three axes":                {ctx, q, random(rng, 2, 5, 8), k, nil, 0, kernels.ErrShape, "k has shape [2 5 8]"},
		"another head size":         {ctx, q, random(rng, 1, 2, 5, 4), k, nil, 0, kernels.ErrShape, "head size"},
		"fewer values than keys":    {ctx, q, k, random(rng, 1, 2, 4, 8), nil, 0, kernels.ErrShape, "same heads and keys"},
		"a mask of more axes":       {ctx, q, k, k, random(rng, 1, 1, 1, 3, 5), 0, kernels.ErrShape, "mask has shape"},
		"a mask of other rows":      {ctx, q, k, k, random(rng, 1, 1, 4, 5), 0, kernels.ErrShape, "bias"},
		"a causal mask of the keys": {ctx, q, k, k, nn.CausalMask(5, backend), 0, kernels.ErrShape, "bias"},
		"a scale that is NaN":       {ctx, q, k, k, nil, float32(math.NaN()), kernels.ErrOption, "scale"},
		"memory of a GPU":           {ctx, q, tensor.New[float32](remote, backend), k, nil, 0, kernels.ErrDevice, "k is in the memory of WebGPU"},
		"a context that is over":    {cancelled, q, k, k, nil, 0, context.Canceled, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var failed error
			o, _ := attnborn.New[Backend](test.ctx, dev, func(err error) { failed = err })(test.q, test.k, test.v, test.mask, test.scale)
			must.Fail(t, "the call", failed, test.want, test.text)
			if test.q != nil && (!o.Shape().Equal(test.q.Shape()) || o.Data()[0] == o.Data()[0]) {
				t.Errorf("the output is %v, should be NaN", o)
			}
			defer func() {
				if err, ok := recover().(error); !ok || !errors.Is(err, test.want) {
					t.Errorf("the panic is %v, should be %v", err, test.want)
				}
			}()
			attnborn.New[Backend](test.ctx, dev, nil)(test.q, test.k, test.v, test.mask, test.scale)
		})
	}
}

// TestTape: gradients would miss attention, so that a tape which records is an error.
func TestTape(t *testing.T) {
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	backend := autodiff.New(cpu.New())
	x := tensor.Ones[float32](tensor.Shape{1, 1, 2, 4}, backend)
	var failed error
	function := attnborn.New[Backend](ctx, dev, func(err error) { failed = err })
	backend.Tape().StartRecording()
	if function(x, x, x, nil, 0); !errors.Is(failed, kernels.ErrUnsupported) {
		t.Errorf("the error is %v, should be ErrUnsupported", failed)
	}
	failed = nil
	backend.NoGrad(func() { function(x, x, x, nil, 0) })
	if failed != nil {
		t.Errorf("without gradients: %v", failed)
	}
}

// BenchmarkTurns times a LLaMA that born loads from a GGUF file with born's own attention and with attn, in turns, and reports the
// median of each in milliseconds: a prompt of 512 tokens, and a step of decoding over a cache of 512.
//
//	go test -run '^$' -bench Turns -benchtime 20x
func BenchmarkTurns(b *testing.B) {
	dev := must.Get(kernels.Open("cpu"))(b)
	defer dev.Close()
	config := llama.Config{VocabSize: 256, HiddenSize: 256, NumLayers: 4, NumHeads: 8, NumKVHeads: 2, HeadDim: 32,
		FFNSize: 688, MaxSeqLen: 4096, RopeTheta: 10000, NormEpsilon: 1e-5}
	model := loaded(b, config)
	functions := [2]llama.AttentionFunc[Backend]{nil, attnborn.New[Backend](ctx, dev, nil)}
	turns := func(b *testing.B, step func()) {
		var times [2][]float64
		for b.Loop() {
			for i, f := range functions {
				model.SetAttentionFunc(f)
				start := time.Now()
				step()
				times[i] = append(times[i], float64(time.Since(start).Microseconds())/1000)
			}
		}
		for _, t := range times {
			slices.Sort(t)
		}
		born, attn := times[0][len(times[0])/2], times[1][len(times[1])/2]
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(born, "born-ms")
		b.ReportMetric(attn, "attn-ms")
		b.ReportMetric(born/attn, "born/attn")
	}
	prompt := tokens(1, 512, 1)
	b.Run("prompt", func(b *testing.B) {
		turns(b, func() { model.Forward(prompt, nil, 0) })
	})
	b.Run("decode", func(b *testing.B) {
		cache := llama.NewModelCache(config, config.MaxSeqLen, backend)
		model.Forward(prompt, cache, 0)
		at := 512
		turns(b, func() {
			model.Forward(tokens(1, 1, at), cache, at)
			at++
		})
	})
}
