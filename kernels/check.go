package kernels

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// CheckOptions choose the rows that [Call.Check] recomputes.
type CheckOptions struct {
	// Rows is the number of random query rows; 0 means 16.
	Rows int
	// Seed is the seed of their choice.
	Seed uint64
}

// CheckReport compares a result with float64.
type CheckReport struct {
	// Rows is the number of rows that were recomputed: all, if there are fewer than
	// requested.
	Rows int
	// MaxError is |o - ref| of the element that is worst relative to its bound, and
	// Bound is that bound, which package oracle derives.
	MaxError, Bound float64
	// Off is MaxError/Bound; at most 1 is correct. It is +Inf for an element that is
	// wrongly NaN or wrongly not NaN.
	Off float64
	// Worst describes that element.
	Worst string
}

// OK reports whether every recomputed value is within its bound.
func (r CheckReport) OK() bool { return r.Off <= 1 }

// Check recomputes random rows of the call in float64 and compares them with out, the
// result of a run: out.O, and out.LSE and out.Weights unless they are the zero Tensor. It
// downloads the keys and values of the rows' heads, O(Sk) memory for a head. A wrong result
// is not an error, see [CheckReport.OK].
func (c *Call) Check(ctx context.Context, out Result, opt CheckOptions) (report CheckReport, err error) {
	defer op.Annotate(&err, "check")
	defer c.unbindOutputs()
	if err := c.checkOutputs(out); err != nil {
		return CheckReport{}, err
	}
	if err := c.bindOutputs(out); err != nil {
		return CheckReport{}, err
	}
	k := checker{dev: c.dev, weights: out.Weights, heads: map[headIndex]headData{}}
	rows, err := sample(c.dims, opt)
	if err != nil {
		return CheckReport{}, fmt.Errorf("CheckOptions.Rows is %d: %w", opt.Rows, err)
	}
	subs := c.subs
	if empty(c.dims) { // rows without keys
		subs = []subcall{{wholeRegion(c.dims), backend.Call{Q: c.q, K: c.k, V: c.v, O: out.O, LSE: out.LSE, Problem: c.problem, Pages: c.opt.Pages}, 0}}
	}
	for _, at := range rows {
		n := slices.IndexFunc(subs, func(s subcall) bool { return s.has(at) })
		if err := k.row(ctx, &subs[n], n, at); err != nil {
			return CheckReport{}, err
		}
	}
	return k.report(len(rows)), nil
}

// report returns the report of a comparison of that many rows.
func (k *checker) report(rows int) CheckReport {
	worst := fmt.Sprintf("%s is %v, should be %v", k.worst.Where, k.worst.Got, k.worst.Ref)
	return CheckReport{Rows: rows, MaxError: k.worst.Error, Bound: k.worst.Bound, Off: k.worst.Off, Worst: worst}
}

// verify returns ErrVerify when rows of out that [Device.SetVerify] requests are wrong.
func (c *Call) verify(ctx context.Context, out Result) error {
	rows := int(c.dev.verify.Load())
	if rows == 0 {
		return nil
	}
	report, err := c.Check(ctx, out, CheckOptions{Rows: rows, Seed: c.dev.verified.Add(1) - 1})
	if err == nil && !report.OK() {
		err = fmt.Errorf("verify: %s: off by %.3g, bound %.3g: %w", report.Worst, report.MaxError, report.Bound, ErrVerify)
	}
	return err
}

// rowIndex is a query row: batch, head, position.
type rowIndex struct{ b, h, i int }

// has reports whether a row belongs to x.
func (x *region) has(at rowIndex) bool {
	for axis, i := range [3]int{at.b, at.h, at.i} {
		if i < x.lo[axis] || i >= x.hi[axis] {
			return false
		}
	}
	return true
}

// sample returns distinct random rows, or all if there are fewer than requested.
func sample(d Dims, opt CheckOptions) ([]rowIndex, error) {
	want := opt.Rows
	if want <= 0 {
		want = 16
	}
	total := d.Batch * d.Heads * d.SeqQ
	rows, err := backend.Make[rowIndex](min(want, total))
	if err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(opt.Seed, 0))
	seen := map[int]bool{}
	for i := range rows {
		n := i
		for want < total {
			if n = rng.IntN(total); !seen[n] {
				seen[n] = true
				break
			}
		}
		rows[i] = rowIndex{n / d.SeqQ / d.Heads, n / d.SeqQ % d.Heads, n % d.SeqQ}
	}
	return rows, nil
}

