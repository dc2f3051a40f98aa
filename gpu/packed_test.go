package gpu

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// sequences are unequal ones that follow one another in tensors of one batch, or whose keys are in pages. One has few rows, which
// are decoded alone if its heads do not share keys.
type sequences struct {
	name   string
	opt    Options
	in, kv backend.DType
	heads  int
	d, dv  int
	paged  bool
	units  int // in which they run
	change func(c *backend.Call)
}

func (x sequences) calls(t testing.TB, b *Backend) (calls []*backend.Call) {
	const kvHeads, pages, page = 2, 100, 16
	const allRows, allKeys = 70 + 17 + 133 + 9 + 64 + 40, 90 + 300 + 20 + 1 + 700 + 41
	bshd := func(x backend.Tensor) backend.Tensor { return must.Get(x.Swap(backend.Heads, backend.Seq))(t) }
	shape := backend.Shape{1, kvHeads, allKeys, x.d}
	if x.paged {
		shape = backend.Shape{pages, kvHeads, page, x.d}
	}
	k := tensor(t, b, x.kv, shape, wave)
	shape[backend.Dim] = x.dv
	v := tensor(t, b, x.kv, shape, func(i int) float32 { return wave(3 * i) })
	q := bshd(tensor(t, b, x.in, backend.Shape{1, allRows, x.heads, x.d}, wave))
	o, lse := bshd(alloc(t, b, x.in, backend.Shape{1, allRows, x.heads, x.dv})), bshd(alloc(t, b, backend.F32, backend.Shape{1, allRows, x.heads, 1}))
	row, key := 0, 0
	for i, n := range [][2]int{{70, 90}, {17, 300}, {133, 20}, {9, 1}, {64, 700}, {40, 41}} {
		part := func(x backend.Tensor, at, n int) backend.Tensor { return must.Get(x.Slice(backend.Seq, at, at+n))(t) }
		c := &backend.Call{Q: part(q, row, n[0]), K: k, V: v, O: part(o, row, n[0]), LSE: part(lse, row, n[0]),
			Problem: backend.Problem{Scale: 0.2, Visible: backend.Visibility{Left: backend.Unbounded, Offset: n[1] - n[0]}}}
		if x.paged {
			c.Pages = &backend.Pages{Table: [][]int32{nil}, Keys: n[1]}
			for j := range ceil(n[1], page) {
				c.Pages.Table[0] = append(c.Pages.Table[0], int32((7*i+11*j)%pages))
			}
		} else {
			c.K, c.V = part(k, key, n[1]), part(v, key, n[1])
		}
		if x.change != nil {
			x.change(c)
		}
		calls = append(calls, c)
		row, key = row+n[0], key+n[1]
	}
	return calls
}

// compare runs sequences together and each alone, which has the same bits, and checks the plan of both.
func (x sequences) compare(t *testing.T, b *Backend, says string) {
	calls := x.calls(t, b)
	plan := must.Get(b.Plan(t.Context(), calls...))(t)
	if n := len(b.units(calls)); n != x.units || !strings.Contains(plan.Path, says) || x.units == 1 && !strings.Contains(plan.Cut, "6 packed sequences") {
		t.Errorf("%d units, should be %d: %s, %s", n, x.units, plan.Path, plan.Cut)
	}
	check(t, b.Warmup(t.Context(), false, calls...))
	compiled, done, total := 0, 0.0, 0.0
	ctx := backend.WithTrace(t.Context(), &backend.Trace{
		Compile:  func(string, time.Duration) { compiled++ },
		Progress: func(d, of float64) { done, total = d, of },
	})
	check(t, b.Attention(ctx, calls...))
	if compiled > 0 {
		t.Errorf("%d kernels are compiled after the warmup", compiled)
	}
	if want := float64(plan.FLOPs); done != total || total < want*0.999 || total > want*1.001 {
		t.Errorf("%v of %v operations are done in the end, the plan has %v", done, total, want)
	}
	again := x.calls(t, b) // in boxes of fewer rows than some sequences have
	for _, u := range b.units(again) {
		check(t, b.run(t.Context(), "attention", func() (*queue.Op, error) {
			way := must.Get(b.route(u))(t)
			way.parts[0].base().cutter.AtMost(cut.Row, 64)
			return way.op(way.parts[0], false), nil
		}))
	}
	var pairs int64
	for i, c := range x.calls(t, b) { // with outputs of their own
		pairs += must.Get(b.Plan(t.Context(), c))(t).Pairs
		check(t, b.Attention(t.Context(), c))
		for _, together := range []*backend.Call{calls[i], again[i]} {
			sameRow(t, fmt.Sprintf("o of sequence %d", i), floats(t, b, together.O), floats(t, b, c.O))
			sameRow(t, fmt.Sprintf("lse of sequence %d", i), floats(t, b, together.LSE), floats(t, b, c.LSE))
		}
	}
	if plan.Pairs != pairs {
		t.Errorf("planned %d pairs, should be %d", plan.Pairs, pairs)
	}
}

