package backend

import "fmt"

// Pages locates the keys and values of each batch when K and V are pools of pages, as kernels.Pages:
// key j of batch b is row j%Size of page Table[b][j/Size], and Keys is Sk.
type Pages struct {
	Table [][]int32
	Keys  int
}

// CheckPages validates c.Pages; c without pages is valid. KLen must have a length for each batch.
func (c *Call) CheckPages() error {
	p := c.Pages
	if p == nil {
		return nil
	}
	klen, batch, pages, size := c.Visible.KLen, c.Q.Shape()[Batch], c.K.Shape()[Batch], c.K.Shape()[Seq]
	if p.Keys < 0 {
		return fmt.Errorf("pages: there are %d keys, there must be at least 0: %w", p.Keys, ErrShape)
	}
	// More keys than this are in no page. Lists of Keys elements, such as a mask, stay as small as the operands.
	longest := pages
	for _, row := range p.Table {
		longest = max(longest, len(row))
	}
	if p.Keys > longest*size {
		return fmt.Errorf("pages: there are %d keys, the %d pages of the pool or of the longest list have %d: %w", p.Keys, longest, longest*size, ErrShape)
	}
	size = max(size, 1) // without rows there are no keys, and no page is needed
	if len(p.Table) != batch {
		return fmt.Errorf("pages: the table has %d rows, q has %d batches: give one for each: %w", len(p.Table), batch, ErrShape)
	}
	for b, row := range p.Table {
		n := p.count(klen, b)
		if size*len(row) < n {
			return fmt.Errorf("pages: batch %d has %d keys, its %d pages of %d hold %d: %w", b, n, len(row), size, size*len(row), ErrShape)
		}
		for i, page := range row[:(n+size-1)/size] {
			if page < 0 || int(page) >= pages {
				return fmt.Errorf("pages: table[%d][%d] is %d, the pool has pages 0 to %d: %w", b, i, page, pages-1, ErrOption)
			}
		}
	}
	return nil
}

// count returns the number of keys of batch b.
func (p *Pages) count(klen []int, b int) int {
	if klen != nil {
		return min(klen[b], p.Keys)
	}
	return p.Keys
}

// bytes returns the bytes of the keys and values of all batches; shared pages count once.
func (p *Pages) bytes(c *Call) int64 {
	k, v := c.K.Shape(), c.V.Shape()
	seen := map[int32]int{} // rows of a page
	for b, row := range p.Table {
		n := p.count(c.Visible.KLen, b)
		for i := 0; i*k[Seq] < n && i < len(row); i++ {
			seen[row[i]] = max(seen[row[i]], min(k[Seq], n-i*k[Seq]))
		}
	}
	rows := 0
	for _, n := range seen {
		rows += n
	}
	return c.K.dtype.Bytes(Shape{1, k[Heads], rows, k[Dim]}) + c.V.dtype.Bytes(Shape{1, v[Heads], rows, v[Dim]})
}
