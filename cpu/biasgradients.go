package cpu

import (
	"context"
	"math"
	"unsafe"

	"github.com/seed90331342/attn/backend"
)

// biasJob computes DBias, DRelative, DSlopes and DSinks. A task owns some elements of one of
// them. It computes dS of the rows and keys that add to them once more, and adds in float64,
// in the order of batches, heads, ranges of keys, tiles and key blocks.
type biasJob struct {
	*gradients
	parts    [4]biasPart // in the order of Gradients.Operands
	headRows int         // tiles of a head, none of which reaches into the next one
}

// biasPart is the tasks of one gradient; without tasks it is not requested.
type biasPart struct {
	to    view
	shape backend.Shape // tasks along each axis
}

// regionTiles is the number of tiles whose rows a task of DBias owns. With twice as many, its
// sums would not fit the second-level cache.
const regionTiles = 2

// openBiasJob opens the gradients of biases that g requests.
func (j *gradients) openBiasJob(g *backend.Gradients) (*biasJob, error) {
	if g.DBias.IsZero() && g.DRelative.IsZero() && g.DSlopes.IsZero() && g.DSinks.IsZero() {
		return nil, nil
	}
	a := &biasJob{gradients: j, headRows: ceilDiv(j.d.SeqQ, j.rows)}
	if err := openViews([]operand{{"dbias", g.DBias, &a.parts[0].to}, {"drelative", g.DRelative, &a.parts[1].to},
		{"dslopes", g.DSlopes, &a.parts[2].to}, {"dsinks", g.DSinks, &a.parts[3].to}}); err != nil {
		return nil, err
	}
	for i := range a.parts {
		p := &a.parts[i]
		if p.shape = p.to.shape; p.to.isZero() {
			continue
		}
		p.shape[backend.Seq], p.shape[backend.Dim] = 1, 1
		if i == 0 && p.to.shape[backend.Seq] > 1 {
			p.shape[backend.Seq] = ceilDiv(a.headRows, regionTiles)
		}
		if i == 0 && p.to.shape[backend.Dim] > 1 {
			p.shape[backend.Dim] = ceilDiv(j.d.SeqK, j.cacheKeys)
		}
	}
	return a, nil
}

// biasTasks returns the number of tasks.
func (j *biasJob) biasTasks() (n int) {
	for _, p := range j.parts {
		n += p.shape.Elements()
	}
	return n
}

// sumCount returns the number of sums that a task of part i owns at most.
func (j *biasJob) sumCount(i int) int {
	switch p := &j.parts[i]; {
	case p.to.isZero() || i == 3:
		return 0
	case i > 0:
		return j.d.SeqQ + j.d.SeqK - 1
	default:
		return min(p.to.shape[backend.Seq], regionTiles*j.rows) * min(p.to.shape[backend.Dim], j.cacheKeys)
	}
}

func (j *biasJob) size() (floats, rows int) {
	most := max(j.sumCount(0), j.sumCount(1), j.sumCount(2))
	return j.workspaceFloats() + j.gradientFloats() + 2*most, j.rows
}