// checker compares rows with the oracle.
type checker struct {
	dev     *Device
	weights Tensor // of the call, or the zero Tensor
	heads   map[headIndex]headData
	worst   oracle.Worst
}

// headIndex is a batch and a kv head of a subcall.
type headIndex struct{ sub, b, h int }

// headData are the keys and values of a head.
type headData struct{ k, v []float32 }

// row compares row of, an index in the call, which subcall s with number n computes.
func (k *checker) row(ctx context.Context, s *subcall, n int, of rowIndex) error {
	at := rowIndex{of.b - s.lo[Batch], of.h - s.lo[Heads], of.i - s.lo[Seq]}
	row, err := k.reference(ctx, &s.Call, n, at)
	if err != nil {
		return err
	}
	// The oracle's scores and weights in float64.
	if err := backend.CheckMemory(16 * int64(len(row.K)/max(len(row.Q), 1))); err != nil {
		return err
	}
	ref := oracle.Solve(row)
	see := func(name string, t Tensor, at rowIndex, refs []float64, bound func(i int) float64) error {
		if t.IsZero() {
			return nil
		}
		got, err := k.download(ctx, t, at, 1)
		if err != nil {
			return err
		}
		for i, g := range got {
			k.worst.See(float64(g), refs[i], bound(i), func() string { return fmt.Sprintf("%s[%d,%d,%d,%d]", name, of.b, of.h, of.i, i) })
		}
		return nil
	}
	if err := see("o", s.O, at, ref.O, func(i int) float64 { return ref.OBound[i] }); err != nil {
		return err
	}
	if err := see("lse", s.LSE, at, []float64{ref.LSE}, func(int) float64 { return ref.LSEBound }); err != nil {
		return err
	}
	// Weights of keys outside of the subcall are 0.
	weights, err := backend.Make[float64](k.weights.Shape()[Dim])
	if err != nil {
		return err
	}
	copy(weights[min(s.lo[Dim], len(weights)):], ref.Weights)
	return see("weights", k.weights, of, weights, func(i int) float64 { return ref.WeightBound*weights[i] + 0x1p-125 })
}

// reference downloads the inputs of row at of c, which is subcall n.
func (k *checker) reference(ctx context.Context, c *backend.Call, n int, at rowIndex) (oracle.Row, error) {
	x := region{lo: [4]int{at.b, at.h, at.i}, hi: [4]int{at.b + 1, at.h + 1, at.i + 1, c.Dims().SeqK}}
	p, err := k.patch(ctx, c, n, x)
	if err != nil {
		return oracle.Row{}, err
	}
	return p.row(at.i), nil
}

// patch has the inputs of some rows and keys of a query head, region, of a backend call.
type patch struct {
	region
	call                         *backend.Call
	q                            []float32
	head                         headData // all keys
	mask, blocks, bias, relative []float32
}

// patch downloads the inputs of region x, which is within one head, of c, which is subcall n.
func (k *checker) patch(ctx context.Context, c *backend.Call, n int, x region) (p patch, err error) {
	d := c.Dims()
	b, h := x.lo[Batch], x.lo[Heads]
	p = patch{region: x, call: c}
	if p.head, err = k.head(ctx, c, headIndex{n, b, h / (d.Heads / d.KVHeads)}); err != nil {
		return p, err
	}
	blocks, relative := x, x
	if !c.Blocks.IsZero() {
		blocks.lo[Seq], blocks.hi[Seq] = x.lo[Seq]/c.BlockQ, ceilDiv(x.hi[Seq], c.BlockQ)
		blocks.lo[Dim], blocks.hi[Dim] = x.lo[Dim]/c.BlockK, ceilDiv(x.hi[Dim], c.BlockK)
	}
	relative.lo[Seq], relative.hi[Seq] = 0, 1
	relative.lo[Dim] += d.SeqQ - x.hi[Seq]
	relative.hi[Dim] += d.SeqQ - x.lo[Seq] - 1
	for _, of := range []struct {
		to *[]float32
		t  Tensor
		x  region
	}{{&p.mask, c.Mask, x}, {&p.blocks, c.Blocks, blocks}, {&p.bias, c.Bias, x}, {&p.relative, c.Relative, relative}} {
		if of.t.IsZero() {
			continue
		}
		var view slicer
		part := view.scores(of.t, &of.x)
		if view.err != nil {
			return p, view.err
		}
		if *of.to, err = k.dev.ToFloat32(ctx, part); err != nil {
			return p, err
		}
	}
	p.q, err = k.download(ctx, c.Q, rowIndex{b, h, x.lo[Seq]}, x.hi[Seq]-x.lo[Seq])
	return p, err
}

