package kernels

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
)

// CheckOptions choose what [Check] recomputes.
type CheckOptions struct {
	// Rows is how many query rows are drawn; 0 means 16.
	Rows int
	// Seed draws them.
	Seed uint64
}

// CheckReport says how a result compares with float64.
type CheckReport struct {
	// Rows is how many rows were recomputed, all of them when there are fewer
	// than were asked for.
	Rows int
	// MaxError is |o - ref| of the element that is furthest out of its bound,
	// and Bound that element's bound (derived in package oracle).
	MaxError, Bound float64
	// Off is MaxError/Bound; the result is right when it is at most 1. An
	// element that is NaN where it should not be, or the reverse, has +Inf.
	Off float64
	// Worst says which element that is and what it holds.
	Worst string
}

// OK reports whether every value that was recomputed lies within its bound.
func (r CheckReport) OK() bool { return r.Off <= 1 }

// Check recomputes rows of an attention call, drawn by seed, in float64, and
// compares r.O, and r.LSE and r.Weights where they are there. The arguments are
// those of the call. It downloads the keys and values of the heads it draws:
// memory O(Sk) a head.
//
// A wrong result is not an error: see [CheckReport.OK].
func Check(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, r Result, opt Options, co CheckOptions) (CheckReport, error) {
	var c backend.Call
	parts, err := call(&c, r, q, k, v, &opt)
	if err != nil {
		return CheckReport{}, fmt.Errorf("check: %w", err)
	}
	if parts == nil {
		parts = []part{whole(c.Dims())}
	}
	calls, err := inParts(&c, parts)
	if err != nil {
		return CheckReport{}, fmt.Errorf("check: %w", err)
	}
	report, err := checkParts(ctx, be, sample(c.Dims(), co), calls, parts, r.Weights)
	if err != nil {
		return CheckReport{}, fmt.Errorf("check: %w", err)
	}
	return report, nil
}

// CheckVarlen is [Check] for a result of [AttentionVarlen].
func CheckVarlen(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, r Result, opt Options, co CheckOptions) (CheckReport, error) {
	d, err := varlenDims(q, k, v, cuQ, &cuK, &opt)
	if err != nil {
		return CheckReport{}, fmt.Errorf("check: %w", err)
	}
	_, calls, parts, err := varlen(r, q, k, v, cuQ, cuK, &opt)
	if err != nil {
		return CheckReport{}, fmt.Errorf("check: %w", err)
	}
	report, err := checkParts(ctx, be, sample(d, co), calls, parts, backend.Tensor{})
	if err != nil {
		return CheckReport{}, fmt.Errorf("check: %w", err)
	}
	return report, nil
}

// checkParts checks rows, each of which belongs to one of parts, computed by calls.
func checkParts(ctx context.Context, be backend.Backend, rows []rowAt, calls []*backend.Call, parts []part, weights backend.Tensor) (CheckReport, error) {
	var worst oracle.Worst
	heads := map[headAt]*headData{}
	for _, at := range rows {
		if err := ctx.Err(); err != nil {
			return CheckReport{}, context.Cause(ctx)
		}
		n := slices.IndexFunc(parts, func(x part) bool { return x.has(at) })
		row := checkedRow{call: calls[n], part: parts[n], number: n, weights: weights, of: at}
		if err := row.check(ctx, be, heads, &worst); err != nil {
			return CheckReport{}, err
		}
	}
	what := fmt.Sprintf("%s is %v, should be %v", worst.Where, worst.Got, worst.Ref)
	return CheckReport{Rows: len(rows), MaxError: worst.Error, Bound: worst.Bound, Off: worst.Off, Worst: what}, nil
}

// rowAt names a query row: batch, head, position.
type rowAt struct{ b, h, i int }

// sample draws rows without repeating one, sorted by nothing but the draw.
func sample(d Dims, co CheckOptions) []rowAt {
	want := co.Rows
	if want <= 0 {
		want = 16
	}
	total := d.Batch * d.Heads * d.SeqQ
	at := func(n int) rowAt { return rowAt{n / d.SeqQ / d.Heads, n / d.SeqQ % d.Heads, n % d.SeqQ} }
	var rows []rowAt
	if want >= total {
		for n := range total {
			rows = append(rows, at(n))
		}
		return rows
	}
	rng := rand.New(rand.NewPCG(co.Seed, 0))
	seen := map[int]bool{}
	for len(rows) < want {
		if n := rng.IntN(total); !seen[n] {
			seen[n] = true
			rows = append(rows, at(n))
		}
	}
	return rows
}

// headData are the keys and values of one (batch, kv head).
type headData struct{ k, v []float32 }

// headAt names a (batch, kv head) of a part.
type headAt struct{ part, b, h int }

// has reports whether a row is one of x.
func (x part) has(at rowAt) bool {
	for axis, i := range [3]int{at.b, at.h, at.i} {
		if i < x.lo[axis] || i >= x.hi[axis] {
			return false
		}
	}
	return true
}

// checkedRow is a row with the call that computes it.
type checkedRow struct {
	call    *backend.Call
	part    part // that the call is of the whole
	number  int
	weights backend.Tensor // of the whole
	of      rowAt          // in the whole
}

