package heatmap

import "github.com/seed90331342/attn/cmd/internal/matrix"

// span is the range of indices lo <= i < hi.
type span struct{ lo, hi int }

func (s span) len() int { return max(s.hi-s.lo, 0) }

// within returns the intersection of s and t.
func (s span) within(t span) span { return span{max(s.lo, t.lo), min(s.hi, t.hi)} }

// pooled joins weights into a limited number of cells along each axis: the largest or the mean of their weights.
type pooled struct {
	rows, keys     span
	perRow, perKey int // weights of a cell along each axis, fewer in the last one
	mean           bool
	cells          matrix.Matrix
	sums           []float64 // of a mean
}

// newPooled returns cells for the weights of rows and keys, at most size along each axis.
func newPooled(rows, keys span, size int, mean bool) *pooled {
	p := &pooled{rows: rows, keys: keys, mean: mean}
	p.perRow, p.perKey = (rows.len()+size-1)/size, (keys.len()+size-1)/size
	p.cells.Rows, p.cells.Cols = (rows.len()+p.perRow-1)/p.perRow, (keys.len()+p.perKey-1)/p.perKey
	p.cells.Data = make([]float32, p.cells.Rows*p.cells.Cols)
	if mean {
		p.sums = make([]float64, len(p.cells.Data))
	}
	return p
}

// add adds the weights of a row's keys, starting at first.
func (p *pooled) add(row, first int, weights []float32) {
	at := (row - p.rows.lo) / p.perRow * p.cells.Cols
	for j := 0; j < len(weights); {
		cell := (first - p.keys.lo + j) / p.perKey
		end := min(len(weights), (cell+1)*p.perKey+p.keys.lo-first)
		if p.mean {
			for _, w := range weights[j:end] {
				p.sums[at+cell] += float64(w)
			}
		} else {
			for _, w := range weights[j:end] {
				p.cells.Data[at+cell] = max(p.cells.Data[at+cell], w) // keeps NaN
			}
		}
		j = end
	}
}

// matrix returns the cells. Call it after all weights were added.
func (p *pooled) matrix() matrix.Matrix {
	for at, sum := range p.sums {
		i, j := at/p.cells.Cols, at%p.cells.Cols
		high := span{i * p.perRow, (i + 1) * p.perRow}.within(span{0, p.rows.len()})
		wide := span{j * p.perKey, (j + 1) * p.perKey}.within(span{0, p.keys.len()})
		p.cells.Data[at] = float32(sum / float64(high.len()*wide.len()))
	}
	return p.cells
}
