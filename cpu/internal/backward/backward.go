// Package backward computes the gradients of attention: with P = 2^min(S - LSE, 0) from the scores S of package tile,
//
//	dP = V·dO    dS = P∘(dP - D)    D = rowsum(dO∘O) - dLSE
//	dV = P·dO    dK = dS·Q    dQ = Kᵀ·dS
//
// block by block (Dao et al. 2022, FlashAttention, algorithm 4). A task computes a chunk, the keys of a span of one
// key head. It keeps the sums of dK and dV in its cache and takes each tile of query rows over its blocks of 128
// keys, in order. The sum of dQ passes from each chunk to the next one, tile by tile, and so do those of biases.
// Therefore the order of every sum depends on the shapes alone, and so do the bits of a result.
package backward

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Call is one call. It may be opened again after Reset and keeps its memory.
type Call struct {
	plan     Plan
	forward  tile.Attention // o and lse are its results
	problem  *backend.Problem
	dO, dLSE strided.Tensor
	add      bool // to the gradients

	dQ, dK, dV, dBias, dRelative, dSlopes, dSinks strided.Tensor

	dots []float32      // D of each query row, [B, H, Sq]
	sums []float32      // dQ of the tiles of each slot, unscaled
	done []atomic.Int32 // of each task, the tiles whose dQ has its share of the sum

	distances, lines []float64 // sums of all heads, see Plan
}

// Open opens the operands of g, which are pinned, and allocates the memory that its tasks share.
func (c *Call) Open(g *backend.Gradients, k *vec.Kernels, threads int) (err error) {
	c.plan, c.problem, c.add = NewPlan(g, k, threads), &g.Problem, g.Add
	c.forward.Open(&c.plan.layout, &g.Call)
	c.dO, c.dLSE = strided.Of(&g.DO), strided.Of(&g.DLSE)
	c.dQ, c.dK, c.dV = strided.Of(&g.DQ), strided.Of(&g.DK), strided.Of(&g.DV)
	c.dK.Listed, c.dV.Listed = g.Listed, g.Listed
	c.dBias, c.dRelative, c.dSlopes, c.dSinks = strided.Of(&g.DBias), strided.Of(&g.DRelative), strided.Of(&g.DSlopes), strided.Of(&g.DSinks)
	rows := c.plan.heads() * c.plan.layout.Dims.SeqQ
	pool.Resize(&c.dots, rows, &err)
	pool.Resize(&c.sums, c.plan.sumFloats, &err)
	pool.Resize(&c.done, c.plan.tasks, &err)
	pool.Resize(&c.distances, c.plan.heads()*c.plan.distances, &err)
	if pool.Resize(&c.lines, c.plan.heads()*c.plan.lines, &err); err != nil {
		return fmt.Errorf("sums of %d query rows: %w", rows, err)
	}
	clear(c.distances)
	clear(c.lines)
	clear(c.done)
	return nil
}

// Reset forgets the operands.
func (c *Call) Reset() {
	*c = Call{dots: c.dots, sums: c.sums, done: c.done, distances: c.distances, lines: c.lines}
}

// Run computes the gradients on the workers of p.
func (c *Call) Run(ctx context.Context, p *pool.Pool) error {
	if err := p.Run(ctx, dotJob{c}, 2*dotChains*c.plan.layout.DimV, tile.CeilDiv(len(c.dots), dotRows), c.plan.threads); err != nil {
		return err
	}
	if c.plan.inPlace && !c.add {
		c.clearBias()
	}
	if c.plan.wantsQ || !c.dK.IsZero() || !c.dV.IsZero() || c.plan.wantsScores() {
		if err := p.Run(ctx, chunkJob{c}, c.plan.chunkFloats(), c.plan.tasks, c.plan.threads); err != nil {
			return err
		}
	}
	c.writeBiases()
	return nil
}

// dotRows is the most rows of a task of dotJob, which sums those of dotChains at once: a sum is one chain of additions.
const dotRows, dotChains = 64, 4

// dotJob computes D of each query row.
type dotJob struct{ call *Call }

// Task implements pool.Job.
func (j dotJob) Task(_ *pool.Turn, w *pool.Scratch, n int) error {
	c, l := j.call, &j.call.plan.layout
	d := l.DimV
	o, dO := w.Floats(dotChains*d), w.Floats(dotChains*d)
	for row, end := n*dotRows, min(len(c.dots), (n+1)*dotRows); row < end; {
		head, i := row/l.Dims.SeqQ, row%l.Dims.SeqQ
		b, h, rows := head/l.Dims.Heads, head%l.Dims.Heads, min(dotChains, end-row, l.Dims.SeqQ-i)
		c.forward.Products.O.LoadRows(l.Kernels, o, d, b, h, i, rows)
		c.dO.LoadRows(l.Kernels, dO, d, b, h, i, rows)
		var s0, s1, s2, s3 float64 // of rows, those after the last are not used
		for c, x := range o[:d] {
			s0 += float64(x) * float64(dO[c])
			s1 += float64(o[d+c]) * float64(dO[d+c])
			s2 += float64(o[2*d+c]) * float64(dO[2*d+c])
			s3 += float64(o[3*d+c]) * float64(dO[3*d+c])
		}
		for r, sum := range [dotChains]float64{s0, s1, s2, s3} {
			if r == rows {
				break
			}
			if lse := c.forward.LSE.At(b, h, i+r, 0); lse != lse {
				sum = math.NaN() // the row sees a NaN
			}
			if !c.dLSE.IsZero() {
				sum -= float64(c.dLSE.At(b, h, i+r, 0))
			}
			c.dots[row+r] = float32(sum)
		}
		row += rows
	}
	return nil
}

// storeGradient writes scale·row, or adds it, to row i of v unless v is not requested. It overwrites row and old.
func (c *Call) storeGradient(v *strided.Tensor, row, old []float32, scale float32, b, h, i int) {
	if v.IsZero() {
		return
	}
	k := c.plan.layout.Kernels
	k.ScaleMax(row, scale, old)
	if c.add {
		v.LoadRows(k, old, len(row), b, h, i, 1)
		for n, x := range old[:len(row)] {
			row[n] += x
		}
	}
	v.Store(k, row[:v.Shape[backend.Dim]], b, h, i, 0)
}
