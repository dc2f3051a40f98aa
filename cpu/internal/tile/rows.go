package tile

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// Runs returns the rows of keys or values of some, of head h, as the kernels read them in place. The
// kernels prefetch those of the next block, as far as end.
func (s *Space) Runs(v *view.View, b, h int, some Span, end int) []vec.Run {
	s.runs = s.runs[:0]
	s.appendRuns(v, b, h, some, end)
	return s.runs
}

// appendRuns appends the runs that Runs returns to s.runs.
func (s *Space) appendRuns(v *view.View, b, h int, some Span, end int) {
	lo, n := some.Lo, some.Hi-some.Lo
	if v.Pages == nil {
		later := lo
		if lo+BlockKeys < end {
			later += BlockKeys
		}
		s.runs = v.AppendRun(s.runs, v.Index(b, h, lo), v.Index(b, h, later), n)
		return
	}
	// Each run prefetches a share of the four quarters of the next block, whose rows are as
	// many as to lie in one page each.
	size, ld, stride := v.Shape[backend.Seq], v.Stride[backend.Seq], v.Stride[backend.Batch]
	most, quarter, bytes := commonDivisor(size, BlockKeys), n/4, v.DType.Size()
	pages, head, last := v.Pages[b], h*v.Stride[backend.Heads], (end-1)/size
	from := pagedRow{lo / size, lo % size}
	var ahead [4]pagedRow
	for q := range ahead {
		r := lo + BlockKeys + q*quarter
		ahead[q] = pagedRow{r / size, r % size}
	}
	for m := most - from.row%most; n > 0; m = most {
		m = min(m, n)
		at := int(pages[from.page])*stride + head + from.row*ld
		next := [4]int{at, at, at, at}
		for q := range ahead {
			if a := &ahead[q]; a.page <= last {
				next[q] = int(pages[a.page])*stride + head + a.row*ld
				a.add(m/4, size)
			}
		}
		s.runs = v.AppendRun(s.runs, at, next[0], m)
		s.runs[len(s.runs)-1].Spread(bytes*(next[1]-next[0]), bytes*(next[2]-next[0]), bytes*(next[3]-next[0]))
		from.add(m, size)
		n -= m
	}
	vec.Chain(s.runs)
}

// pagedRow is a row of a page.
type pagedRow struct{ page, row int }

// add moves r by n rows, at most the size of a page.
func (r *pagedRow) add(n, size int) {
	if r.row += n; r.row >= size {
		r.page, r.row = r.page+1, r.row-size
	}
}

func commonDivisor(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// packTransposed writes elements [lo, lo+n) of the rows of t in src, transposed, to the score
// tile.
func (l *Layout) packTransposed(s *Space, src *view.View, t *Tile, lo, n int) {
	x := l.Kernels
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows := max(0, min(x.Lanes, t.N-lane))
		done := 0
		if from, ld, ok := l.square(src, t, lane); ok {
			// Whole squares are read in place; the rest is staged.
			for ; done+x.Lanes <= n; done += x.Lanes {
				x.Transpose(s.S[done*x.Width+lane:], x.Width, from[lo+done:], ld, s.One)
			}
		}
		if done == n {
			continue
		}
		for r := range rows {
			h, i := l.Row(t.H, t.I, lane+r)
			src.Pack(s.Stage[r*BlockKeys:], BlockKeys, t.Batch, h, i, 1, lo+done, n-done)
		}
		for c := done; c < n; c += x.Lanes {
			x.Transpose(s.S[c*x.Width+lane:], x.Width, s.Stage[c-done:], BlockKeys, s.One)
		}
	}
}

// writeTransposed writes the first n rows of the score tile to elements
// [lo, lo+n) of the rows of t in dst, transposed.
func (l *Layout) writeTransposed(s *Space, dst *view.View, t *Tile, lo, n int) {
	x := l.Kernels
	for lane := 0; lane < t.N; lane += x.Lanes {
		rows, done := min(x.Lanes, t.N-lane), 0
		if to, ld, ok := l.square(dst, t, lane); ok {
			for ; done+x.Lanes <= n; done += x.Lanes {
				x.Transpose(to[lo+done:], ld, s.S[done*x.Width+lane:], x.Width, s.One)
			}
		}
		if done == n {
			continue
		}
		for c := done; c < n; c += x.Lanes {
			x.Transpose(s.Stage[c-done:], BlockKeys, s.S[c*x.Width+lane:], x.Width, s.One)
		}
		for r := range rows {
			h, i := l.Row(t.H, t.I, lane+r)
			dst.Store(s.Stage[r*BlockKeys:r*BlockKeys+n-done], t.Batch, h, i, lo+done)
		}
	}
}
