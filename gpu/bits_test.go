package gpu

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// way is a device that calls run on.
type way struct {
	name string
	opt  Options
	set  func(t testing.TB, b *Backend) // nil changes nothing
	says string                         // in the plan's path and cut
	cuts bool                           // into more chunks than the first way
	run  runner                         // nil is that of the test
}

// runner runs calls, and returns their results and the plan of one of them.
type runner func(t testing.TB, b *Backend) ([][]float32, backend.Plan)

// attends runs one call.
func attends(call func(testing.TB, *Backend) *backend.Call) runner {
	return func(t testing.TB, b *Backend) ([][]float32, backend.Plan) {
		c := call(t, b)
		plan := must.Get(b.Plan(t.Context(), c))(t)
		check(t, b.Attention(context.Background(), c))
		return [][]float32{floats(t, b, c.O), floats(t, b, c.LSE)}, plan
	}
}

// stages runs one call of problem's shapes, fused and in stages.
func stages(call func(testing.TB, *Backend) *backend.Call) runner {
	return func(t testing.TB, b *Backend) ([][]float32, backend.Plan) {
		c := call(t, b)
		all, plan := attends(func(testing.TB, *Backend) *backend.Call { return c })(t, b)
		w, o := alloc(t, b, backend.F32, backend.Shape{2, 4, 70, 90}), alloc(t, b, backend.F32, backend.Shape{2, 4, 70, 33})
		lse := alloc(t, b, backend.F32, backend.Shape{2, 4, 70, 1})
		check(t, b.QK(context.Background(), w, c.Q, c.K))
		all = append(all, floats(t, b, w))
		check(t, b.Softmax(context.Background(), w, lse, &c.Problem))
		check(t, b.PV(context.Background(), o, w, c.V))
		return append(all, floats(t, b, w), floats(t, b, lse), floats(t, b, o)), plan
	}
}

// variant is a device that takes a variant of a class.
func variant(t testing.TB, width int, name string, expand shaders.Expand, scalar bool) way {
	v := named(t, width, name)
	v.Expand, v.Scalar = expand, scalar
	return way{name: fmt.Sprintf("%s unrolled to %d", name, expand), says: "variant " + name + ", ", set: func(t testing.TB, b *Backend) {
		b.choose = func(s tune.Shape) (tune.Variant, string) {
			if bad := s.Fits(v); bad != "" {
				t.Skip(bad)
			}
			return v, "the test asks for it"
		}
	}}
}

// decodes is a device that decodes each call as devices of a type do.
func decodes(name string, of backend.DeviceType) way {
	return way{name: name, opt: Options{decodeRows: everyRow}, says: "decode", set: func(_ testing.TB, b *Backend) { b.info.Type = of }}
}

// decodeOfDType is a call whose values pass through workgroup memory, or do not.
func decodeOfDType(dtype backend.DType) runner {
	const sq, sk, d = 5, 1100, 64
	return attends(func(t testing.TB, b *Backend) *backend.Call {
		of := func(rows int) backend.Tensor { return tensor(t, b, dtype, backend.Shape{1, 1, rows, d}, wave) }
		c := callOf(t, b, of(sq), of(sk), of(sk))
		c.Problem = backend.Problem{Scale: 0.2, Visible: backend.Visibility{Offset: 1050, Left: backend.Unbounded},
			Slopes: []float32{0.02}, Sinks: []float32{1}, Dropout: backend.Dropout{P: 0.2, Seed: 1},
			Blocks: blocksOf(t, b, 2, 9), BlockQ: 3, BlockK: 128, Relative: input(t, b, backend.Shape{1, 1, 1, sq + sk - 1})}
		return c
	})
}

// decodePadded is a call over nine splits whose rows have padding. The data of a key is the same.
func decodePadded(pad int) runner { return attends(paddedCall(pad)) }

func paddedCall(pad int) func(testing.TB, *Backend) *backend.Call {
	const heads, kvHeads, sq, sk, d, dv = 6, 2, 9, 2300, paddedDim, 36
	return func(t testing.TB, b *Backend) *backend.Call {
		mask, bias := pairs(t, b, heads, sq, sk)
		keys := func(width, from int) backend.Tensor {
			x := upload(t, b, host(t, backend.Shape{2, kvHeads, sk, width + pad}, func(i int) float32 {
				if i%(width+pad) >= width {
					return float32(math.NaN())
				}
				return wave(from + i/(width+pad)*width + i%(width+pad))
			}))
			return must.Get(x.Slice(backend.Dim, 0, width))(t)
		}
		c := callOf(t, b, input(t, b, backend.Shape{2, heads, sq, d}), keys(d, 3), keys(dv, 4))
		c.Problem = backend.Problem{Scale: 0.2, Softcap: 5, Mask: mask, Bias: bias,
			Visible: backend.Visibility{Offset: 2000, Left: 1990, Right: 250, KLen: []int{2300, 1500}}}
		return c
	}
}

