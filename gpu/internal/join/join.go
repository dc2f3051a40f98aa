// Package join makes one call of several that differ in their rows and keys alone: the sequences of a packed batch, or the segments
// of a batch. A batch of the call is one of them.
package join

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"unsafe"

	"github.com/seed90331342/attn/backend"
)

// Unit is a call, or several that run as one.
type Unit struct {
	Calls []*backend.Call
	Call  *backend.Call // with a batch for each of Calls
	// Packed, unless nil, has the places of the batches of Call, whose operands are then only of the right shapes.
	Packed *Packed
}

// Packed are batches that begin anywhere in the operands of a call, which are parts of Whole, in the order of Tensors.
type Packed struct {
	Whole   [5]backend.Tensor
	Batches []Batch
}

// Batch is what kernels know of a packed batch, see shaders/common/pages.wgsl.
type Batch struct{ Row, Rows, Key, Keys, Offset int32 }

// maxFirst bounds the places of rows and keys.
const maxFirst = 1<<30 - 1

// Alone returns a unit for each call.
func Alone(calls []*backend.Call) (all []Unit) {
	for i, c := range calls {
		all = append(all, Unit{Calls: calls[i : i+1], Call: c})
	}
	return all
}

// shortKeys is the most keys with which few rows run like prompts: as many as a split of decoding has.
const shortKeys = 256

// Units divides calls into those that run as one. decodes reports whether the few rows of a call are decoded, which takes batches with
// the same number of rows at equal distances. Others run with the prompts if they have few keys, and keeps
// reports that this changes no bit.
func Units(calls []*backend.Call, decodes, keeps func(c *backend.Call) bool) (all []Unit) {
	var groups [][]*backend.Call
	of := map[kind]int{}
	for i, c := range calls {
		k, ok := kindOf(c)
		if !ok {
			all = append(all, Alone(calls[i:i+1])...)
			continue
		}
		if _, ok := of[k]; !ok {
			of[k], groups = len(groups), append(groups, nil)
		}
		groups[of[k]] = append(groups[of[k]], c)
	}
	for _, g := range groups {
		kept := sync.OnceValue(func() bool { return keeps(g[0]) })
		long := func(c *backend.Call) bool { return c.Dims().SeqK > shortKeys || !kept() }
		var prompts []*backend.Call
		few := map[int][]*backend.Call{} // by their rows
		for _, c := range g {
			if n := c.Dims().SeqQ; decodes(c) {
				few[n] = append(few[n], c)
			} else {
				prompts = append(prompts, c)
			}
		}
		for _, n := range slices.Sorted(maps.Keys(few)) {
			if len(prompts) == 0 || slices.ContainsFunc(few[n], long) {
				if x, ok := join(few[n], true); ok {
					all = append(all, x)
					continue
				}
			}
			for i, c := range few[n] {
				if long(c) {
					all = append(all, Alone(few[n][i:i+1])...)
				} else {
					prompts = append(prompts, c)
				}
			}
		}
		for _, some := range similar(prompts) {
			if x, ok := join(some, false); ok {
				all = append(all, x)
			} else {
				all = append(all, Alone(some)...)
			}
		}
	}
	return all
}

// similar sorts calls by their rows and divides them. Each has as many workgroups as the longest in its part: at most three of
// four are empty.
func similar(calls []*backend.Call) (all [][]*backend.Call) {
	blocks := func(n int) int { return (calls[n].Dims().SeqQ + 31) / 32 } // of the fewest rows of a workgroup
	slices.SortStableFunc(calls, func(x, y *backend.Call) int { return y.Dims().SeqQ - x.Dims().SeqQ })
	for len(calls) > 0 {
		n, sum := 1, blocks(0)
		for ; n < len(calls) && (n+1)*blocks(0) <= 4*(sum+blocks(n)); n++ {
			sum += blocks(n)
		}
		all, calls = append(all, calls[:n]), calls[n:]
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
	low            bool
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
func kindOf(c *backend.Call) (k kind, ok bool) {
	k = kind{
		dims: c.Dims(), scale: c.Scale, softcap: c.Softcap, left: c.Visible.Left, right: c.Visible.Right,
		low: c.LowPrecision, slopes: unsafe.SliceData(c.Slopes), sinks: unsafe.SliceData(c.Sinks),
	}
	k.dims.SeqQ, k.dims.SeqK = 0, 0
	for n, t := range Tensors(c) {
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

// Tensors returns q, o and lse, and then k and v, of c.
func Tensors(c *backend.Call) [5]*backend.Tensor {
	return [5]*backend.Tensor{&c.Q, &c.O, &c.LSE, &c.K, &c.V}
}

// join returns calls of one kind, which it sorts, as one: as batches at equal distances, or else as packed ones, which are not decoded.
func join(calls []*backend.Call, decodes bool) (x Unit, ok bool) {
	if len(calls) < 2 {
		return x, false
	}
	slices.SortStableFunc(calls, func(x, y *backend.Call) int { return x.Q.Offset() - y.Q.Offset() })
	c := *calls[0]
	p := &Packed{Batches: make([]Batch, len(calls))}
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
		for n, t := range Tensors(one) {
			from, step := t.Offset()-Tensors(calls[0])[n].Offset(), t.Strides()[backend.Seq]
			if first[n] = 0; t.IsZero() || from == 0 {
				continue
			}
			if first[n] = from / max(step, 1); first[n]*step != from || from < 0 || first[n] > maxFirst {
				return x, false
			}
		}
		if first[1] != first[0] || first[2] != first[0] && !c.LSE.IsZero() || first[4] != first[3] {
			return x, false
		}
		p.Batches[i] = Batch{int32(first[0]), int32(d.SeqQ), int32(first[3]), int32(v.KLen[i]), int32(v.Offsets[i])}
	}
	if even := c; p.place(&even, true) {
		return Unit{Calls: calls, Call: &even}, true
	}
	return Unit{calls, &c, p}, !decodes && p.place(&c, false)
}

// place replaces the operands of c, those of the first batch, by views of all: at the same distance from each other if even, and
// else only of the right lengths, with p.Whole. It reports false where there are no such views.
func (p *Packed) place(c *backend.Call, even bool) bool {
	var long, end, step [2]int // rows and keys: of the longest batch, of all, and from one batch to the next
	for _, x := range p.Batches {
		long[0], long[1] = max(long[0], int(x.Rows)), max(long[1], int(x.Keys), 1)
		end[0], end[1] = max(end[0], int(x.Row+x.Rows)), max(end[1], int(x.Key)+max(int(x.Keys), 1))
	}
	if even {
		step = [2]int{int(p.Batches[1].Row), int(p.Batches[1].Key)}
		for i, x := range p.Batches {
			if int(x.Rows) != long[0] || int(x.Row) != i*step[0] || int(x.Key) != i*step[1] {
				return false
			}
		}
	} else if min(long[0], long[1]) == 1 { // then strides do not show whether rows are aligned
		return false
	}
	for n, t := range Tensors(c) {
		p.Whole[n] = *t
		if t.IsZero() || n > 2 && c.Pages != nil {
			continue
		}
		var errs [2]error
		shape, strides := t.Shape(), t.Strides()
		shape[backend.Seq] = end[n/3]
		p.Whole[n], errs[0] = t.View(shape, strides, 0)
		shape[backend.Batch], shape[backend.Seq], strides[backend.Batch] = len(p.Batches), long[n/3], step[n/3]*strides[backend.Seq]
		if *t, errs[1] = t.View(shape, strides, 0); cmp.Or(errs[:]...) != nil {
			return false
		}
	}
	return true
}
