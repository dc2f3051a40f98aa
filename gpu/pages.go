package gpu

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/bits"

	"github.com/seed90331342/attn/backend"
)

// poolAxes map a pool [P, Hkv, Size, x] of pages: any box may meet any page.
var poolAxes = [4]int{whole, axH, whole, whole}

// pageSlack is how many keys beyond a batch's last a kernel may look up: its tile's.
const pageSlack = 128

// pages is how a call reads keys and values from pools.
type pages struct {
	*backend.Pages
	size  int // keys of a page
	width int // pages of a batch in the table that kernels get
	klen  []int
}

// pagesOf returns the pages of c, nil when it has none.
func pagesOf(c *backend.Call) *pages {
	if c.Pages == nil {
		return nil
	}
	p := &pages{Pages: c.Pages, size: c.K.Shape()[backend.Seq], klen: c.Visible.KLen}
	most := 0
	for b := range p.Table {
		most = max(most, p.count(b))
	}
	p.width = max((min(most+pageSlack, p.Keys)+p.size-1)/p.size, 1)
	return p
}

// count is how many keys batch b has.
func (p *pages) count(b int) int {
	if p.klen != nil {
		return min(p.klen[b], p.Keys)
	}
	return p.Keys
}

// table returns a buffer with the table: width pages of each batch, those beyond its
// keys the pool's first, of which nothing is seen.
func (p *pages) table(r *runner) (window, error) {
	data := make([]byte, 4*len(p.Table)*p.width)
	for b, row := range p.Table {
		n := (p.count(b) + p.size - 1) / p.size
		for i, page := range row[:min(n, len(row))] {
			binary.LittleEndian.PutUint32(data[4*(b*p.width+i):], uint32(page))
		}
	}
	size := uint64(len(data))
	if most := maxWindow(r.b.limits); size > most {
		return window{}, fmt.Errorf("the table of %d batches of %d pages takes %d bytes, %d can be bound: larger pages make it smaller: %w",
			len(p.Table), p.width, size, most, backend.ErrUnsupported)
	}
	buf, err := r.temp(size)
	if err != nil || buf == nil {
		return window{nil, 0, size}, err
	}
	return window{buf, 0, size}, translate(r.b.info.Name, r.b.dev.Write(buf, 0, data))
}

// tableFor returns the window of the table of the call's pages; none when it has none.
func (a *attention) tableFor(r *runner) ([]window, error) {
	if a.pages == nil {
		return nil, nil
	}
	w, err := a.pages.table(r)
	return []window{w}, err
}

// params appends what kernels are told of the pages of a box's batches; zeros when
// there are none.
func (p *pages) params(w *params, x box) {
	if p == nil {
		w.u32(0, 0, 0, 0)
		return
	}
	shift := 32
	if p.size&(p.size-1) == 0 {
		shift = bits.TrailingZeros(uint(p.size))
	}
	w.u32(p.size, p.width, x.lo[axB]*p.width, shift)
}

// kernel returns v as it reads what a call has, pools of pages or not.
func (p *pages) kernel(v variant) variant {
	if p == nil {
		return v
	}
	v.kernel.Bindings += "r"
	v.consts = maps.Clone(v.consts)
	v.consts["PAGED"] = 1
	return v
}