// TestPackedCalls runs sequences as one call, and those that cannot run so.
func TestPackedCalls(t *testing.T) {
	for _, x := range []sequences{
		{name: "float32", in: backend.F32, kv: backend.F32, heads: 6, d: 64, dv: 64, units: 1},
		{name: "few rows of one", in: backend.F32, kv: backend.F32, heads: 2, d: 32, dv: 32, units: 1},
		{name: "few rows of one, low precision", in: backend.F16, kv: backend.F16, heads: 2, d: 64, dv: 32, units: 1, change: func(c *backend.Call) { c.LowPrecision = true }},
		{name: "float16, any head size", in: backend.F16, kv: backend.F16, heads: 6, d: 41, dv: 20, units: 1},
		{name: "integers, window", in: backend.F16, kv: backend.Q8, heads: 2, d: 64, dv: 32, units: 1, change: func(c *backend.Call) { c.Visible.Left = 30 }},
		{name: "pages, softcap", in: backend.F32, kv: backend.BF16, heads: 6, d: 32, dv: 32, paged: true, units: 1, change: func(c *backend.Call) { c.Softcap = 3 }},
		{name: "boxes and chunks", opt: Options{MaxWork: 2e5}, in: backend.F32, kv: backend.F32, heads: 6, d: 32, dv: 32, units: 1},
		{name: "boxes and chunks of pages", opt: Options{MaxWork: 2e5}, in: backend.BF16, kv: backend.Q4, heads: 6, d: 64, dv: 64, paged: true, units: 1},
		{name: "keys that do not count", in: backend.F32, kv: backend.F32, heads: 6, d: 32, dv: 32, units: 1, change: func(c *backend.Call) { c.Visible.KLen = []int{c.K.Shape()[backend.Seq] / 2} }},
		{name: "dropout, which depends on the number of a sequence", in: backend.F32, kv: backend.F32, heads: 6, d: 32, dv: 32, units: 6, change: func(c *backend.Call) { c.Dropout = backend.Dropout{P: 0.3} }},
		{name: "streamed", opt: Options{MemoryBytes: 1 << 19}, in: backend.F32, kv: backend.F32, heads: 6, d: 64, dv: 64, units: 6},
	} {
		t.Run(x.name, func(t *testing.T) { x.compare(t, open(t, x.opt), "WGSL") })
	}
}

// TestPackedMatrixCalls does the same on matrix units, where few rows are decoded alone: bits differ there.
func TestPackedMatrixCalls(t *testing.T) {
	for _, x := range []sequences{
		{in: backend.F16, kv: backend.F16, heads: 6, d: 64, dv: 32, paged: true, units: 1},
		{in: backend.BF16, kv: backend.BF16, heads: 2, d: 64, dv: 32, units: 2},
		{in: backend.F32, kv: backend.F32, heads: 6, d: 64, dv: 32, units: 1},
	} {
		x.change = func(c *backend.Call) { c.LowPrecision = true }
		t.Run(x.in.String(), func(t *testing.T) { x.compare(t, openMatrices(t, Options{}), "matrix units WGSL") })
	}
}
