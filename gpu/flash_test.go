package gpu

import (
	"context"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/kernels/kernelstest"
)

func plainOnly(tune.Shape) (tune.Variant, string) { return tune.Variant{}, "asked for" }

// TestConformanceOfPlain runs the suite on the plain kernel, and compares the
// register-tiled kernel with it on drawn problems, within both bounds.
func TestConformanceOfPlain(t *testing.T) {
	conform(t, "TestSameBits compares the plain kernel with the one that the suite runs on", Options{decodeRows: -1}, plainOnly, kernelstest.Harness{
		Against: func(t testing.TB) backend.Backend { return open(t, Options{}) },
		Extent:  kernelstest.Extent{AgainstDraws: 50, Only: ofKernels},
	})
}

// TestConformanceOfVariants runs the suite on each variant that a head's class has and the
// device supports, including calls that would be decoded. Variants differ in their tiles alone and give the
// same bits, so that a few of the long lists suffice: how keys are stored is in them, Caches is left out.
func TestConformanceOfVariants(t *testing.T) {
	few := slices.DeleteFunc(slices.Clone(ofKernels), func(part string) bool { return part == "Caches" || part == "Models" })
	for i, name := range []string{"S", "M", "L", "L32", "D"} {
		t.Run(name, func(t *testing.T) {
			var taken atomic.Int64
			only := func(s tune.Shape) (tune.Variant, string) {
				for _, v := range s.Candidates() {
					if v.Name == name {
						taken.Add(1)
						return v.Quick(), "the test asks for it"
					}
				}
				return s.Rule()
			}
			conform(t, "TestSameBits compares them with the one that the suite runs on", Options{decodeRows: -1}, only, kernelstest.Harness{
				Extent: kernelstest.Extent{PairsEvery: 36, PairsFrom: 4 + 7*i, Only: few}})
			if taken.Load() < 100 {
				t.Errorf("%s was taken %d times", name, taken.Load())
			}
		})
	}
}

// named returns a variant of a class.
func named(t testing.TB, width int, name string) tune.Variant {
	t.Helper()
	s := tune.Shape{Tiling: tune.TilingOf(width, width), ValueDim: width, Software: true, Limits: tune.Limits{Threads: 1 << 10, Memory: 1 << 20, Binding: 1 << 30}}
	for _, v := range s.Candidates() {
		if v.Name == name {
			return v
		}
	}
	t.Fatalf("class %d has no variant %s", width, name)
	return tune.Variant{}
}

// spread returns a call of 2 heads that share one, over nine splits or so. In the first and in
// the last of them, some rows of a workgroup see keys and others none.
func spread(t testing.TB, b *Backend, d, dv int, dtype backend.DType, features bool) *backend.Call {
	const rows, keys = 150, 2300
	in := func(shape backend.Shape, from int) backend.Tensor {
		return tensor(t, b, dtype, shape, func(i int) float32 { return wave(3*i + from) })
	}
	c := callOf(t, b, in(backend.Shape{1, 2, rows, d}, 0), in(backend.Shape{1, 1, keys, d}, 1), in(backend.Shape{1, 1, keys, dv}, 2))
	c.Scale, c.Visible = 0.1, backend.Visibility{Offset: 1060, Left: 860, Right: 955, KLen: []int{2163}}
	if features {
		c.Softcap = 3
		c.Mask = bools(t, b, backend.Shape{1, 1, 1, keys}, func(i int) bool { return i%7 != 0 })
		c.Bias = upload(t, b, host(t, backend.Shape{1, 1, rows, 1}, func(i int) float32 {
			if i == 70 {
				return float32(math.Inf(-1))
			}
			return wave(i)
		}))
		if dtype == backend.F32 { // the kernel with bindings for both compiles longer
			c.Relative = input(t, b, backend.Shape{1, 2, 1, rows + keys - 1})
			c.Blocks, c.BlockQ, c.BlockK = blocksOf(t, b, 10, 12), 16, 200
		}
		c.Slopes, c.Sinks, c.Dropout = []float32{0.01, -0.02}, []float32{2, -3}, backend.Dropout{P: 0.3, Seed: 1, First: [4]int{0, 0, 3, 0}}
	}
	return c
}

// TestPlainIsTheLastResort checks that a device that cannot hold the state of any variant
// runs the plain kernel, and that the plan has the reason.
func TestPlainIsTheLastResort(t *testing.T) {
	b := open(t, Options{Limits: gputypes.Limits{MaxComputeInvocationsPerWorkgroup: 64}})
	c := problem(t, b)
	c.Q, c.K = input(t, b, backend.Shape{2, 4, 70, 80}), input(t, b, backend.Shape{2, 2, 90, 80})
	p, err := b.Plan(t.Context(), c)
	if err != nil || p.Path != "plain WGSL" || !strings.Contains(p.Why, "80 threads") {
		t.Errorf("%s: %s, %v", p.Path, p.Why, err)
	}
	check(t, b.Attention(context.Background(), c))
}