// row returns row i of the call with the keys of p.
func (p *patch) row(i int) oracle.Row {
	c, d := p.call, p.call.Dims()
	b, h, first, keys := p.lo[Batch], p.lo[Heads], p.lo[Dim], p.hi[Dim]-p.lo[Dim]
	r := i - p.lo[Seq]
	row := oracle.Row{Q: p.q[r*d.Dim:][:d.Dim], K: p.head.k[first*d.Dim:][:keys*d.Dim], V: p.head.v[first*d.ValueDim:][:keys*d.ValueDim],
		Dv: d.ValueDim, Scale: c.Scale, Softcap: c.Softcap, Out: c.O.DType()}
	ofRow := func(all []float32) []float32 {
		if all == nil {
			return nil
		}
		return all[r*keys:][:keys]
	}
	mask, bias := ofRow(p.mask), ofRow(p.bias)
	var blocks []float32
	if p.blocks != nil {
		perRow := ceilDiv(first+keys, c.BlockK) - first/c.BlockK
		blocks = p.blocks[(i/c.BlockQ-p.lo[Seq]/c.BlockQ)*perRow:]
	}
	lo, hi := c.Visible.Range(b, i, d.SeqK)
	row.Hidden = func(j int) bool {
		at := first + j
		return at < lo || at >= hi || mask != nil && mask[j] == 0 || blocks != nil && blocks[at/c.BlockK-first/c.BlockK] == 0
	}
	if bias != nil {
		row.Bias = func(j int) float64 { return float64(bias[j]) }
	}
	if p.relative != nil {
		row.Relative = func(j int) float64 { return float64(p.relative[j+p.hi[Seq]-1-i]) }
	}
	if c.Slopes != nil {
		row.Slope = float64(c.Slope(b, h, d.Heads))
		row.Distance = func(j int) float64 { return math.Abs(float64(i + c.Visible.Offset - first - j)) }
	}
	if c.Sinks != nil {
		row.Sink = &c.Sinks[h]
	}
	if c.Dropout.P > 0 {
		row.Keeps = func(j int) bool { return c.Dropout.Keeps(b, h, i, first+j) }
		row.KeepFactor = 1 / (1 - float64(c.Dropout.P))
	}
	return row
}

// head returns the keys and values of a head, and keeps those of a few.
func (k *checker) head(ctx context.Context, c *backend.Call, at headIndex) (headData, error) {
	if head, ok := k.heads[at]; ok {
		return head, nil
	}
	if len(k.heads) >= 4 {
		clear(k.heads)
	}
	var head headData
	var err error
	if head.k, err = k.keys(ctx, c, c.K, at); err != nil {
		return head, err
	}
	head.v, err = k.keys(ctx, c, c.V, at)
	k.heads[at] = head
	return head, err
}

// keys downloads the rows of t, the keys or values of c, of a head. Rows that no page holds
// are zeros; no query row sees them.
func (k *checker) keys(ctx context.Context, c *backend.Call, t Tensor, head headIndex) ([]float32, error) {
	if c.Pages == nil {
		return k.download(ctx, t, rowIndex{head.b, head.h, 0}, t.Shape()[Seq])
	}
	size, cols := t.Shape()[Seq], t.Shape()[Dim]
	all, err := backend.Make[float32](Shape{1, 1, c.Pages.Keys, cols}.Elements())
	if err != nil {
		return nil, err
	}
	n := c.Pages.Keys
	if c.Visible.KLen != nil {
		n = min(n, c.Visible.KLen[head.b])
	}
	for j := 0; j < n; j += size {
		page, err := k.download(ctx, t, rowIndex{int(c.Pages.Table[head.b][j/size]), head.h, 0}, min(size, n-j))
		if err != nil {
			return nil, err
		}
		copy(all[j*cols:], page)
	}
	return all, nil
}

// download downloads n rows of t from at on.
func (k *checker) download(ctx context.Context, t Tensor, at rowIndex, n int) ([]float32, error) {
	var s slicer
	t = s.rows(t, &region{lo: [4]int{at.b, at.h, at.i}, hi: [4]int{at.b + 1, at.h + 1, at.i + n}})
	if s.err != nil {
		return nil, s.err
	}
	return k.dev.ToFloat32(ctx, t)
}
