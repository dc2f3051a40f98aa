package cut

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/modtext"
)

// MaxValueDim is the largest head size of values in one pass: the registers of a workgroup hold a row of the output.
const MaxValueDim = 256

// Pairs are the operands of a problem with an element for each pair of a row and a key.
// Operands that the problem does not have are one Operand with the zero Tensor.
type Pairs struct{ Mask, Blocks, Bias, Relative *Operand }

// PairsOf returns the pair operands of p for scores of a shape [B, H, Sq, Sk].
func PairsOf(p *backend.Problem, shape backend.Shape) (Pairs, error) {
	none := new(Operand)
	if m := p.ScoreMod; m != nil {
		if err := modtext.Check("the score mod's WGSL", m.WGSL); err != nil {
			return Pairs{}, err
		}
	}
	o := Pairs{none, none, none, none}
	b, h, sq, sk := shape[0], shape[1], shape[2], shape[3]
	// A block that is longer than the call contains all of its rows, or keys.
	q, k := max(min(p.BlockQ, sq), 1), max(min(p.BlockK, sk), 1)
	for _, x := range []struct {
		to    **Operand
		name  string
		t     backend.Tensor
		shape backend.Shape
	}{
		{&o.Mask, "mask", p.Mask, shape},
		{&o.Blocks, "blocks", p.Blocks, backend.Shape{b, h, (sq-1)/q + 1, (sk-1)/k + 1}},
		{&o.Bias, "bias", p.Bias, shape},
		{&o.Relative, "relative", p.Relative, backend.Shape{b, h, 1, sq + sk - 1}},
	} {
		if x.t.IsZero() {
			continue
		}
		t, err := x.t.Broadcast(x.shape)
		if err != nil {
			return o, fmt.Errorf("%s: %w", x.name, err)
		}
		*x.to = Reads(x.name, t, PairAxes, 1)
	}
	if !p.Blocks.IsZero() {
		o.Blocks.Block = [2]int{q, k}
	}
	if !p.Relative.IsZero() {
		o.Relative.Axes[backend.Seq], o.Relative.Diagonal = Whole, sq
	}
	return o, nil
}

// List returns all four.
func (o *Pairs) List() []*Operand { return []*Operand{o.Mask, o.Blocks, o.Bias, o.Relative} }

// Call holds the operands of an attention call.
type Call struct {
	Q, K, V, O, LSE *Operand
	Pages           *Pages // nil unless K and V are pools of pages
	Pairs
}

// CallOf returns the operands of c.
func CallOf(c *backend.Call) (*Call, error) {
	d := c.Dims()
	pairs, err := PairsOf(&c.Problem, backend.Shape{d.Batch, d.Heads, d.SeqQ, c.Positions()})
	if err != nil {
		return nil, err
	}
	if c.Listed != nil {
		for _, x := range pairs.List() {
			x.Axes[backend.Dim], x.Listed = Whole, true
		}
	}
	o := &Call{
		Q: Reads("q", c.Q, RowAxes, 1), O: Writes("o", c.O, RowAxes), LSE: Writes("lse", c.LSE, RowAxes),
		Pages: pagesOf(c), Pairs: pairs,
	}
	for _, x := range []struct {
		to   **Operand
		name string
		t    backend.Tensor
	}{{&o.K, "k", c.K}, {&o.V, "v", c.V}} {
		t, err := Words(x.t)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", x.name, err)
		}
		*x.to = Reads(x.name, t, KeyAxes, d.Heads/d.KVHeads)
		if o.Pages != nil {
			(*x.to).Name, (*x.to).Pages = x.name+"'s pool of pages", o.Pages
		}
	}
	return o, nil
}

// List returns the operands in the order in which memory is planned for them.
func (o *Call) List() []*Operand {
	return append(o.Pairs.List(), o.Q, o.K, o.V, o.O, o.LSE)
}

// HasTable reports whether kernels look pages up in a table. Otherwise the pages of a step
// are collected before it: where a pool is in host memory or larger than a binding, or
// where the device has no storage buffer left for the table (see Collect).
func (o *Call) HasTable() bool { return o.Pages != nil && !o.K.Gathered && !o.K.OnHost }

// Collect decides whether pages are collected, after New has placed the operands. bound
// reports whether the table can be bound.
func (o *Call) Collect(bound bool) {
	if o.Pages == nil {
		return
	}
	collect := !bound || o.K.Gathered || o.K.OnHost || o.V.Gathered || o.V.OnHost
	o.K.Gathered, o.V.Gathered = collect && !o.K.OnHost, collect && !o.V.OnHost
}

// Slices divides c along the columns of V and O into calls whose values have at most MaxValueDim columns: c itself if
// it has few enough. Each computes the scores again, so the bits of a row are those of a call with these columns alone.
// The first one also computes LSE.
func Slices(c *backend.Call) ([]*backend.Call, error) {
	dv := c.V.Shape()[backend.Dim]
	if dv <= MaxValueDim {
		return []*backend.Call{c}, nil
	}
	if c.V.DType().Quantised() {
		return nil, fmt.Errorf("v of %v has head size %d, the fused kernel takes up to %d of q8, q4 and f8: store v as f16 or bf16: %w", c.V.DType(), dv, MaxValueDim, backend.ErrUnsupported)
	}
	n := (dv + MaxValueDim - 1) / MaxValueDim
	width := AlignUp((dv+n-1)/n, Tile)
	var calls []*backend.Call
	for lo := 0; lo < dv; lo += width {
		part := *c
		part.Resume = nil
		if lo > 0 {
			part.LSE = backend.Tensor{}
		}
		for _, t := range []*backend.Tensor{&part.V, &part.O} {
			var err error
			if *t, err = t.Slice(backend.Dim, lo, min(lo+width, dv)); err != nil {
				return nil, err
			}
		}
		calls = append(calls, &part)
	}
	return calls, nil
}

// Storage names the types of a call's operands.
func Storage(c *backend.Call) string {
	if c.K.DType() == c.Q.DType() {
		return c.Q.DType().String()
	}
	return fmt.Sprintf("%s, keys and values %s", c.Q.DType(), c.K.DType())
}
