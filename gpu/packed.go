package gpu

import (
	"cmp"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
)

// unit is a call, or several that run as one.
type unit struct {
	calls []*backend.Call
	c     *backend.Call // with a batch for each of calls
	path  path          // of c, if its batches are packed
}

// units divides calls into those that run as one: the sequences of a packed batch, or the segments of a batch. Each has the bits of
// a call alone.
func (b *Backend) units(calls []*backend.Call) (all []unit) {
	if len(calls) == 1 {
		return []unit{{calls: calls, c: calls[0]}}
	}
	var groups [][]*backend.Call
	of := map[kind]int{}
	for i, c := range calls {
		k, ok := b.kindOf(c)
		if !ok {
			all = append(all, unit{calls: calls[i : i+1], c: c})
			continue
		}
		if _, ok := of[k]; !ok {
			of[k], groups = len(groups), append(groups, nil)
		}
		groups[of[k]] = append(groups[of[k]], c)
	}
	for _, g := range groups {
		if len(g) > 1 {
			if x, ok := b.joined(g); ok {
				all = append(all, x)
				continue
			}
		}
		for i, c := range g {
			all = append(all, unit{calls: g[i : i+1], c: c})
		}
	}
	return all
}

// kind is what calls that run as one have in common: all but the places and numbers of their rows and keys.
type kind struct {
	operands       [5]place
	pools          [2]backend.Tensor // of pages
	dims           backend.Dims
	scale, softcap float32
	left, right    int
	low, decodes   bool
	slopes, sinks  *float32
}

// place is where and how a tensor is stored.
type place struct {
	memory  *backend.Memory
	dtype   backend.DType
	strides backend.Strides
}

// kindOf returns the kind of c. It reports false for a call that runs alone, because it has several batches, operands for each pair
// or lists, or because an option depends on its number among the calls.
func (b *Backend) kindOf(c *backend.Call) (k kind, ok bool) {
	k = kind{
		dims: c.Dims(), scale: c.Scale, softcap: c.Softcap, left: c.Visible.Left, right: c.Visible.Right,
		low: c.LowPrecision, decodes: b.decodes(c), slopes: unsafe.SliceData(c.Slopes), sinks: unsafe.SliceData(c.Sinks),
	}
	if k.dims.SeqK = 0; !k.decodes { // decoding takes equal numbers of rows
		k.dims.SeqQ = 0
	}
	for n, t := range tensorsOf(c) {
		k.operands[n] = place{t.Memory(), t.DType(), t.Strides()}
	}
	if c.Pages != nil {
		k.pools = [2]backend.Tensor{c.K, c.V}
	}
	ok = k.dims.Batch == 1 && c.ScoreMod == nil && c.Dropout.P == 0 && c.Listed == nil && c.Lists.IsZero()
	for _, o := range c.Problem.Operands() {
		ok = ok && o.Tensor.IsZero()
	}
	return k, ok
}

// tensorsOf returns q, o and lse, and then k and v, of c.
func tensorsOf(c *backend.Call) [5]*backend.Tensor {
	return [5]*backend.Tensor{&c.Q, &c.O, &c.LSE, &c.K, &c.V}
}

// packed are batches that begin anywhere in the operands of a call, which are parts of whole, in the order of tensorsOf.
type packed struct {
	whole   [5]backend.Tensor
	batches []packedBatch
}

// packedBatch is what kernels know of a packed batch, see shaders/common/pages.wgsl.
type packedBatch struct{ Row, Rows, Key, Keys, Offset int32 }

