package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// everyRow sends calls with any number of rows to the decode path.
const everyRow = 1 << 20

// TestConformanceOfDecode runs the suite with every call on the decode path.
func TestConformanceOfDecode(t *testing.T) {
	conform(t, "TestConformance decodes what has few rows", Options{decodeRows: everyRow}, nil, kernelstest.Harness{
		Extent: kernelstest.Extent{PairsFrom: 1, Only: ofKernels}})
}

// Sums of 0 have no sign. Only the first tile has values other than -0, and its weights
// round to 0 next to those of the next.
func TestSumsOfZeroHaveNoSign(t *testing.T) {
	b := open(t, Options{})
	const d, tile, keys = 32, 32, 96
	k := upload(t, b, host(t, backend.Shape{1, 1, keys, d}, func(i int) float32 { return float32(min(i/(tile*d), 1)) }))
	v := upload(t, b, host(t, backend.Shape{1, 1, keys, d}, func(i int) float32 {
		if i < tile*d {
			return -1
		}
		return float32(math.Copysign(0, -1))
	}))
	for _, rows := range []int{1, 40} { // decoding, and prefill
		shape := backend.Shape{1, 1, rows, d}
		q := upload(t, b, host(t, shape, func(int) float32 { return 10 }))
		o, _ := attend(t, b, backend.Call{Q: q, K: k, V: v, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}})
		for i, x := range o {
			if math.Float32bits(x) != 0 {
				t.Fatalf("%d rows: element %d is %v (bits %#x), should be +0", rows, i, x, math.Float32bits(x))
			}
		}
	}
}

// pairs returns, for all heads, a mask that hides one pair in five and a bias.
func pairs(t testing.TB, b *Backend, heads, sq, sk int) (mask, bias backend.Tensor) {
	t.Helper()
	mask = bools(t, b, backend.Shape{1, 1, sq, sk}, func(i int) bool { return i%5 != 0 && i/sk%7 != 3 })
	return mask, input(t, b, backend.Shape{1, heads, sq, sk})
}

// blocksOf returns, for all heads, a block mask that hides two blocks in five.
func blocksOf(t testing.TB, b *Backend, rows, keys int) backend.Tensor {
	t.Helper()
	return bools(t, b, backend.Shape{1, 1, rows, keys}, func(i int) bool { return i*i%5 < 2 })
}

// sameRow compares rows of two results bit for bit.
func sameRow(t testing.TB, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Errorf("%s: element %d is %v, should be %v", what, i, got[i], want[i])
			return
		}
	}
}

// TestDecodeGivesTheBitsOfPrefill compares rows alone, six heads that share keys, with the
// same rows of a call that is long enough for the prefill path: each class of head sizes,
// each storage type, and everything that hides keys, over three splits.
func TestDecodeGivesTheBitsOfPrefill(t *testing.T) {
	compareDecodeWithPrefill(t, Options{}, testing.Short())
}

