package gpu

import (
	"math"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// gradientCases are calls whose gradients take every reduction: no bias, biases of all pairs, of
// keys, of rows and of heads, and all options at once, with one result or the sum of several.
func gradientCases() []kernelstest.Case {
	d := kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 37, SeqK: 75, Dim: 16, ValueDim: 24}
	long := kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 150, SeqK: 60, Dim: 160, ValueDim: 33}
	causal := kernels.Options{Causal: true, Align: kernels.LowerRight}
	everything := kernelstest.Case{
		Name: "every option", Dims: d, Seed: 1, BiasHides: true, MaskShape: backend.Shape{2, 1, 37, 75}, BiasShape: backend.Shape{1, 4, 37, 75},
		RelativeShape: backend.Shape{2, 1, 1, 37 + 75 - 1}, BlockSize: 7, BlockShape: backend.Shape{1, 4, 6, 11},
		Options: kernels.Options{Window: &kernels.Window{Left: 50, Right: 12}, Offset: []int{9}, KLen: []int{75, 37}, Softcap: 2,
			Dropout: kernels.Dropout{P: 0.3, Seed: 1<<40 + 5, First: [4]int{1, 2, 3, 70}},
			ALiBi:   []float32{0.1, 0.05, 0.033, 0.025}, Sinks: []float32{1.5, -2, 4, float32(math.Inf(-1))}},
	}
	added := everything
	added.Name, added.Seed, added.BiasShape = "every option, added", 3, backend.Shape{2, 4, 1, 1}
	added.Options.Prefix = []int{20, 9} // several calls, whose gradients are summed
	return []kernelstest.Case{
		{Name: "plain", Dims: d, Seed: 1},
		{Name: "causal", Dims: d, Seed: 3, Options: causal, BiasShape: backend.Shape{1, 1, 37, 75}},
		{Name: "f16", Dims: d, Seed: 6, DType: backend.F16, Options: causal, BiasShape: backend.Shape{1, 4, 1, 75}},
		{Name: "bf16", Dims: d, Seed: 4, DType: backend.BF16, BiasShape: backend.Shape{2, 1, 37, 1}},
		{Name: "160 columns, one key head", Dims: long, Seed: 3, Options: causal, BiasShape: backend.Shape{1, 1, 1, 1}},
		everything, added,
	}
}

// TestGradientSteps: the steps of each tile of gradient.wgsl take all of its others.
func TestGradientSteps(t *testing.T) {
	for _, columns := range []int{32, 64, 80, 96, 128} {
		for _, of := range []shaders.Result{shaders.DKV, shaders.DQ} {
			x := tilingOf(of, columns)
			k := shaders.Describe(shaders.Gradient{Expand: shaders.Full, Of: of, TX: x.tx(), TY: x.ty, QD: gradientDepths}).Constants
			if k["STEPS"]*k["STAGED"] != k["OTHERS"] || k["OTHERS"] != uint32(x.others()) {
				t.Errorf("%d columns, result %d: %d steps of %d for a tile of %d, %d by the host", columns, of, k["STEPS"], k["STAGED"], k["OTHERS"], x.others())
			}
		}
	}
}

// TestGradients compares every element of all gradients with the reference. With -short it runs
// those with every option alone: the suite has such as the others.
func TestGradients(t *testing.T) {
	cases := gradientCases()
	if testing.Short() {
		cases = cases[5:]
	}
	checkGradients(t, open(t, Options{}), cases)
}

func checkGradients(t *testing.T, b *Backend, cases []kernelstest.Case) {
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) { check(t, kernelstest.CheckGradients(t, kernels.NewDevice(b), c)) })
	}
}

// TestGradientsAsOnGPU computes gradients with the kernels of hardware GPUs, whose loops are unrolled
// and which load four elements at once.
func TestGradientsAsOnGPU(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: the kernels of software drivers differ in loads and unrolled loops alone")
	}
	b := open(t, Options{})
	b.info.Type = backend.Discrete
	d := kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 150, SeqK: 140, Dim: 64, ValueDim: 64}
	partial := d
	partial.Dim, partial.ValueDim = 24, 20
	checkGradients(t, b, []kernelstest.Case{
		{Name: "full rows", Dims: d, Seed: 1},
		{Name: "partial rows, causal", Dims: partial, Seed: 3, Options: kernels.Options{Causal: true}},
		{Name: "f16 and bf16", Dims: d, Seed: 6, DType: backend.F16},
	})
}

// TestGradientsCut compares the bits of gradients with low limits with those without. Sums over
// the keys of a row, and sums of boxes that are added to a gradient, may depend on cuts.
func TestGradientsCut(t *testing.T) {
	cases := gradientCases()[4:]
	if testing.Short() {
		cases = cases[1:]
	}
	var want, o, lse [][]float32
	for _, limits := range []struct {
		name string
		opt  Options
	}{
		{"none", Options{}},
		{"bindings of 100 KiB", Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 100 << 10}}},
		{"three workgroups a dimension, little work at once", Options{Limits: gputypes.Limits{MaxComputeWorkgroupsPerDimension: 3}, MaxWork: 1e6}},
		{"streamed", Options{MemoryBytes: 700 << 10}},
	} {
		b := open(t, limits.opt)
		n := 0
		for i, c := range cases {
			in := c.Put(t, kernels.NewDevice(b))
			in.Options.LSE = true
			call := prepare(t, b, in.Q, in.K, in.V, in.Options)
			r := must.Get(call.Run(t.Context()))(t)
			if i == len(o) {
				o, lse = append(o, floats(t, b, r.O)), append(lse, floats(t, b, r.LSE))
			} // else limits may have changed the kernel of the forward pass, and with it the bits
			r.O = upload(t, b, host(t, r.O.Shape(), func(n int) float32 { return o[i][n] }))
			r.LSE = upload(t, b, host(t, r.LSE.Shape(), func(n int) float32 { return lse[i][n] }))
			grads := must.Get(call.AllocGradients(t.Context(), call.Gradients()))(t)
			t.Cleanup(grads.Release)
			d := kernels.Result{O: upload(t, b, host(t, r.O.Shape(), wave)), LSE: upload(t, b, host(t, r.LSE.Shape(), wave))}
			must.Do(must.In(t, "%s: %s", limits.name, c.Name), call.Backward(t.Context(), grads, d, r))
			for name, x := range []backend.Tensor{grads.Q, grads.K, grads.V, grads.Sinks, grads.RelativeBias} {
				if x.IsZero() || name == 4 && c.Options.Prefix != nil {
					continue
				}
				got := floats(t, b, x)
				if n == len(want) {
					want = append(want, got)
				}
				sameRow(t, limits.name+": "+c.Name+": "+[]string{"dq", "dk", "dv", "dsinks", "drelative"}[name], got, want[n])
				n++
			}
		}
		check(t, b.Close())
	}
}
