// Package check compares rows of the results of a call with the float64 reference of package
// oracle.
package check

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// Sample is the number of random rows to recompute, 0 for 16, and the seed of their choice.
type Sample struct {
	Rows int
	Seed uint64
}

// Report is a kernels.CheckReport.
type Report struct {
	Rows            int
	MaxError, Bound float64
	Off             float64
	Worst           string
}

// Sub is a backend call that computes a box of the scores of a call, with its outputs, and its
// backward pass.
type Sub struct {
	region.Box
	*backend.Call
	Gradients *backend.Gradients
	ByRow     bool // each row of the box is a batch of the call
}

// Read returns the elements of a tensor in device memory, in row-major order.
type Read func(ctx context.Context, t backend.Tensor) ([]float32, error)

// Results compares random rows of the outputs of subs, into which a call of lengths d is divided,
// and of its weights unless they are the zero backend.Tensor.
func Results(ctx context.Context, read Read, d backend.Dims, subs []Sub, weights backend.Tensor, of Sample) (_ Report, err error) {
	defer backend.Recover(&err)
	k := checker{read: read, heads: map[headIndex]headData{}}
	rows, err := of.draw(d)
	if err != nil {
		return Report{}, fmt.Errorf("CheckOptions.Rows is %d: %w", of.Rows, err)
	}
	if err := subs[0].GoMod(false); len(rows) > 0 && err != nil {
		return Report{}, err
	}
	for _, at := range rows {
		n := slices.IndexFunc(subs, func(s Sub) bool { return s.HasRow(at) })
		if err := k.row(ctx, &subs[n], n, weights, at); err != nil {
			return Report{}, err
		}
	}
	return k.report(len(rows)), nil
}

// report returns the report of a comparison of that many rows.
func (k *checker) report(rows int) Report {
	worst := fmt.Sprintf("%s is %v, should be %v", k.worst.Where, k.worst.Got, k.worst.Ref)
	return Report{Rows: rows, MaxError: k.worst.Error, Bound: k.worst.Bound, Off: k.worst.Off, Worst: worst}
}

// rowIndex is a query row: batch, head, position.
type rowIndex = [3]int

// within returns row at of the call as a row of s.
func (s *Sub) within(at rowIndex) rowIndex {
	for axis := range at {
		at[axis] -= s.Lo[axis]
	}
	if s.ByRow {
		at[backend.Batch], at[backend.Seq] = at[backend.Seq], at[backend.Batch]
	}
	return at
}

// draw returns distinct random rows, or all if there are fewer than requested.
func (o Sample) draw(d backend.Dims) ([]rowIndex, error) {
	want := cmp.Or(max(o.Rows, 0), 16)
	total := d.Batch * d.Heads * d.SeqQ
	rows, err := backend.Make[rowIndex](min(want, total))
	if err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(o.Seed, 0))
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
	read  Read
	heads map[headIndex]headData
	worst oracle.Worst
}

// headIndex is a batch and a kv head of a subcall.
type headIndex struct{ sub, b, h int }

// headData are the keys and values of a head.
type headData struct{ k, v []float32 }

// row compares row of, an index in the call, which subcall s with number n computes. weights are those
// of the call.
func (k *checker) row(ctx context.Context, s *Sub, n int, weights backend.Tensor, of rowIndex) error {
	at := s.within(of)
	row, err := k.reference(ctx, s.Call, n, at)
	if err != nil {
		return err
	}
	// The oracle's scores, weights and their bounds in float64.
	if err := backend.CheckMemory(24 * int64(len(row.K)/max(len(row.Q), 1))); err != nil {
		return err
	}
	a := oracle.Solve(row)
	return cmp.Or(k.see(ctx, "o", s.O, at, of, func(i int) (ref, bound float64) { return a.O[i], a.OBound[i] }),
		k.see(ctx, "lse", s.LSE, at, of, func(int) (ref, bound float64) { return a.LSE, a.LSEBound }),
		k.see(ctx, "weights", weights, of, of, func(i int) (ref, bound float64) {
			if j := i - s.Lo[region.Key]; j >= 0 && j < len(a.Weights) { // other keys are outside of the subcall
				ref, bound = a.Weights[j], a.WeightBounds[j]
			}
			return ref, bound
		}))
}