// joined returns calls of one kind as one: as batches at equal distances, or else as packed ones.
func (b *Backend) joined(calls []*backend.Call) (x unit, ok bool) {
	c := *calls[0]
	p := &packed{batches: make([]packedBatch, len(calls))}
	v := &c.Visible
	v.Offset, v.Offsets, v.KLen = 0, make([]int, len(calls)), make([]int, len(calls))
	if c.Pages != nil {
		c.Pages = &backend.Pages{Table: make([][]int32, len(calls))}
	}
	for i, one := range calls {
		d := one.Dims()
		v.Offsets[i], v.KLen[i] = one.Visible.OffsetOf(0), d.SeqK
		if one.Visible.KLen != nil {
			v.KLen[i] = one.Visible.KLen[0]
		}
		if c.Pages != nil {
			c.Pages.Table[i], c.Pages.Keys = one.Pages.Table[0], max(c.Pages.Keys, d.SeqK)
		}
		var first [5]int // rows before, or keys
		for n, t := range tensorsOf(one) {
			from, step := t.Offset()-tensorsOf(calls[0])[n].Offset(), t.Strides()[backend.Seq]
			if first[n] = 0; t.IsZero() || from == 0 {
				continue
			}
			if first[n] = from / max(step, 1); first[n]*step != from || from < 0 || first[n] > maxLength {
				return x, false
			}
		}
		if first[1] != first[0] || first[2] != first[0] && !c.LSE.IsZero() || first[4] != first[3] {
			return x, false
		}
		p.batches[i] = packedBatch{int32(first[0]), int32(d.SeqQ), int32(first[3]), int32(v.KLen[i]), int32(v.Offsets[i])}
	}
	if even := c; p.place(&even, true) {
		return unit{calls: calls, c: &even}, true
	}
	if b.decodes(&c) || !p.place(&c, false) {
		return x, false
	}
	x = unit{calls: calls, c: &c, path: b.packed(&c, p, calls[0])}
	return x, x.path != nil
}

// place replaces the operands of c, those of the first batch, by views of all: at the same distance from each other if even, and
// else only of the right lengths, with p.whole. It reports false where there are no such views.
func (p *packed) place(c *backend.Call, even bool) bool {
	var long, end, step [2]int // rows and keys: of the longest batch, of all, and from one batch to the next
	for _, x := range p.batches {
		long[0], long[1] = max(long[0], int(x.Rows)), max(long[1], int(x.Keys), 1)
		end[0], end[1] = max(end[0], int(x.Row+x.Rows)), max(end[1], int(x.Key)+max(int(x.Keys), 1))
	}
	if even {
		step = [2]int{int(p.batches[1].Row), int(p.batches[1].Key)}
		for i, x := range p.batches {
			if int(x.Rows) != long[0] || int(x.Row) != i*step[0] || int(x.Key) != i*step[1] {
				return false
			}
		}
	} else if min(long[0], long[1]) == 1 { // then strides do not show whether rows are aligned
		return false
	}
	for n, t := range tensorsOf(c) {
		p.whole[n] = *t
		if t.IsZero() || n > 2 && c.Pages != nil {
			continue
		}
		var errs [2]error
		shape, strides := t.Shape(), t.Strides()
		shape[backend.Seq] = end[n/3]
		p.whole[n], errs[0] = t.View(shape, strides, 0)
		shape[backend.Batch], shape[backend.Seq], strides[backend.Batch] = len(p.batches), long[n/3], step[n/3]*strides[backend.Seq]
		if *t, errs[1] = t.View(shape, strides, 0); cmp.Or(errs[:]...) != nil {
			return false
		}
	}
	return true
}

// packed returns the path of c with packed batches, or nil if they do not fit it or if alone, one of them, takes another one: then
// its bits might change.
func (b *Backend) packed(c *backend.Call, p *packed, alone *backend.Call) path {
	of, err := b.path(alone)
	one, ok := of.(*prefill)
	if err != nil || !ok || !one.tiled && one.matrices == "" {
		return nil
	}
	x, err := b.prefillOf(c, p)
	if err != nil || x.tiled != one.tiled || x.matrices != one.matrices || x.HasTable() != (c.Pages != nil) {
		return nil
	}
	for _, o := range x.cutter.Operands { // views of whole must be windows
		if _, staged := o.View(x.all(), x.cutter.Align).Buf.(*cut.Staged); staged || o.OnHost || o.Gathered {
			return nil
		}
	}
	return x
}

// pack makes the batches of a packed ones. Kernels find their rows, keys and offsets in the table.
func (a *attention) pack(p *packed) (err error) {
	a.packed = p
	for n, o := range [5]*cut.Operand{a.Q, a.O, a.LSE, a.K, a.V} {
		if n < 3 || a.Pages == nil {
			o.T, err = cut.Words(p.whole[n])
			o.Axes = [4]int{cut.Whole, cut.Head, cut.Whole, cut.Whole}
		}
		if err != nil {
			return err
		}
	}
	problem := a.c.Problem
	problem.Visible.KLen, problem.Visible.Offsets = nil, nil
	a.scoreOptions = newScoreOptions(&problem, a.d.Heads, &a.Pairs)
	return nil
}
