package cut

import (
	"encoding/binary"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// pageSlack is the number of keys beyond a batch's last that a kernel may look up: those of its tile.
const pageSlack = 128

// Pages describes how a call reads keys and values from pools of pages. Kernels look
// pages up in a table, or steps get the pages that they need collected in a staged
// window. Listed keys are pages of one key, and each entry of Table is a key.
type Pages struct {
	*backend.Pages
	Size  int // keys of a page
	Width int // pages of a batch in the table for kernels
	words int // of a page in the table
	klen  []int
	call  *backend.Call
}

// pagesOf returns the pages of c, nil when it has none.
func pagesOf(c *backend.Call) *Pages {
	if c.Pages == nil && c.Listed == nil {
		return nil
	}
	p := &Pages{Pages: c.Pages, Size: c.K.Shape()[backend.Seq], words: 1, klen: c.Visible.KLen, call: c}
	if c.Listed != nil {
		p.Pages, p.Size, p.words = &backend.Pages{Table: c.Listed, Keys: c.Dims().SeqK}, 1, 3
	}
	most := 0
	for b := range p.Table {
		most = max(most, p.count(b))
	}
	p.Width = max((min(most+pageSlack, p.Keys)+p.Size-1)/p.Size, 1)
	return p
}

// count returns the number of keys of batch b.
func (p *Pages) count(b int) int {
	if p.klen != nil {
		return min(p.klen[b], p.Keys)
	}
	return p.Keys
}

// Listed reports whether the pages are listed keys.
func (p *Pages) Listed() bool { return p != nil && p.call.Listed != nil }

// begin returns where the n-th page of batch b begins in a tensor with these strides.
func (p *Pages) begin(strides backend.Strides, b, n int) int {
	page := int(p.Table[b][n])
	if !p.Listed() {
		return page * strides[backend.Batch]
	}
	if pool := p.call.Pages; pool != nil {
		size := p.call.K.Shape()[backend.Seq]
		return int(pool.Table[b][page/size])*strides[backend.Batch] + page%size*strides[backend.Seq]
	}
	return b*strides[backend.Batch] + page*strides[backend.Seq]
}

// Bytes returns the table for kernels: Width pages of each batch, as words, or three words of each listed key, see
// shaders/common/pages.wgsl. Beyond a batch's keys it contains page 0, whose keys no row sees. k and v are the strides of K and V.
func (p *Pages) Bytes(k, v backend.Strides) (data []byte) {
	data = make([]byte, 0, 4*p.At(len(p.Table)))
	for b, row := range p.Table {
		n := (p.count(b) + p.Size - 1) / p.Size
		for i := range p.Width {
			words := [3]int{}
			if i < min(n, len(row)) {
				words[0] = int(row[i])
				if p.Listed() {
					words[1], words[2] = p.begin(k, b, i), p.begin(v, b, i)
				}
			}
			for _, word := range words[:p.words] {
				data = binary.LittleEndian.AppendUint32(data, uint32(word))
			}
		}
	}
	return data
}

// At returns the position of the pages of batch b in the table.
func (p *Pages) At(b int) int { return b * p.Width * p.words }

// collected returns the window of the keys of some batches and heads that are in pages. Pages follow one another, batch
// after batch, and keep the order of their axes. The window's contents are unspecified where a batch has no page.
func (o *Operand) collected(lo, hi [4]int) View {
	size, keys := uint64(o.T.DType().Size()), o.Pages.Size
	step := func(axis int) uint64 { return uint64(o.T.Strides()[axis]) * size }
	first, last := lo[backend.Seq]/keys, (hi[backend.Seq]-1)/keys+1
	a := &Staged{Of: o, Lo: lo, Hi: hi}
	axes := byStride([4]int{0, lo[backend.Heads], 0, 0}, [4]int{1, hi[backend.Heads], 1, hi[backend.Dim]}, o.T.Strides())
	// A run is the part of a page with one index of the axes outside of its rows. Pages of one key, as of lists, have no rows
	// next to each other: what lies apart in them is outside.
	row, span, inside := step(backend.Seq), size, 0
	for ; inside < len(axes); inside++ {
		i := axes[inside]
		if keys > 1 && step(i) >= row || keys == 1 && step(i) > 2*span {
			break
		}
		span += uint64(hi[i]-lo[i]-1) * step(i)
		a.Strides[i] = o.T.Strides()[i]
	}
	if keys == 1 {
		row = (span + stagedAlign - 1) &^ (stagedAlign - 1)
		if slices.Contains(axes[inside:], int(backend.Dim)) { // no kernel loads vectors
			row = (span + 3) &^ 3
		}
	}
	a.Strides[backend.Seq] = int(row / size)
	page := uint64(keys) * row
	span += uint64(keys-1) * row
	outer, end := o.repeat(a, Run{Lo: uint64(lo[backend.Heads]) * step(backend.Heads)}, axes[inside:], lo, hi, uint64(last-first-1)*page+span)
	batch := (end + stagedAlign - 1) &^ (stagedAlign - 1)
	a.Strides[backend.Batch] = int(batch / size)
	shifted := false
	for b := lo[backend.Batch]; b < hi[backend.Batch]; b++ {
		have := min((o.Pages.count(b)+keys-1)/keys, last)
		for n := first; n < have; n++ {
			from := uint64(o.T.Offset()+o.Pages.begin(o.T.Strides(), b, n)) * size
			to := uint64(b-lo[backend.Batch])*batch + uint64(n-first)*page
			for _, r := range outer {
				run := Run{from + r.Lo, from + r.Lo + span, to + r.To}
				a.Runs, shifted = append(a.Runs, run), shifted || !run.atWords()
			}
		}
	}
	a.size = uint64(hi[backend.Batch]-lo[backend.Batch]) * batch
	if shifted {
		a.size += stagedAlign // a shift of all of it has words around its elements
	}
	return View{Window{Buf: a, Size: a.size}, (lo[backend.Seq] - first*keys) * a.Strides[backend.Seq], a.Strides}
}