func (r *checkedRow) check(ctx context.Context, be backend.Backend, heads map[headAt]*headData, worst *oracle.Worst) error {
	c, d := r.call, r.call.Dims()
	x := r.part.lo
	at := rowAt{r.of.b - x[backend.Batch], r.of.h - x[backend.Heads], r.of.i - x[backend.Seq]}
	kvh := at.h / (d.Heads / d.KVHeads)
	key := headAt{r.number, at.b, kvh}
	head := heads[key]
	if head == nil {
		if len(heads) >= 4 { // bound the memory of many heads
			clear(heads)
		}
		head = &headData{}
		var err error
		if head.k, err = keysOf(ctx, be, c, c.K, at.b, kvh); err != nil {
			return err
		}
		if head.v, err = keysOf(ctx, be, c, c.V, at.b, kvh); err != nil {
			return err
		}
		heads[key] = head
	}
	q, err := download(ctx, be, c.Q, at.b, at.h, at.i, 1)
	if err != nil {
		return err
	}
	row := oracle.Row{Q: q, K: head.k, V: head.v, Dv: d.ValueDim, Scale: c.Scale, Softcap: c.Softcap, Out: c.O.DType()}
	var mask []bool
	if !c.Mask.IsZero() {
		if mask, err = maskRow(ctx, be, c.Mask, at); err != nil {
			return err
		}
	}
	var blocks []bool
	if !c.Blocks.IsZero() {
		if blocks, err = maskRow(ctx, be, c.Blocks, rowAt{at.b, at.h, at.i / c.BlockQ}); err != nil {
			return err
		}
	}
	lo, hi := c.Visible.Range(at.b, at.i, d.SeqK)
	row.Hidden = func(j int) bool {
		return j < lo || j >= hi || mask != nil && !mask[j] || blocks != nil && !blocks[j/c.BlockK]
	}
	if !c.Bias.IsZero() {
		bias, err := download(ctx, be, c.Bias, at.b, at.h, at.i, 1)
		if err != nil {
			return err
		}
		row.Bias = func(j int) float64 { return float64(bias[j]) }
	}
	if !c.Relative.IsZero() {
		bias, err := download(ctx, be, c.Relative, at.b, at.h, 0, 1)
		if err != nil {
			return err
		}
		row.Relative = func(j int) float64 { return float64(bias[j-at.i+d.SeqQ-1]) }
	}
	if c.Slopes != nil {
		row.Slope = float64(c.Slope(at.b, at.h, d.Heads))
		row.Distance = func(j int) float64 { return math.Abs(float64(at.i + c.Visible.Offset - j)) }
	}
	if c.Sinks != nil {
		row.Sink = &c.Sinks[at.h]
	}
	if c.Dropout.P > 0 {
		row.Keeps = func(j int) bool { return c.Dropout.Keeps(at.b, at.h, at.i, j) }
		row.KeepFactor = 1 / (1 - float64(c.Dropout.P))
	}
	ref := oracle.Solve(row)

	see := func(name string, t backend.Tensor, at rowAt, refs []float64, bound func(i int) float64) error {
		if t.IsZero() {
			return nil
		}
		got, err := download(ctx, be, t, at.b, at.h, at.i, 1)
		if err != nil {
			return err
		}
		for i, g := range got {
			worst.See(float64(g), refs[i], bound(i), func() string { return fmt.Sprintf("%s[%d,%d,%d,%d]", name, r.of.b, r.of.h, r.of.i, i) })
		}
		return nil
	}
	if err := see("o", c.O, at, ref.O, func(i int) float64 { return ref.OBound[i] }); err != nil {
		return err
	}
	if err := see("lse", c.LSE, at, []float64{ref.LSE}, func(int) float64 { return ref.LSEBound }); err != nil {
		return err
	}
	// What the call has no keys for is 0.
	weights := make([]float64, r.weights.Shape()[backend.Dim])
	copy(weights[min(x[backend.Dim], len(weights)):], ref.Weights)
	return see("weights", r.weights, r.of, weights, func(i int) float64 { return ref.WeightBound*weights[i] + 0x1p-125 })
}

// view cuts rows [i, i+n) of one batch and head out of t.
func view(t backend.Tensor, b, h, i, n int) (backend.Tensor, error) {
	t, err := t.Slice(backend.Batch, b, b+1)
	if err == nil {
		t, err = t.Slice(backend.Heads, h, h+1)
	}
	if err == nil {
		t, err = t.Slice(backend.Seq, i, i+n)
	}
	return t, err
}

// download downloads rows [i, i+n) of one batch and head.
func download(ctx context.Context, be backend.Backend, t backend.Tensor, b, h, i, n int) ([]float32, error) {
	t, err := view(t, b, h, i, n)
	if err != nil {
		return nil, err
	}
	return Float32s(ctx, be, t)
}

// keysOf downloads the rows of c's keys or values t of one batch and head. Those that
// no page holds are zeros, which nothing sees.
func keysOf(ctx context.Context, be backend.Backend, c *backend.Call, t backend.Tensor, b, h int) ([]float32, error) {
	if c.Pages == nil {
		return download(ctx, be, t, b, h, 0, t.Shape()[backend.Seq])
	}
	size, cols := t.Shape()[backend.Seq], t.Shape()[backend.Dim]
	all := make([]float32, c.Pages.Keys*cols)
	n := c.Pages.Keys
	if c.Visible.KLen != nil {
		n = min(n, c.Visible.KLen[b])
	}
	for j := 0; j < n; j += size {
		page, err := download(ctx, be, t, int(c.Pages.Table[b][j/size]), h, 0, min(size, n-j))
		if err != nil {
			return nil, err
		}
		copy(all[j*cols:], page)
	}
	return all, nil
}

func maskRow(ctx context.Context, be backend.Backend, t backend.Tensor, at rowAt) ([]bool, error) {
	t, err := view(t, at.b, at.h, at.i, 1)
	if err != nil {
		return nil, err
	}
	host, err := backend.AllocHost(backend.Bool, t.Shape())
	if err != nil {
		return nil, err
	}
	if err := be.Download(ctx, host, t); err != nil {
		return nil, err
	}
	return host.Bools()
}