// see compares row at of t, row of in the call, with references and their bounds, unless t is the zero
// Tensor. An element with a negative bound is not compared.
func (k *checker) see(ctx context.Context, name string, t backend.Tensor, at, of rowIndex, reference func(i int) (ref, bound float64)) error {
	if t.IsZero() {
		return nil
	}
	got, err := k.download(ctx, t, at, 1)
	for i, x := range got {
		ref, bound := reference(i)
		if bound < 0 {
			continue
		}
		k.worst.See(float64(x), ref, bound, func() string { return fmt.Sprintf("%s[%d,%d,%d,%d]", name, of[0], of[1], of[2], i) })
	}
	return err
}

// reference downloads the inputs of row at of c, which is subcall n.
func (k *checker) reference(ctx context.Context, c *backend.Call, n int, at rowIndex) (oracle.Row, error) {
	x := region.Row(at[0], at[1], at[2], 1)
	x.Hi[region.Key] = c.Positions()
	p, err := k.patch(ctx, c, n, x)
	if err != nil {
		return oracle.Row{}, err
	}
	return p.row(at[2]), nil
}

// patch has the inputs of a box, within one query head, of a backend call.
type patch struct {
	region.Box
	call                         *backend.Call
	q                            []float32
	head                         headData // all keys
	mask, blocks, bias, relative []float32
}

// patch downloads the inputs of x, which is within one head, of c, which is subcall n.
func (k *checker) patch(ctx context.Context, c *backend.Call, n int, x region.Box) (p patch, err error) {
	d := c.Dims()
	b, h := x.Lo[backend.Batch], x.Lo[backend.Heads]
	p = patch{Box: x, call: c}
	if p.head, err = k.head(ctx, c, headIndex{n, b, h / (d.Heads / d.KVHeads)}); err != nil {
		return p, err
	}
	blocks, relative := x, x.Relative(d.SeqQ)
	if !c.Blocks.IsZero() {
		blocks = x.Blocks(c.BlockQ, c.BlockK)
	}
	for _, of := range []struct {
		to *[]float32
		t  backend.Tensor
		x  region.Box
	}{{&p.mask, c.Mask, x}, {&p.blocks, c.Blocks, blocks}, {&p.bias, c.Bias, x}, {&p.relative, c.Relative, relative}} {
		if of.t.IsZero() {
			continue
		}
		if *of.to, err = k.read(ctx, of.x.Scores(of.t)); err != nil {
			return p, err
		}
	}
	p.q, err = k.download(ctx, c.Q, rowIndex{b, h, x.Lo[backend.Seq]}, x.Hi[backend.Seq]-x.Lo[backend.Seq])
	return p, err
}

