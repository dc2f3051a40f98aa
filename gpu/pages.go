package gpu

import (
	"fmt"
	"maps"
	"math/bits"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

// tableFor returns the window of the table of the call's pages; none when it has none.
func (a *attention) tableFor(r *runner) ([]cut.Window, error) {
	if !a.Looked() {
		return nil, nil
	}
	data := a.Pages.Bytes()
	size := uint64(len(data))
	if most := maxWindow(a.b.limits); size > most {
		return nil, fmt.Errorf("the table of %d batches of %d pages takes %d bytes, %d can be bound: larger pages make it smaller: %w",
			len(a.Pages.Table), a.Pages.Width, size, most, backend.ErrUnsupported)
	}
	buf, err := r.temp(size)
	if err != nil || buf == nil {
		return []cut.Window{{Size: size}}, err
	}
	return []cut.Window{{Buf: buf, Size: size}}, translate(a.b.info.Name, a.b.dev.Write(buf, 0, data))
}

// pageParams sets where the pages of a box's batches are; nothing when kernels look no
// pages up.
func (a *attention) pageParams(w *shaders.AttentionParams, x cut.Box) {
	if !a.Looked() {
		return
	}
	p := a.Pages
	w.Page, w.Pages, w.TableAt, w.PageBits = p.Size, p.Width, x.Lo[cut.Batch]*p.Width, 32
	if p.Size&(p.Size-1) == 0 {
		w.PageBits = bits.TrailingZeros(uint(p.Size))
	}
}

// storage says of the plan how operands are stored and pages found.
func (a *attention) storage() string {
	text := storage(a.c)
	switch {
	case a.Looked():
		text += fmt.Sprintf(" in pages of %d, looked up", a.Pages.Size)
	case a.Pages != nil:
		text += fmt.Sprintf(" in pages of %d, which are collected before each step", a.Pages.Size)
	}
	return text
}

// checkPages returns backend.ErrUnsupported when pages are to be collected that cannot be.
func (a *attention) checkPages() error {
	if err := a.K.Collectable(); err != nil {
		return err
	}
	return a.V.Collectable()
}

// kernel returns v as it reads what the call has: options, pools of pages or not. The call's
// cutter must have been made.
func (a *attention) kernel(v variant) variant {
	v = a.options.kernel(v)
	if !a.Looked() {
		return v
	}
	v.kernel.Bindings += "r"
	v.consts = maps.Clone(v.consts)
	v.consts["PAGED"] = 1
	return v
}