// compareDecodeWithPrefill compares the paths on a device opened with opt, with few only for head size 64.
func compareDecodeWithPrefill(t *testing.T, opt Options, few bool) {
	b := open(t, opt)
	const heads, sq, sk = 6, 21, 2300
	one := backend.Problem{Scale: 0.3, Visible: backend.Everything()}
	for _, class := range []struct {
		d, dv int
		dtype backend.DType
	}{{24, 32, backend.F16}, {64, 64, backend.F32}, {80, 72, backend.BF16}, {90, 96, backend.F32}, {128, 128, backend.BF16}, {256, 200, backend.F16}, {576, 512, backend.F16}} {
		if few && class.d != 64 {
			continue
		}
		q := tensor(t, b, class.dtype, backend.Shape{2, heads, sq, class.d}, wave)
		k := tensor(t, b, class.dtype, backend.Shape{2, 1, sk, class.d}, func(i int) float32 { return wave(i + 5) })
		v := tensor(t, b, class.dtype, backend.Shape{2, 1, sk, class.dv}, func(i int) float32 { return wave(i + 9) })
		mask, bias := pairs(t, b, heads, sq, sk)
		causal, window, paired := one, one, one
		causal.Visible = backend.Visibility{Offset: 1020, Left: backend.Unbounded}
		window.Visible = backend.Visibility{Offset: 1200, Left: 180, Right: 900, KLen: []int{2300, 2048}}
		paired.Softcap, paired.Mask, paired.Bias = 3, mask, bias
		options, distant := causal, one
		options.Slopes, options.Sinks = make([]float32, 2*heads), make([]float32, heads)
		for i := range options.Slopes {
			options.Slopes[i] = float32(i-3) / 64
			options.Sinks[i%heads] = float32(i%4) * 2
		}
		options.Dropout = backend.Dropout{P: 0.4, Seed: 7, First: [4]int{1, 2, 3, 4}}
		options.Blocks, options.BlockQ, options.BlockK = blocksOf(t, b, 3, 36), 8, 64
		distant.Slopes, distant.Bias = options.Slopes[:heads], bias
		relative := options
		relative.Mask, relative.Bias = mask, bias
		relative.Relative = input(t, b, backend.Shape{1, heads, 1, sq + sk - 1})
		for number, x := range []struct {
			name string
			p    backend.Problem
		}{{"full", one}, {"causal", causal}, {"window and klen", window}, {"mask, bias and softcap", paired},
			{"slopes, sinks, dropout and blocks", options}, {"slopes and bias", distant}, {"relative bias and all of these, in bindings of their own", relative}} {
			if number > 2 && class.d != 64 && class.d != 128 {
				continue // two kernels more for each, which compile long on a software driver
			}
			if number > 1 && class.d > 256 {
				continue // two slices of what class 256 does
			}
			call := func(q backend.Tensor, p backend.Problem) (o, lse []float32) {
				n := q.Shape()[backend.Seq]
				c := callOf(t, b, q, k, v)
				c.Problem = p
				plan := must.Get(b.Plan(t.Context(), c))(t)
				if decoded := strings.Contains(plan.Path, "decode"); decoded != (n == 1) {
					t.Fatalf("%d rows: the path is %s", n, plan.Path)
				}
				check(t, b.Attention(context.Background(), c))
				return floats(t, b, c.O), floats(t, b, c.LSE)
			}
			o, lse := call(q, x.p)
			for _, i := range []int{0, 3, 20} { // of the causal ones, 3 sees whole splits of 256 only
				row := must.Get(q.Slice(backend.Seq, i, i+1))(t)
				p := x.p
				p.Visible.Offset += i
				p.Dropout.First[backend.Seq] += i
				for _, s := range []struct {
					t            *backend.Tensor
					axis, lo, hi int
				}{
					{&p.Mask, backend.Seq, i, i + 1}, {&p.Bias, backend.Seq, i, i + 1}, {&p.Blocks, backend.Seq, i / 8, i/8 + 1},
					{&p.Relative, backend.Dim, sq - 1 - i, sq - 1 - i + sk},
				} {
					if s.t.IsZero() {
						continue
					}
					*s.t = must.Get(s.t.Slice(s.axis, s.lo, s.hi))(t)
				}
				ro, rlse := call(row, p)
				for n := range 2 * heads {
					what := fmt.Sprintf("d=%d/%d %v, %s, row %d, head %d", class.d, class.dv, class.dtype, x.name, i, n)
					sameRow(t, what, ro[n*class.dv:(n+1)*class.dv], o[(n*sq+i)*class.dv:(n*sq+i+1)*class.dv])
					sameRow(t, what+" lse", rlse[n:n+1], lse[n*sq+i:n*sq+i+1])
				}
			}
		}
	}
}

