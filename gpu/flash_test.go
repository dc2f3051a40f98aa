package gpu

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest"
	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

func plainOnly(tune.Shape) (tune.Variant, string) { return tune.Variant{}, "asked for" }

// TestConformanceOfPlain runs the suite on the plain kernel, and compares the
// register-tiled kernel with it on drawn problems, within both bounds.
func TestConformanceOfPlain(t *testing.T) {
	conform(t, "TestVariantsGiveTheSameBits compares the plain kernel with the one that the suite runs on", Options{decodeRows: -1}, plainOnly, backendtest.Harness{
		Against:      func(t testing.TB) backend.Backend { return open(t, Options{}) },
		AgainstDraws: 50, Only: ofKernels,
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
			conform(t, "TestVariantsGiveTheSameBits compares them with the one that the suite runs on", Options{decodeRows: -1}, only, backendtest.Harness{PairsEvery: 36, PairsFrom: 4 + 7*i, Only: few})
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

// TestVariantsGiveTheSameBits compares the variants of each class, bit for bit, over three
// splits: loops as written, unrolled over registers and fully unrolled, loading one element
// or four. The smallest variant, which passes the suite, is the reference.
func TestVariantsGiveTheSameBits(t *testing.T) {
	as := func(v tune.Variant, expand shaders.Expand, scalar bool) tune.Variant {
		v.Expand, v.Scalar = expand, scalar
		return v
	}
	for _, c := range []struct {
		d, dv    int
		dtype    backend.DType
		features bool // everything that a kernel is told of pairs
		short    bool // with -short too
		variants []tune.Variant
	}{
		{64, 64, backend.F32, false, true, []tune.Variant{
			as(named(t, 64, "S"), shaders.Registers, true), as(named(t, 64, "L"), shaders.Full, false),
			as(named(t, 64, "D"), shaders.Registers, false)}},
		{60, 44, backend.F32, true, false, []tune.Variant{as(named(t, 64, "M"), shaders.Registers, false)}},
		{32, 32, backend.F16, true, true, []tune.Variant{
			as(named(t, 32, "L"), shaders.Registers, false), as(named(t, 32, "D"), shaders.Registers, false)}},
		{80, 80, backend.BF16, false, false, []tune.Variant{as(named(t, 80, "D"), shaders.Registers, true)}},
		{96, 96, backend.F16, false, false, []tune.Variant{as(named(t, 96, "L32"), shaders.Registers, false)}},
		{128, 128, backend.F32, false, false, []tune.Variant{
			as(named(t, 128, "L"), shaders.Registers, false), as(named(t, 128, "L48"), shaders.Registers, false)}},
		{256, 256, backend.F32, false, false, []tune.Variant{
			as(named(t, 256, "L"), shaders.Registers, false), as(named(t, 256, "L32"), shaders.Registers, false)}},
	} {
		if testing.Short() && !c.short {
			continue
		}
		b := open(t, Options{})
		call := spread(t, b, c.d, c.dv, c.dtype, c.features)
		run := func(t *testing.T, v tune.Variant) [2][]float32 {
			t.Helper()
			b.choose = func(s tune.Shape) (tune.Variant, string) {
				if bad := s.Fits(v); bad != "" {
					t.Skip(bad)
				}
				return v, "the test asks for it"
			}
			plan, err := b.Plan(t.Context(), call)
			if err != nil || !strings.HasSuffix(plan.Path, "variant "+v.Name) {
				t.Fatalf("planned %q, %v", plan.Path, err)
			}
			check(t, b.Attention(context.Background(), call))
			return [2][]float32{floats(t, b, call.O), floats(t, b, call.LSE)}
		}
		want := run(t, as(named(t, tune.TilingOf(c.d, c.dv).Width, "S"), shaders.Registers, true))
		for _, v := range c.variants {
			t.Run(fmt.Sprintf("d%d,%d %v %s unrolled to %d", c.d, c.dv, c.dtype, v.Name, v.Expand), func(t *testing.T) {
				got := run(t, v)
				sameRow(t, "o", got[0], want[0])
				sameRow(t, "lse", got[1], want[1])
			})
		}
	}
}

// TestOptionsGiveTheSameBits compares kernels for one option, which GPUs run, with the kernel
// that looks at its flags, which the suite runs on a software driver.
func TestOptionsGiveTheSameBits(t *testing.T) {
	b := open(t, Options{})
	v := named(t, 32, "S")
	v.Expand = shaders.Registers
	plain := spread(t, b, 32, 32, backend.F32, false)
	rows, keys := plain.Q.Shape()[backend.Seq], plain.K.Shape()[backend.Seq]
	hides := func(key int) bool { return key%7 == 0 }
	mask := bools(t, b, backend.Shape{1, 1, 1, keys}, func(i int) bool { return !hides(i) })
	bias := upload(t, b, host(t, backend.Shape{1, 1, rows, keys}, func(i int) float32 {
		switch {
		case hides(i % keys):
			return float32(math.NaN())
		case i%11 == 0:
			return float32(math.Inf(-1))
		}
		return wave(i)
	}))
	for i, c := range []struct {
		name string
		set  func(c *backend.Call)
	}{
		{"a mask", func(c *backend.Call) { c.Mask = mask }},
		{"a bias, NaN where a mask hides it", func(c *backend.Call) { c.Mask, c.Bias = mask, bias }},
		{"a bias and slopes", func(c *backend.Call) { c.Mask, c.Bias, c.Slopes = mask, bias, []float32{0.01, -0.02} }},
		{"blocks", func(c *backend.Call) { c.Blocks, c.BlockQ, c.BlockK = blocksOf(t, b, 10, 12), 16, 200 }},
		{"slopes and softcap", func(c *backend.Call) { c.Slopes, c.Softcap = []float32{0.01, -0.02}, 3 }},
		{"dropout", func(c *backend.Call) { c.Dropout = backend.Dropout{P: 0.3, Seed: 1} }},
	} {
		if testing.Short() && i > 1 {
			break // each compiles two kernels
		}
		call := *plain
		c.set(&call)
		var want [2][]float32
		for i, v := range []tune.Variant{v.Quick(), v} {
			b.choose = func(tune.Shape) (tune.Variant, string) { return v, "the test asks for it" }
			check(t, b.Attention(t.Context(), &call))
			got := [2][]float32{floats(t, b, call.O), floats(t, b, call.LSE)}
			if i == 0 {
				want = got
			}
			sameRow(t, c.name, got[0], want[0])
			sameRow(t, c.name+": lse", got[1], want[1])
		}
	}
}

// spread returns a call of 2 heads that share one, over nine splits or so. In the first and in
// the last of them, some rows of a workgroup see keys and others none.
func spread(t testing.TB, b *Backend, d, dv int, dtype backend.DType, features bool) *backend.Call {
	const rows, keys = 150, 2300
	in := func(shape backend.Shape, from int) backend.Tensor {
		h := host(t, shape, func(i int) float32 { return wave(3*i + from) })
		if dtype == backend.F32 {
			return upload(t, b, h)
		}
		bits := make([]uint16, shape.Elements())
		for i := range bits {
			bits[i] = dtype.Encode(wave(3*i + from))
		}
		half := must.Get(backend.HostBits(bits, dtype, shape))(t)
		return upload(t, b, half)
	}
	c := &backend.Call{
		Q: in(backend.Shape{1, 2, rows, d}, 0), K: in(backend.Shape{1, 1, keys, d}, 1), V: in(backend.Shape{1, 1, keys, dv}, 2),
		O: alloc(t, b, backend.F32, backend.Shape{1, 2, rows, dv}), LSE: alloc(t, b, backend.F32, backend.Shape{1, 2, rows, 1}),
		Problem: backend.Problem{Scale: 0.1, Visible: backend.Visibility{Offset: 1060, Left: 860, Right: 955, KLen: []int{2163}}},
	}
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
			c.Relative = upload(t, b, host(t, backend.Shape{1, 2, 1, rows + keys - 1}, wave))
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
	c.Q, c.K = upload(t, b, host(t, backend.Shape{2, 4, 70, 80}, wave)), upload(t, b, host(t, backend.Shape{2, 2, 90, 80}, wave))
	p, err := b.Plan(t.Context(), c)
	if err != nil || p.Path != "plain WGSL" || !strings.Contains(p.Why, "80 threads") {
		t.Errorf("%s: %s, %v", p.Path, p.Why, err)
	}
	check(t, b.Attention(context.Background(), c))
}

// TestPlainInChunksChangesNoBit compares the plain kernel over many chunks of the keys with one
// chunk, bit for bit.
func TestPlainInChunksChangesNoBit(t *testing.T) {
	b := open(t, Options{})
	c := problem(t, b)
	var o, lse [2][]float32
	for i, most := range []int{1 << 20, cut.Tile} {
		chunks := 0
		check(t, b.run(context.Background(), "attention", func() (*queue.Op, error) {
			x, err := b.newPrefill(c, plainOnly)
			if err != nil {
				return nil, err
			}
			x.cutter.Most[cut.Col] = most
			op := x.op()
			step := op.Step
			op.Step = func(p queue.Chunk) queue.Step {
				chunks++
				return step(p)
			}
			return op, nil
		}))
		if chunks < 1+i {
			t.Errorf("up to %d keys: %d chunks", most, chunks)
		}
		o[i], lse[i] = floats(t, b, c.O), floats(t, b, c.LSE)
	}
	sameRow(t, "o in chunks", o[1], o[0])
	sameRow(t, "lse in chunks", lse[1], lse[0])
}