// row returns row i of the call with the keys of p.
func (p *patch) row(i int) oracle.Row {
	c, d := p.call, p.call.Dims()
	b, h, first, keys := p.Lo[backend.Batch], p.Lo[backend.Heads], p.Lo[region.Key], p.Hi[region.Key]-p.Lo[region.Key]
	r := i - p.Lo[backend.Seq]
	row := oracle.Row{Q: p.q[r*d.Dim:][:d.Dim], K: p.head.k[first*d.Dim:][:keys*d.Dim], V: p.head.v[first*d.ValueDim:][:keys*d.ValueDim],
		Dv: d.ValueDim, Scale: c.Scale, Softcap: c.Softcap, Out: c.O.DType(), Rounded: c.WeightType(),
		Fixed: c.LowPrecision && c.K.DType() == backend.Q8, Split: c.Split()}
	ofRow := func(all []float32) []float32 {
		if all == nil {
			return nil
		}
		return all[r*keys:][:keys]
	}
	mask, bias := ofRow(p.mask), ofRow(p.bias)
	var blocks []float32
	if p.blocks != nil {
		perRow := region.CeilDiv(first+keys, c.BlockK) - first/c.BlockK
		blocks = p.blocks[(i/c.BlockQ-p.Lo[backend.Seq]/c.BlockQ)*perRow:]
	}
	lo, hi := c.Visible.Range(b, i, d.SeqK)
	var list []int32
	if c.Listed != nil {
		lo, hi, list = 0, c.Positions(), c.Listed[b]
		row.Listed = max(1, len(list))
	}
	row.Hidden = func(j int) bool {
		at := first + j
		if _, found := slices.BinarySearch(list, int32(at)); c.Listed != nil && !found {
			return true
		}
		return at < lo || at >= hi || mask != nil && mask[j] == 0 || blocks != nil && blocks[at/c.BlockK-first/c.BlockK] == 0
	}
	if bias != nil {
		row.Bias = func(j int) float64 { return float64(bias[j]) }
	}
	if p.relative != nil {
		row.Relative = func(j int) float64 { return float64(p.relative[j+p.Hi[backend.Seq]-1-i]) }
	}
	if c.Slopes != nil {
		row.Slope = float64(c.Slope(b, h, d.Heads))
		row.Distance = func(j int) float64 { return math.Abs(float64(i + c.Visible.OffsetOf(b) - first - j)) }
	}
	if m := c.ScoreMod; m != nil {
		at := func(f func([]float32, backend.Position)) func(j int, s float32) float32 {
			return func(j int, s float32) float32 {
				scores := [1]float32{s}
				c.Modify(f, scores[:], b, h, i, first+j)
				return scores[0]
			}
		}
		row.Mod, row.ModDerivative = at(m.Go), at(m.Derivative)
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
	head, ok := k.heads[at]
	if ok {
		return head, nil
	}
	if len(k.heads) >= 4 {
		clear(k.heads)
	}
	var err error
	if head.k, err = k.keys(ctx, c, c.K, at); err == nil {
		head.v, err = k.keys(ctx, c, c.V, at)
	}
	if err == nil {
		k.heads[at] = head
	}
	return head, err
}

// keys downloads the rows of t, the keys or values of c, of a head. Rows that no page holds
// are zeros; no query row sees them.
func (k *checker) keys(ctx context.Context, c *backend.Call, t backend.Tensor, head headIndex) ([]float32, error) {
	if c.Pages == nil {
		return k.download(ctx, t, rowIndex{head.b, head.h, 0}, t.Shape()[backend.Seq])
	}
	size, cols := t.Shape()[backend.Seq], t.Shape()[backend.Dim]
	all, err := backend.Make[float32](backend.Shape{1, 1, c.Pages.Keys, cols}.Elements())
	if err != nil {
		return nil, err
	}
	n := c.Pages.Keys
	if c.Listed != nil {
		if n = 0; len(c.Listed[head.b]) > 0 {
			n = int(slices.Max(c.Listed[head.b])) + 1
		}
	} else if c.Visible.KLen != nil {
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
func (k *checker) download(ctx context.Context, t backend.Tensor, at rowIndex, n int) ([]float32, error) {
	x := region.Row(at[0], at[1], at[2], n)
	return k.read(ctx, x.Rows(t))
}

// Gradients compares the gradients of q, k and v that are set, of random rows of q and as many of
// k and v, with float64.
func Gradients(ctx context.Context, read Read, d backend.Dims, subs []Sub, grads [3]backend.Tensor, of Sample) (_ Report, err error) {
	defer backend.Recover(&err)
	k := checker{read: read, heads: map[headIndex]headData{}}
	if len(subs) > 0 {
		if err := subs[0].GoMod(true); err != nil {
			return Report{}, err
		}
	}
	n := 0
	compare := func(d backend.Dims, row func(at rowIndex) error) error {
		rows, err := of.draw(d)
		n += len(rows)
		for _, at := range rows {
			if err := row(at); err != nil {
				return err
			}
		}
		return err
	}
	if !grads[0].IsZero() {
		err = compare(d, func(at rowIndex) error { return k.queryGradient(ctx, d, subs, grads[0], at) })
	}
	if err == nil && (!grads[1].IsZero() || !grads[2].IsZero()) {
		keys := backend.Dims{Batch: d.Batch, Heads: d.KVHeads, SeqQ: d.SeqK}
		err = compare(keys, func(at rowIndex) error { return k.keyGradients(ctx, d, subs, grads[1], grads[2], at) })
	}
	if err != nil {
		return Report{}, err
	}
	return k.report(n), nil
}

// queryGradient compares row of dq with the sum over its keys.
func (k *checker) queryGradient(ctx context.Context, d backend.Dims, subs []Sub, dq backend.Tensor, of rowIndex) error {
	sums := make([]oracle.Sum, d.Dim)
	if n := slices.IndexFunc(subs, func(s Sub) bool { return s.HasRow(of) }); n >= 0 { // else there are no keys
		s := &subs[n]
		at := s.within(of)
		row, err := k.reference(ctx, s.Call, n, at)
		if err != nil {
			return err
		}
		loss, err := k.loss(ctx, s.Gradients, at, 1)
		if err != nil {
			return err
		}
		oracle.Differentiate(row, loss.o, loss.lse[0], oracle.RowGradients{DQ: sums})
	}
	return k.seeGradient(ctx, "dq", dq, of, sums)
}

// keyGradients compares row of, a key of a key head, of dk and dv with the sums over the query
// rows of all heads that share the key head.
func (k *checker) keyGradients(ctx context.Context, d backend.Dims, subs []Sub, dk, dv backend.Tensor, of rowIndex) error {
	dK, dV := make([]oracle.Sum, d.Dim), make([]oracle.Sum, d.ValueDim)
	share := d.Heads / d.KVHeads
	for n := range subs {
		s := &subs[n]
		if of[0] < s.Lo[backend.Batch] || of[0] >= s.Hi[backend.Batch] || of[2] < s.Lo[region.Key] || of[2] >= s.Hi[region.Key] {
			continue
		}
		rows := s.Len(backend.Seq)
		for h := max(of[1]*share, s.Lo[backend.Heads]); h < min((of[1]+1)*share, s.Hi[backend.Heads]); h++ {
			at := rowIndex{of[0] - s.Lo[backend.Batch], h - s.Lo[backend.Heads], 0}
			j := of[2] - s.Lo[region.Key]
			p, err := k.patch(ctx, s.Call, n, region.Box{Lo: [4]int{at[0], at[1], 0, j}, Hi: [4]int{at[0] + 1, at[1] + 1, rows, j + 1}})
			if err != nil {
				return err
			}
			loss, err := k.loss(ctx, s.Gradients, at, rows)
			if err != nil {
				return err
			}
			result, err := k.loss(ctx, &backend.Gradients{DO: s.O, DLSE: s.LSE}, at, rows)
			if err != nil {
				return err
			}
			cols := d.ValueDim
			for i := range rows {
				oracle.DifferentiatePart(p.row(i), result.o[i*cols:][:cols], result.lse[i], loss.o[i*cols:][:cols], loss.lse[i], oracle.RowGradients{DK: dK, DV: dV})
			}
		}
	}
	return cmp.Or(k.seeGradient(ctx, "dk", dk, of, dK), k.seeGradient(ctx, "dv", dv, of, dV))
}

// results are the o and lse of some rows, or their gradients.
type results struct{ o, lse []float32 }

// loss downloads the gradients of the results of n rows from at on.
func (k *checker) loss(ctx context.Context, g *backend.Gradients, at rowIndex, n int) (l results, err error) {
	l.lse = make([]float32, n)
	if l.o, err = k.download(ctx, g.DO, at, n); err == nil && !g.DLSE.IsZero() {
		l.lse, err = k.download(ctx, g.DLSE, at, n)
	}
	return l, err
}

// seeGradient compares row at of a gradient, unless it is the zero Tensor.
func (k *checker) seeGradient(ctx context.Context, name string, t backend.Tensor, at rowIndex, sums []oracle.Sum) error {
	return k.see(ctx, name, t, at, at, func(i int) (ref, bound float64) {
		if x := &sums[i]; x.Value == x.Value {
			return x.Value, x.Bound(t.DType())
		}
		return 0, -1 // NaN is unspecified
	})
}