// decodeCall returns a call of one query row a head, without memory.
func decodeCall(t *testing.T, dtype backend.DType, batch, heads, kvHeads, keys, d int) *backend.Call {
	t.Helper()
	k, q := metaOf(t, dtype, backend.Shape{batch, kvHeads, keys, d}), metaOf(t, backend.F32, backend.Shape{batch, heads, 1, d})
	return &backend.Call{Q: q, K: k, V: k, O: q,
		Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
}

// TestDecodeFillsADevice counts the workgroups of a short context: 4,096 keys of 8 heads are
// 128 or more, about one for each processor of a large GPU. Head sizes of 81 to 96 have
// 120, because a smaller multiple of their 96 keys would merge more often in prefill.
func TestDecodeFillsADevice(t *testing.T) {
	for _, d := range []int{32, 64, 80, 96, 128, 256} {
		for _, group := range []int{1, 4, 16} {
			for _, dtype := range []backend.DType{backend.F32, backend.BF16, backend.Q8} {
				b := newSources(false).b
				x := must.Get(b.newDecode(decodeCall(t, dtype, 1, 8*group, 8, 4096, d)))(t)
				groups := map[string]int{}
				check(t, b.dev.Dispatches(x.op(), func(d queue.Dispatch) error {
					groups[d.Kernel.Name()] += d.Groups
					return nil
				}))
				least := 128
				if d == 96 {
					least = 120
				}
				if groups["decode"] < least || groups["splitmerge"] != 8*group {
					t.Errorf("D=%d, %d query heads a key head, %v: %v workgroups, should be %d or more to decode and %d to merge", d, group, dtype, groups, least, 8*group)
				}
			}
		}
	}
}

// TestDecodeOfLongContexts checks that scratch memory stays within 64 MiB and each dispatch within the limit of
// workgroups, and that prefill takes contexts whose splits of one row take more.
func TestDecodeOfLongContexts(t *testing.T) {
	for _, x := range []struct {
		batch, heads, keys, d int
		wide                  bool // a grid with two dimensions
	}{
		{1, 32, 1 << 20, 128, false},
		{4, 32, 1 << 20, 32, true},
		{1, 8, 27 << 20, 128, false},
		{1, 8, 30 << 20, 128, false}, // too long
		{1, 8, 14 << 20, 256, false},
	} {
		b := newSources(false).b
		b.choose = func(s tune.Shape) (tune.Variant, string) { return s.Rule() }
		call := decodeCall(t, backend.Q8, x.batch, x.heads, 8, x.keys, x.d)
		p := must.Get(b.path(call))(must.In(t, "%+v", x))
		_, decodes := p.(*decode)
		if _, err := b.newDecode(call); decodes == errors.Is(err, backend.ErrUnsupported) || decodes != (x.keys < 30<<20) {
			t.Errorf("%+v: decodes: %v, %v", x, decodes, err)
		}
		if !decodes {
			continue
		}
		e, err := b.dev.Count(p.op())
		if err != nil || e.State > 64<<20 {
			t.Errorf("%+v: %d bytes of state, %v", x, e.State, err)
		}
		most, groups := b.dev.Limits.MaxComputeWorkgroupsPerDimension, 0
		wide := false
		check(t, b.dev.Dispatches(p.op(), func(d queue.Dispatch) error {
			for _, n := range d.Grid {
				if n > most {
					t.Errorf("%+v: a grid of %v, a dimension has %d workgroups at most", x, d.Grid, most)
				}
			}
			if d.Kernel.Name() == "decode" {
				groups += d.Groups
				wide = wide || d.Grid[1] > 1
			}
			return nil
		}))
		if want := x.batch * 8 * ceil(x.keys, 256); groups < want || wide != x.wide {
			t.Errorf("%+v: %d workgroups, should be %d or more, in two dimensions: %v", x, groups, want, wide)
		}
	}
}

// TestMergeOfManySplits compares decoding with prefill, bit for bit, over more splits than splitmerge.wgsl computes
// factors of at once: maxima that rise, fall and repeat, and rows that see the first splits, the last ones, all or one.
func TestMergeOfManySplits(t *testing.T) {
	b := open(t, Options{})
	const sq, sk, d = 17, 300 * 256, 8
	size := []float32{1, 3, 3, 0.5, 2, 9, 0.1}
	q := input(t, b, backend.Shape{1, 1, sq, d})
	k := upload(t, b, host(t, backend.Shape{1, 1, sk, d}, func(i int) float32 { return wave(i) * size[i/(d*4096)%len(size)] }))
	v := upload(t, b, host(t, backend.Shape{1, 1, sk, d}, func(i int) float32 { return wave(i + 7) }))
	for _, x := range []backend.Visibility{
		backend.Everything(),
		{Offset: 40_000, Left: backend.Unbounded},
		{Offset: 33_000, Left: 200, Right: backend.Unbounded},
		{Offset: 128*256 - 8, Left: 128*256 - 9, Right: 128*256 + 3},
		{Offset: 50_000, Left: 100, Right: 20},
	} {
		c := backend.Call{Q: q, K: k, V: v, Problem: backend.Problem{Scale: 1, Visible: x}}
		o, lse := attend(t, b, c)
		for _, i := range []int{0, 9, 16} {
			row := must.Get(q.Slice(backend.Seq, i, i+1))(t)
			c := c
			c.Q = row
			c.Visible.Offset += i
			ro, rlse := attend(t, b, c)
			what := fmt.Sprintf("%+v, row %d", x, i)
			sameRow(t, what, ro, o[i*d:(i+1)*d])
			sameRow(t, what+": lse", rlse, lse[i:i+1])
		}
	}
}