const paddedDim = 40

// decodeMemory returns the workgroup memory that decoding 128 columns takes for so many rows of a workgroup.
func decodeMemory(rows int) uint32 {
	const d, chunks = 128, 128 / 16
	return uint32(16*(4*d+1+chunks*4*rows+rows*d/16+1) + 32 + 8)
}

// decodeOne is a call of eight heads that share keys.
func decodeOne(t testing.TB, b *Backend) *backend.Call {
	const heads, sk, d = 8, 2100, 128
	k := input(t, b, backend.Shape{1, 1, sk, d})
	return callOf(t, b, input(t, b, backend.Shape{1, heads, 1, d}), k, k)
}

// TestDecodeNeedsMemory lowers workgroup memory to less than decoding one row takes, which is too little for prefill too.
func TestDecodeNeedsMemory(t *testing.T) {
	b := open(t, Options{Limits: gputypes.Limits{MaxComputeWorkgroupStorageSize: decodeMemory(1) - 4}})
	must.Fail(t, "a word less", must.Err(b.newDecode(decodeOne(t, b))), backend.ErrUnsupported)
}

// TestSameBits compares, bit for bit, what calls return on the first device of a list with what they return on
// the others.
func TestSameBits(t *testing.T) {
	type limits = gputypes.Limits
	spreads := func(d, dv int, dtype backend.DType, features bool) runner {
		return attends(func(t testing.TB, b *Backend) *backend.Call { return spread(t, b, d, dv, dtype, features) })
	}
	s := func(width int) way { return variant(t, width, "S", shaders.Registers, true) } // which passes the suite
	v := func(width int, name string, scalar bool) way {
		return variant(t, width, name, shaders.Registers, scalar)
	}
	// GPUs run a kernel for each option, which loads four elements. The suite, on a software driver, runs the one
	// that looks at its flags and loads one.
	kernels := []way{s(32), v(32, "S", false)}
	option := func(set func(t testing.TB, b *Backend, c *backend.Call)) runner {
		return attends(func(t testing.TB, b *Backend) *backend.Call {
			c := spread(t, b, 32, 32, backend.F32, false)
			set(t, b, c)
			return c
		})
	}
	hides := func(key int) bool { return key%7 == 0 }
	hide := func(t testing.TB, b *Backend, c *backend.Call) {
		c.Mask = bools(t, b, backend.Shape{1, 1, 1, c.K.Shape()[backend.Seq]}, func(i int) bool { return !hides(i) })
	}
	bias := func(t testing.TB, b *Backend, c *backend.Call) {
		hide(t, b, c)
		rows, keys := c.Q.Shape()[backend.Seq], c.K.Shape()[backend.Seq]
		c.Bias = upload(t, b, host(t, backend.Shape{1, 1, rows, keys}, func(i int) float32 {
			switch {
			case hides(i % keys):
				return float32(math.NaN())
			case i%11 == 0:
				return float32(math.Inf(-1))
			}
			return wave(i)
		}))
	}
	levels := []way{decodes("unrolled to registers", backend.CPU), decodes("unrolled fully", backend.Discrete)}
	decoded := func(name string, opt Options, cuts bool) way {
		opt.decodeRows = everyRow
		return way{name: name, opt: opt, says: "decode", cuts: cuts}
	}
	padded := func(name string, limits limits) way {
		w := decoded(name, Options{Limits: limits}, false)
		w.run = decodePadded(1)
		return w
	}
	lowers := func(name, says string, limits limits) way {
		return way{name: name, says: says, opt: Options{Limits: limits}}
	}
	plain := func(name string, opt Options, cuts bool) way {
		return way{name: name, opt: opt, says: "plain", cuts: cuts, set: func(_ testing.TB, b *Backend) { b.choose = plainOnly }}
	}
	lowering := func(from int) []way { return append([]way{{}}, someLowered(from)...) }
	matrices := func(dtype backend.DType, call func(testing.TB, *Backend) *backend.Call) runner {
		return func(t testing.TB, b *Backend) ([][]float32, backend.Plan) {
			if _, whyNot := b.matrices.Largest(); whyNot != "" {
				t.Skip("needs a device with matrix units")
			}
			return onMatrices(t, b, halved(t, b, dtype, call(t, b)))
		}
	}
	// In bf16 dO has sizes from 2^-20 to 2^20, so that some elements are odd in their tile.
	gradients := func(dtype backend.DType) runner {
		return func(t testing.TB, b *Backend) ([][]float32, backend.Plan) {
			if _, whyNot := b.matrices.Largest(); whyNot != "" {
				t.Skip("needs a device with matrix units")
			}
			c := halved(t, b, dtype, problem(t, b))
			all, _ := onMatrices(t, b, c)
			g := backwardOf(t, b, c)
			g.DO = copied(t, b, dtype, upload(t, b, host(t, c.O.Shape(), func(i int) float32 {
				if dtype == backend.BF16 {
					return float32(math.Ldexp(float64(wave(i)), i/64%41-20))
				}
				return wave(i)
			})))
			plan := must.Get(b.PlanBackward(t.Context(), g))(t)
			check(t, b.Backward(context.Background(), g))
			return append(all, floats(t, b, g.DQ), floats(t, b, g.DK), floats(t, b, g.DV)), plan
		}
	}
	onUnits := []way{{}, {name: "submissions of 100,000 operations", opt: Options{MaxWork: 1e5}, cuts: true},
		{name: "bindings of 16 KiB", opt: Options{Limits: limits{MaxStorageBufferBindingSize: 16 << 10}}, cuts: true}}
	const split = 256 * paddedDim * 4 // bytes of a split's keys
	for _, c := range []struct {
		name  string
		short bool // with -short too
		run   runner
		ways  []way
	}{
		// Loops as written, unrolled over registers and fully unrolled, loading one element or four, over three splits.
		{"d64 f32, every option", true, spreads(64, 64, backend.F32, true),
			[]way{s(64), variant(t, 64, "L", shaders.Full, false), v(64, "D", false)}},
		{"d60,44 f32, every option", false, spreads(60, 44, backend.F32, true), []way{s(64), v(64, "M", false)}},
		{"d32 f16, every option", true, spreads(32, 32, backend.F16, true), []way{s(32), v(32, "L", false), v(32, "D", false)}},
		{"d80 bf16", false, spreads(80, 80, backend.BF16, false), []way{s(80), v(80, "D", true)}},
		{"d96 f16", false, spreads(96, 96, backend.F16, false), []way{s(96), v(96, "L32", false)}},
		{"d128 f32", false, spreads(128, 128, backend.F32, false), []way{s(128), v(128, "L", false), v(128, "L48", false)}},
		{"d256 f32", false, spreads(256, 256, backend.F32, false), []way{s(256), v(256, "L", false), v(256, "L32", false)}},

		{"a mask", true, option(hide), kernels},
		{"a bias, NaN where a mask hides it", true, option(bias), kernels},
		{"a bias and slopes", false, option(func(t testing.TB, b *Backend, c *backend.Call) { bias(t, b, c); c.Slopes = []float32{0.01, -0.02} }), kernels},
		{"blocks", false, option(func(t testing.TB, b *Backend, c *backend.Call) {
			c.Blocks, c.BlockQ, c.BlockK = blocksOf(t, b, 10, 12), 16, 200
		}), kernels},
		{"slopes and softcap", false, option(func(_ testing.TB, _ *Backend, c *backend.Call) { c.Slopes, c.Softcap = []float32{0.01, -0.02}, 3 }), kernels},
		{"dropout", false, option(func(_ testing.TB, _ *Backend, c *backend.Call) { c.Dropout = backend.Dropout{P: 0.3, Seed: 1} }), kernels},

		{"mask and bias", true, stages(problem), lowering(0)},
		{"blocks and bias by distance", true, stages(distant), lowering(1)},
		{"matrices, mask and bias", true, matrices(backend.F16, problem), onUnits},
		{"matrices, blocks and bias by distance", true, matrices(backend.BF16, distant), onUnits},
		{"matrices of f32", true, matrices(backend.F32, problem), onUnits},
		{"matrices, gradients", true, gradients(backend.F16), []way{{says: "matrix units WGSL by key blocks and query blocks, products of f16"}, onUnits[1], onUnits[2]}},
		{"matrices, gradients of bf16", true, gradients(backend.BF16), []way{{says: "matrix units WGSL by key blocks and query blocks, products of f16"}, onUnits[1], onUnits[2]}},
		{"the plain kernel", true, attends(problem), []way{plain("", Options{}, false), plain("chunks of a tile", Options{Budget: 1}, true)}},

		{"decoding bf16", true, decodeOfDType(backend.BF16), levels},
		{"decoding f32", true, decodeOfDType(backend.F32), levels},
		// Chunks of keys, heads, rows, grids and submissions, and keys that are read one element at a time.
		{"decoding in chunks", true, decodePadded(0), []way{
			decoded("", Options{}, false),
			decoded("a binding of one split and a bit", Options{Limits: limits{MaxStorageBufferBindingSize: split + 4096}}, true),
			decoded("a binding of two splits", Options{Limits: limits{MaxStorageBufferBindingSize: 2*split + 4096}}, true),
			decoded("three workgroups a dimension", Options{Limits: limits{MaxComputeWorkgroupsPerDimension: 3}}, true),
			decoded("submissions of a few workgroups, nothing pooled", Options{MaxWork: 4e6, PoolBytes: -1}, true),
			decoded("an alignment of 1 KiB", Options{Limits: limits{MinStorageBufferOffsetAlignment: 1 << 10, MaxStorageBufferBindingSize: split + 4096}}, true),
			decoded("tensors of several buffers", Options{Limits: limits{MaxBufferSize: 700 << 10}}, true),
			decoded("a device without room for all tensors", Options{MemoryBytes: 4 << 20}, true),
			padded("rows that are not on 16 bytes", limits{}),
			padded("rows that are not on 16 bytes, in chunks", limits{MaxStorageBufferBindingSize: split*(paddedDim+1)/paddedDim + 4096}),
		}},
		{"matrices, decoding in chunks", true, matrices(backend.BF16, paddedCall(0)), []way{
			decoded("", Options{}, false),
			decoded("a binding of one split and a bit", Options{Limits: limits{MaxStorageBufferBindingSize: split/2 + 4096}}, true),
			decoded("submissions of a few workgroups", Options{MaxWork: 4e6}, true),
			decoded("a device without room for all tensors", Options{MemoryBytes: 3 << 20}, true),
		}},
		{"matrices of f8", true, matrices(backend.F8, paddedCall(0)), []way{
			{opt: Options{decodeRows: 1}, says: "matrix units WGSL, products"},
			{name: "bindings of 64 KiB", opt: Options{decodeRows: 1, Limits: limits{MaxStorageBufferBindingSize: 64 << 10}}, says: "matrix units WGSL, products", cuts: true},
		}},
		{"matrices, decoding of f8 in chunks", true, matrices(backend.F8, paddedCall(0)), []way{
			decoded("", Options{}, false),
			decoded("a binding of one split and a bit", Options{Limits: limits{MaxStorageBufferBindingSize: split/4 + 4096}}, true),
			decoded("submissions of a few workgroups", Options{MaxWork: 4e6}, true),
		}},
		// Each limit of decoding is just enough or less. With less workgroup memory, a workgroup has fewer rows. Below the
		// other limits the prefill path takes the call.
		{"decoding where it can", true, attends(decodeOne), []way{
			lowers("", "blocks of 8 rows", limits{}),
			lowers("128 threads", "blocks of 8 rows", limits{MaxComputeInvocationsPerWorkgroup: 128}),
			lowers("64 threads", "tiled", limits{MaxComputeInvocationsPerWorkgroup: 64}),
			lowers("workgroup memory for 8 rows", "blocks of 8 rows", limits{MaxComputeWorkgroupStorageSize: decodeMemory(8)}),
			lowers("a word less", "blocks of 4 rows", limits{MaxComputeWorkgroupStorageSize: decodeMemory(8) - 4}),
			lowers("workgroup memory for 1 row", "blocks of 1 rows", limits{MaxComputeWorkgroupStorageSize: decodeMemory(1)}),
			lowers("a binding of a split", "blocks of 8 rows", limits{MaxStorageBufferBindingSize: 256 * 128 * 4}),
			lowers("a binding of half a split", "tiled", limits{MaxStorageBufferBindingSize: 128 * 128 * 4}),
		}},
	} {
		if testing.Short() && !c.short {
			continue // each compiles two kernels or more
		}
		t.Run(c.name, func(t *testing.T) {
			var want [][]float32
			var whole backend.Plan
			try := func(t *testing.T, w way) {
				b := open(t, w.opt)
				defer b.Close() // before the next one is opened
				run := c.run
				if w.run != nil {
					run = w.run
				}
				if w.set != nil {
					w.set(t, b)
				}
				got, plan := run(t, b)
				if want == nil {
					want, whole = got, plan
				}
				if !strings.Contains(plan.Path+", "+plan.Cut, w.says) || w.cuts && plan.Chunks <= whole.Chunks {
					t.Errorf("the plan is %+v", plan)
				}
				for i := range want {
					sameRow(t, fmt.Sprint("result ", i), got[i], want[i])
				}
			}
			try(t, c.ways[0])
			for _, w := range c.ways[1:] {
				t.Run(w.name, func(t *testing.T) { try(t, w) })
			}
		})
	}
}
