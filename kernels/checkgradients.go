package kernels

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// CheckBackward compares gradients that [Call.Backward] wrote, with the same arguments, with
// float64: those of random rows of q, and of as many random rows of k and v. Gradients of
// options are not compared. The report counts all these rows.
//
// A row of dq is computed from the operands alone. A row of dk or dv is a sum over all query
// rows; it is computed from result, which [Call.Check] checks, and takes O(Sq) operations for
// each query head that shares the key head.
func (c *Call) CheckBackward(ctx context.Context, grads Gradients, d, result Result, opt CheckOptions) (report CheckReport, err error) {
	defer op.Annotate(&err, "check")
	if err := c.checkBackward(&grads, d, result); err != nil {
		return CheckReport{}, err
	}
	k := checker{dev: c.dev, heads: map[headIndex]headData{}}
	parts := make([]backend.Gradients, len(c.subs))
	for i := range parts {
		if parts[i], err = c.gradients(&c.subs[i], &grads, d, result); err != nil {
			return CheckReport{}, err
		}
	}
	n := 0
	if !grads.Q.IsZero() {
		rows, err := sample(c.dims, opt)
		if err != nil {
			return CheckReport{}, err
		}
		for _, at := range rows {
			if err := k.queryGradient(ctx, c, parts, grads.Q, at); err != nil {
				return CheckReport{}, err
			}
		}
		n += len(rows)
	}
	if !grads.K.IsZero() || !grads.V.IsZero() {
		keys, err := sample(Dims{Batch: c.dims.Batch, Heads: c.dims.KVHeads, SeqQ: c.dims.SeqK}, opt)
		if err != nil {
			return CheckReport{}, err
		}
		for _, at := range keys {
			if err := k.keyGradients(ctx, c, parts, &grads, at); err != nil {
				return CheckReport{}, err
			}
		}
		n += len(keys)
	}
	return k.report(n), nil
}

// queryGradient compares row of dq with the sum over its keys.
func (k *checker) queryGradient(ctx context.Context, c *Call, parts []backend.Gradients, dq Tensor, of rowIndex) error {
	sums := make([]oracle.Sum, c.dims.Dim)
	if n := slices.IndexFunc(c.subs, func(s subcall) bool { return s.has(of) }); n >= 0 { // else there are no keys
		g, s := &parts[n], &c.subs[n]
		at := rowIndex{of.b - s.lo[Batch], of.h - s.lo[Heads], of.i - s.lo[Seq]}
		row, err := k.reference(ctx, &g.Call, n, at)
		if err != nil {
			return err
		}
		loss, err := k.loss(ctx, g, at, 1)
		if err != nil {
			return err
		}
		oracle.Differentiate(row, loss.dO, loss.dLSE[0], oracle.RowGradients{DQ: sums})
	}
	return k.seeGradient(ctx, "dq", dq, of, sums)
}

// keyGradients compares row of, a key of a key head, of dk and dv with the sums over the query
// rows of all heads that share the key head.
func (k *checker) keyGradients(ctx context.Context, c *Call, parts []backend.Gradients, grads *Gradients, of rowIndex) error {
	dK, dV := make([]oracle.Sum, c.dims.Dim), make([]oracle.Sum, c.dims.ValueDim)
	share := c.dims.Heads / c.dims.KVHeads
	for n := range c.subs {
		g, s := &parts[n], &c.subs[n]
		if of.b < s.lo[Batch] || of.b >= s.hi[Batch] || of.i < s.lo[Dim] || of.i >= s.hi[Dim] {
			continue
		}
		rows := s.hi[Seq] - s.lo[Seq]
		for h := max(of.h*share, s.lo[Heads]); h < min((of.h+1)*share, s.hi[Heads]); h++ {
			at := rowIndex{of.b - s.lo[Batch], h - s.lo[Heads], 0}
			j := of.i - s.lo[Dim]
			p, err := k.patch(ctx, &g.Call, n, region{lo: [4]int{at.b, at.h, 0, j}, hi: [4]int{at.b + 1, at.h + 1, rows, j + 1}})
			if err != nil {
				return err
			}
			loss, err := k.loss(ctx, g, at, rows)
			if err != nil {
				return err
			}
			o, err := k.download(ctx, g.O, at, rows)
			if err != nil {
				return err
			}
			lse, err := k.download(ctx, g.LSE, at, rows)
			if err != nil {
				return err
			}
			dv := c.dims.ValueDim
			for i := range rows {
				oracle.DifferentiatePart(p.row(i), o[i*dv:][:dv], lse[i], loss.dO[i*dv:][:dv], loss.dLSE[i], oracle.RowGradients{DK: dK, DV: dV})
			}
		}
	}
	if err := k.seeGradient(ctx, "dk", grads.K, of, dK); err != nil {
		return err
	}
	return k.seeGradient(ctx, "dv", grads.V, of, dV)
}

// loss are the gradients of a loss with respect to the results of some rows.
type loss struct{ dO, dLSE []float32 }

// loss downloads those of n rows from at on.
func (k *checker) loss(ctx context.Context, g *backend.Gradients, at rowIndex, n int) (l loss, err error) {
	if l.dO, err = k.download(ctx, g.DO, at, n); err != nil {
		return l, err
	}
	if g.DLSE.IsZero() {
		l.dLSE = make([]float32, n)
		return l, nil
	}
	l.dLSE, err = k.download(ctx, g.DLSE, at, n)
	return l, err
}

// seeGradient compares row at of a gradient, unless it is the zero Tensor.
func (k *checker) seeGradient(ctx context.Context, name string, t Tensor, at rowIndex, sums []oracle.Sum) error {
	if t.IsZero() {
		return nil
	}
	got, err := k.download(ctx, t, at, 1)
	if err != nil {
		return err
	}
	for i, x := range got {
		if ref := &sums[i]; ref.Value == ref.Value { // NaN is unspecified
			k.worst.See(float64(x), ref.Value, ref.Bound(t.DType()), func() string { return fmt.Sprintf("%s[%d,%d,%d,%d]", name, at.b, at.h, at.i, i) })
		}
	}
	return nil
}
