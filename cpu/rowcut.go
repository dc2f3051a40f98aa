package cpu

import "github.com/seed90331342/attn/backend"

// rowCut divides the rows of a tensor [B, H, S, N] into tasks: at most
// taskBlocks sub-blocks of queryBlock rows of one head, times pieces of columns.
// The stages and Project use it; a row's arithmetic does not depend on it.
type rowCut struct {
	heads, seq int
	subs       int // sub-blocks of a full task
	each       int // tasks of a head and a piece of columns
	pieces     int // pieces of columns
	tasks      int // in all
}

// cutRows divides a tensor of the given shape, whose columns come in pieces,
// among threads goroutines. Each row of a task takes width floats of scratch.
func cutRows(shape backend.Shape, pieces, width, threads int) rowCut {
	c := rowCut{heads: shape[backend.Heads], seq: shape[backend.Seq], pieces: pieces}
	blocks := ceilDiv(c.seq, queryBlock)
	heads := shape[backend.Batch] * c.heads * pieces
	c.subs = subBlocks(heads*blocks, threads, queryBlock*width)
	c.each = ceilDiv(blocks, c.subs)
	c.tasks = heads * c.each
	return c
}

// taskRows returns the rows of a full task.
func (c *rowCut) taskRows() int { return min(c.seq, c.subs*queryBlock) }

// at returns what task t covers: rows [from, to) of a head, and a piece of
// columns.
func (c *rowCut) at(t int) (b, h, from, to, piece int) {
	part := t % c.each
	t /= c.each
	piece = t % c.pieces
	t /= c.pieces
	from = part * c.subs * queryBlock
	return t / c.heads, t % c.heads, from, min(c.seq, from+c.subs*queryBlock), piece
}
