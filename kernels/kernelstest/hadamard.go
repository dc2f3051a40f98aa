package kernelstest

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// testHadamards tests caches that multiply rows by Hadamard matrices.
func testHadamards(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Projector](dev) {
		t.Logf("%s projects nothing", dev.Info().Name)
		return
	}
	t.Run("f32", func(t *testing.T) { testHadamard(t, dev) })
	t.Run("tails", func(t *testing.T) { testHadamardTails(t, dev) })
}

// cached appends k and v and returns the output of q, from a Cache or from the pages of two
// sequences that share their first ones.
func cached(t *testing.T, dev *kernels.Device, c kvcache.Config, paged bool, q, k, v kernels.Tensor) []float32 {
	t.Helper()
	ctx, opt := t.Context(), kvcache.CallOptions{}
	var r kernels.Result
	if paged {
		x := must(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: c.KVHeads, Dim: c.Dim, ValueDim: c.ValueDim, DType: c.DType, PageSize: 16, Pages: 9, Hadamard: c.Hadamard}))(t)
		defer x.Release()
		s := must(x.NewSequence())(t)
		if err := x.Batch(s).Append(ctx, k, v, nil); err != nil {
			t.Fatal(err)
		}
		both := x.Batch(s, must(s.Fork())(t))
		opt.SharePrefix = true
		r = must(both.Attention(ctx, must(q.Broadcast(kernels.Shape{2, q.Shape()[1], q.Shape()[2], q.Shape()[3]}))(t), opt))(t)
	} else {
		x := must(kvcache.New(ctx, dev, c))(t)
		defer x.Release()
		if err := x.Append(ctx, k, v, nil); err != nil {
			t.Fatal(err)
		}
		r = must(x.Attention(ctx, q, opt))(t)
	}
	defer r.Release()
	return must(dev.ToFloat32(ctx, r.O))(t)
}

// testHadamard compares a cache in f32 with and without the matrices. With D the larger head size and a the
// largest magnitude of an operand:
//
//   - An element of x·H is off by at most (D+1)·u·Σ|x|/√D <= (D+1)·u·√D·a, a row by e = D·(D+1)·u·a.
//   - A score, scale·q·k, is off by at most 2·scale·e·√D·a, and each weight by a factor of exp of twice that. An
//     output in the turned basis, which is at most √D·a, is off by that factor minus 1, plus e for its values.
//   - Both outputs have the error of attention, at most that of rows whose elements have the largest magnitude;
//     turning back multiplies errors by at most √D and adds e.
func testHadamard(t *testing.T, dev *kernels.Device) {
	needsAll(t, dev, "pages")
	const heads, tokens, rows, a = 2, 100, 3, 0.5
	rng := rand.New(rand.NewPCG(35, 1))
	for _, dims := range [][2]int{{8, 8}, {32, 64}, {1, 128}} {
		draw := func(n, dim int) kernels.Tensor {
			data := make([]float32, heads*n*dim)
			for i := range data {
				data[i] = (rng.Float32()*2 - 1) * a
			}
			x := must(dev.FromFloat32(t.Context(), kernels.F32, data, kernels.Shape{1, heads, n, dim}))(t)
			t.Cleanup(x.Release)
			return x
		}
		q, k, v := draw(rows, dims[0]), draw(tokens, dims[0]), draw(tokens, dims[1])
		most := max(dims[0], dims[1])
		d, scale := float64(most), 1/math.Sqrt(float64(dims[0]))
		root := math.Sqrt(d)
		attention := oracle.Solve(oracle.Row{Q: slices.Repeat([]float32{a}, most), K: slices.Repeat([]float32{a}, tokens*most),
			V: slices.Repeat([]float32{float32(root) * a}, tokens), Dv: 1, Scale: float32(scale)}).OBound[0]
		e := d * (d + 1) * 0x1p-24 * a
		bound := (1+root)*attention + root*(root*a*math.Expm1(4*scale*e*root*a)+e) + e
		for _, paged := range []bool{false, true} {
			c := kvcache.Config{KVHeads: heads, Dim: dims[0], ValueDim: dims[1], Capacity: tokens}
			plain := cached(t, dev, c, paged, q, k, v)
			c.Hadamard = true
			largest := 0.0
			for i, o := range cached(t, dev, c, paged, q, k, v) {
				largest = max(largest, math.Abs(float64(o)-float64(plain[i])))
			}
			if !(largest <= bound) {
				t.Errorf("head sizes %v, pages %v: outputs differ by %.3g, the bound is %.3g", dims, paged, largest, bound)
			}
		}
	}
}

// testHadamardTails checks that the matrices bring a cache in q4 nearer to one in f32 when a few columns of keys
// and values are large, as those of language models are.
func testHadamardTails(t *testing.T, dev *kernels.Device) {
	q4, q8 := kernels.Q4, kernels.Q8
	needs(t, dev, Case{Keys: &q4})
	needs(t, dev, Case{Keys: &q8})
	needsAll(t, dev, "pages")
	const heads, tokens, rows, dim = 2, 100, 3, 64
	rng := rand.New(rand.NewPCG(35, 2))
	draw := func(n int) kernels.Tensor {
		data := make([]float32, heads*n*dim)
		for i := range data {
			data[i] = float32(rng.NormFloat64())
			if i%dim%32 == 5 {
				data[i] *= 20
			}
		}
		x := must(dev.FromFloat32(t.Context(), kernels.F32, data, kernels.Shape{1, heads, n, dim}))(t)
		t.Cleanup(x.Release)
		return x
	}
	data := make([]float32, heads*rows*dim)
	for i := range data {
		data[i] = float32(rng.NormFloat64()) / 8
	}
	q := must(dev.FromFloat32(t.Context(), kernels.F32, data, kernels.Shape{1, heads, rows, dim}))(t)
	t.Cleanup(q.Release)
	k, v := draw(tokens), draw(tokens)
	for _, paged := range []bool{false, true} {
		off := func(dtype kernels.DType, hadamard bool) (sum float64) {
			c := kvcache.Config{KVHeads: heads, Dim: dim, DType: dtype, Capacity: tokens, Hadamard: hadamard}
			got := cached(t, dev, c, paged, q, k, v)
			c.DType, c.Hadamard = kernels.F32, false
			for i, want := range cached(t, dev, c, paged, q, k, v) {
				sum += math.Pow(float64(got[i]-want), 2)
			}
			return math.Sqrt(sum / float64(len(got)))
		}
		plain, spread := off(kernels.Q4, false), off(kernels.Q4, true)
		t.Logf("pages %v: root mean square errors of q4 %.3g, of q4 with matrices %.3g, of q8 %.3g", paged, plain, spread, off(kernels.Q8, false))
		if !(spread < plain) {
			t.Errorf("pages %v: the error with matrices is %.3g, without %.3g", paged, spread, plain)
		}
	}
}