func (j *biasJob) task(ctx context.Context, w *scratch, n int) error {
	i := 0
	for ; n >= j.parts[i].shape.Elements(); i++ {
		n -= j.parts[i].shape.Elements()
	}
	part := &j.parts[i]
	var at [4]int // the task's place along each axis
	for axis := 3; axis >= 0; axis-- {
		at[axis], n = n%part.shape[axis], n/part.shape[axis]
	}
	// own returns the part of an axis of the given length that the task sums over.
	own := func(axis, length, step int) span {
		if part.to.shape[axis] == 1 {
			return span{0, length}
		}
		return span{at[axis] * step, min(length, (at[axis]+1)*step)}
	}
	batches, heads := own(backend.Batch, j.d.Batch, 1), own(backend.Heads, j.d.Heads, 1)
	if i == 3 {
		j.storeSum(&part.to, at[0], at[1], 0, 0, j.sinkGradient(at[1]))
		return nil
	}
	rows, keys := span{0, j.headRows}, span{0, j.d.SeqK}
	width, byRow, byKey := 1, 0, 0 // the sum for row r and key c is that at r·byRow + c·byKey
	if i > 0 {
		width, byRow, byKey = j.d.SeqQ+j.d.SeqK-1, -1, 1
	} else {
		rows, keys = own(backend.Seq, j.headRows, regionTiles), own(backend.Dim, j.d.SeqK, j.cacheKeys)
		if part.to.shape[backend.Dim] > 1 {
			width, byKey = keys.hi-keys.lo, 1
		}
		if part.to.shape[backend.Seq] > 1 {
			byRow = width
			width *= min(rows.hi*j.rows, j.d.SeqQ) - rows.lo*j.rows
		}
	}
	sums := unsafe.Slice((*float64)(unsafe.Pointer(unsafe.SliceData(w.floats(2*width)))), width)
	clear(sums)
	first := 0
	if i > 0 {
		first = j.d.SeqQ - 1
	}
	add := func(b *workspace, s *gradientSpace, t *tile, here span) {
		ld, step := j.kernels.Width, 1
		if j.keyLanes {
			ld, step = 1, keyBlock
		}
		for c := range here.hi - here.lo {
			to := first + (t.i-rows.lo*j.rows)*byRow + (here.lo-keys.lo+c)*byKey
			for r := range t.n {
				sums[to+r*byRow] += float64(s.ds[c*ld+r*step])
			}
		}
	}
	used := w.used
	for b := batches.lo; b < batches.hi; b++ {
		for h := heads.lo; h < heads.hi; h++ {
			for lo := keys.lo; lo < keys.hi; lo += j.cacheKeys {
				w.used = used
				p := taskRange{b: b, hk: h / j.share, keys: span{lo, min(lo+j.cacheKeys, keys.hi)}}
				if err := j.eachBlock(ctx, w, &p, h, rows, add); err != nil {
					return err
				}
			}
		}
	}
	switch i {
	case 0:
		for n, x := range sums {
			r, c := rows.lo*j.rows, n
			if byRow > 0 {
				r, c = r+n/byRow, n%byRow
			}
			if byKey > 0 {
				c += keys.lo
			}
			j.storeSum(&part.to, at[0], at[1], min(r, part.to.shape[backend.Seq]-1), c, x)
		}
	case 1:
		for c, x := range sums {
			j.storeSum(&part.to, at[0], at[1], 0, c, x)
		}
	case 2:
		slope := 0.0
		for c, x := range sums {
			slope -= math.Abs(float64(j.problem.Visible.Offset-(c-(j.d.SeqQ-1)))) * x
		}
		j.storeSum(&part.to, at[0], at[1], 0, 0, slope)
	}
	return nil
}

// eachBlock calls do for the key blocks of p and the tiles of head h whose dS is not all 0.
func (j *gradients) eachBlock(ctx context.Context, w *scratch, p *taskRange, h int, tiles span,
	do func(b *workspace, s *gradientSpace, t *tile, here span)) error {
	b := j.cutWorkspace(w)
	s := j.cutGradients(w, b)
	for n := tiles.lo; n < tiles.hi; n++ {
		t := tile{h: h, i: n * j.rows, n: min(j.rows, j.d.SeqQ-n*j.rows), spans: w.spans}
		j.findVisible(p, &t)
		if err := j.visitTile(ctx, s, b, p, &t, func(here span) { do(b, s, &t, here) }); err != nil {
			return err
		}
	}
	return nil
}

// sinkGradient returns the gradient of the sink of head h.
func (j *biasJob) sinkGradient(h int) float64 {
	sum, sink := 0.0, j.problem.Sink(h)
	if sink == negInf {
		return 0
	}
	for b := range j.d.Batch {
		dots := j.dots[(b*j.d.Heads+h)*j.d.SeqQ:]
		for i := range j.d.SeqQ {
			if lse := j.lse.at(b, h, i, 0); lse != negInf {
				sum -= math.Exp(float64(sink)-float64(lse)) * float64(dots[i])
			}
		}
	}
	return sum
}

// storeSum writes x to an element of v, or adds it.
func (j *gradients) storeSum(v *view, b, h, i, c int, x float64) {
	at := v.index(b, h, i) + c*v.stride[backend.Dim]
	if j.add {
		x += float64(v.f32[at])
	}
	v.f32[at] = float32(x)
}
