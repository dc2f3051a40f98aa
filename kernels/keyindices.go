package kernels

import (
	"cmp"
	"context"
	"fmt"
	"math/bits"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// KeyIndices choose the keys of each query row, or of each block of rows, as the indexer of a sparse attention does
// (DeepSeek-AI 2025, DeepSeek-V3.2: DSA; Yuan et al. 2025: NSA; Tang et al. 2024: Quest): a row sees the keys of its list
// alone, and of these only what the other options show.
//
//	Indices [B, Hkv or 1, ⌈Sq/Rows⌉, TopK]    keys, in host memory
//	Tensor  [B, Hkv or 1, Sq, TopK] I32       keys, in place of Indices, in device memory, as [Device.Index] returns them
//
// A list ends at its first -1, or after TopK keys. Its order does not matter: sums follow the order of the keys. No key
// may be listed twice. The result is that of a call with the listed keys alone, gathered, in which they keep their
// positions. A call with lists costs what its listed keys cost; each list is a pass of its own, and so is each row of
// a block that Causal or a Window shows other listed keys than its neighbours. With H = Hkv and Rows 1, the Keys of a [Top] are Indices.
//
// Other lengths are ErrShape; keys that do not exist and keys that are listed twice are ErrOption.
//
// The keys of a Tensor are read when the call runs: a prepared call can run again with other keys. They are not checked.
// A number that is no key that the row sees, such as -1, is skipped wherever it is, and a key that is listed twice may count
// once or twice. One backend call has all rows of a batch, or all batches of one row. Plans take all lists for full. With
// a Tensor, Prefix, Spans, segments, masks, biases other than ALiBi, dropout, a ScoreMod, gradients and Resume are
// refused (ErrUnsupported). Sums on a GPU follow the order of the list. A call there that reads K or V from host memory, or binds
// too few buffers, downloads the lists and therefore waits for the device: its plan says so. It sorts them, and counts no key twice.
type KeyIndices struct {
	Indices []int32
	TopK    int // keys of a list
	Rows    int // query rows that share a list; 0 means 1
	// Tensor, unless it is the zero Tensor, has the keys. Indices are nil then, TopK is 0 or that of Tensor, and Rows 0 or 1.
	Tensor Tensor
}

// Index computes the lists of a sparse attention with the lightning indexer of DeepSeek V3.2 (DeepSeek-AI 2025): for each
// query row, the n keys with the largest index scores among those that the row sees:
//
//	I[t,s] = Σ_h w[t,h]·max(0, q[t,h]·k[s])
//
//	q [B, Hi, Sq, Di]    k [B, 1, Sk, Di]    w [B, 1, Sq, Hi]    Tensor [B, 1, Sq, min(n, Sk)]
//
// All are F32, F16 or BF16, each independently, and strides are arbitrary. Weights may have any sign. Sums are in float32.
// Causal, Window, Align, Offset and KLen of opt hide keys as in attention; other options are refused.
//
// The lists are in a Tensor in device memory, for the caller to Release; [Device.ToInt32] returns them as Indices. A list
// has its keys in ascending order, -1 after the last one, and a row that sees n keys or fewer has all of them. Of equal scores the lower key
// is chosen, and NaN counts as -Inf. Backends round sums differently, and may choose different keys where scores are nearly
// equal. Scores of Sk keys are never stored for all rows.
//
// Errors: ErrShape and ErrDType name the operand, ErrOption an option or an n less than 1, ErrUnsupported an option that
// index scores do not have, more than 192,000 keys on a GPU or a device without index scores, and the backend's.
func (d *Device) Index(ctx context.Context, q, k, w Tensor, n int, opt Options) (lists *KeyIndices, err error) {
	defer op.Annotate(&err, "index")
	b, err := need[backend.Indexer](ctx, d, "index scores")
	dims, bad := scoreDims(q, k)
	switch err := cmp.Or(op.CheckPath(opt.Set(), op.IndexPath), err, bad); {
	case err != nil:
		return nil, err
	case n < 1:
		return nil, fmt.Errorf("n is %d, it must be at least 1: %w", n, ErrOption)
	case dims.Heads < 1 || dims.KVHeads != 1:
		return nil, fmt.Errorf("q has %d heads and k %d, they must have at least 1 and 1: %w", dims.Heads, dims.KVHeads, ErrShape)
	}
	x := backend.Index{Q: q, K: k, W: w, TopK: min(n, dims.SeqK)}
	x.Visible, bad = opt.visibility(dims)
	if err := cmp.Or(w.CheckShape("w", Shape{dims.Batch, 1, dims.SeqQ, dims.Heads}, "[B, 1, Sq, Hi] of q", floats...),
		opt.checkLengths(dims.Batch, dims.Heads, "batches"), bad); err != nil {
		return nil, err
	}
	lists = &KeyIndices{TopK: x.TopK}
	if shape := (Shape{dims.Batch, 1, dims.SeqQ, x.TopK}); shape.Elements() == 0 {
		lists.Tensor, err = d.Alloc(ctx, I32, shape)
	} else {
		lists.Tensor, err = b.Index(ctx, &x)
	}
	if err != nil {
		return nil, err
	}
	return lists, nil
}

// onDevice reports whether o has lists in a tensor.
func (o *Options) onDevice() bool { return o.KeyIndices != nil && !o.KeyIndices.Tensor.IsZero() }

// addLists appends the subcalls of p, the whole call, whose lists are in a tensor: one for each batch, in which its rows are
// batches of one row, or one for all batches of one row; and as many for each head of the lists.
func (c *Call) addLists(p *region.Problem) error {
	x, d := c.opt.KeyIndices, c.dims
	lists := x.Tensor
	heads, top := lists.Shape()[Heads], lists.Shape()[Dim]
	if heads != 1 {
		heads = d.KVHeads
	}
	switch err := lists.CheckShape("key indices", Shape{d.Batch, heads, d.SeqQ, top}, "[B, Hkv or 1, Sq, TopK] of q and k", I32); {
	case err != nil:
		return err
	case x.Indices != nil || x.Rows < 0 || x.Rows > 1 || x.TopK != 0 && x.TopK != top:
		return fmt.Errorf("key indices: next to a Tensor of %d keys a row, there are %d Indices, TopK is %d and Rows %d: leave them 0: %w", top, len(x.Indices), x.TopK, x.Rows, ErrOption)
	case top == 0: // no row sees a key
		p.Visible.KLen = make([]int, d.Batch)
		return c.add(p, c.pages, 0, 0, 0)
	}
	batches := d.Batch // of a subcall
	if d.SeqQ > 1 {
		batches = 1
	}
	for b := 0; b < d.Batch; b += batches {
		for h := range heads {
			part, share := region.WholeRegion(d), d.Heads/heads
			part.Lo[Batch], part.Hi[Batch] = b, b+batches
			part.Lo[Heads], part.Hi[Heads] = h*share, (h+1)*share
			p.Regions = []region.Region{part}
			if err := c.add(p, c.pages, 0, 0, 0); err != nil || len(c.subs) == 0 { // no scores
				return err
			}
			s := &c.subs[len(c.subs)-1]
			s.Lists = region.Slice(region.Slice(lists, Batch, b, b+batches), Heads, h, h+1)
			if d.SeqQ > 1 {
				s.makeByRow(d.SeqQ)
				s.bind(c)
			}
		}
	}
	return nil
}

// makeByRow makes each row of s, which has one batch, a batch of its own.
func (s *subcall) makeByRow(rows int) {
	s.byRow, s.whole, s.Lists = true, false, rowsAsBatches(s.Lists)
	v := &s.Visible
	first := v.OffsetOf(0)
	v.Offset, v.Offsets = 0, make([]int, rows)
	for i := range v.Offsets {
		v.Offsets[i] = first + i
	}
	if v.KLen != nil {
		v.KLen = slices.Repeat(v.KLen, rows)
	}
	if s.Pages != nil {
		s.Pages = &backend.Pages{Table: slices.Repeat(s.Pages.Table, rows), Keys: s.Pages.Keys}
	}
}

// rowsAsBatches returns t with rows as batches, and the reverse.
func rowsAsBatches(t Tensor) Tensor {
	t, _ = t.Swap(Batch, Seq) // valid axes
	return t
}

// keyLists checks o.KeyIndices against the lengths d and returns its lists.
func (o *Options) keyLists(d backend.Dims) (l region.KeyLists, err error) {
	x := o.KeyIndices
	if x.TopK < 0 || x.Rows < 0 {
		return l, fmt.Errorf("key indices: TopK is %d and Rows %d, both must be at least 0: %w", x.TopK, x.Rows, ErrOption)
	}
	l.Rows, l.Heads = max(x.Rows, 1), 1
	l.Blocks = region.CeilDiv(d.SeqQ, l.Rows)
	if len(x.Indices) != d.Batch*l.Blocks*x.TopK {
		l.Heads = d.KVHeads
	}
	if want := [4]int{d.Batch, l.Heads, l.Blocks, x.TopK}; len(x.Indices) != Shape(want).Elements() {
		return l, fmt.Errorf("key indices: there are %d, [B, Hkv or 1, ⌈Sq/Rows⌉, TopK] is %v (or 1 head): %w", len(x.Indices), want, ErrShape)
	}
	place := func(n, i int) [4]int { return [4]int{n / l.Blocks / l.Heads, n / l.Blocks % l.Heads, n % l.Blocks, i} }
	const callBytes = 2 << 10 // of the backend call of a list
	lists := d.Batch * l.Heads * l.Blocks
	seen, err := backend.Make[uint64](region.CeilDiv(d.SeqK, 64))
	if err = cmp.Or(err, backend.CheckMemory(callBytes*int64(lists))); err != nil {
		return l, fmt.Errorf("key indices: %d lists over %d keys: %w", lists, d.SeqK, err)
	}
	l.Lists = make([][]int32, lists)
	all := make([]int32, 0, len(x.Indices))
	for n := range l.Lists {
		for i, key := range x.Indices[n*x.TopK:][:x.TopK] {
			if key == -1 {
				break
			}
			if key < 0 || int(key) >= d.SeqK {
				return l, fmt.Errorf("key indices: the one at %v is %d, there are %d keys: it must be 0 to %d, or -1 to end a list: %w", place(n, i), key, d.SeqK, d.SeqK-1, ErrOption)
			}
			if bit := uint64(1) << (key % 64); seen[key/64]&bit == 0 {
				seen[key/64] |= bit
			} else {
				return l, fmt.Errorf("key indices: the one at %v is %d, which the list has already: list each key once: %w", place(n, i), key, ErrOption)
			}
		}
		first := len(all)
		for at, word := range seen {
			for ; word > 0; word &= word - 1 {
				all = append(all, int32(at*64+bits.TrailingZeros64(word)))
			}
		}
		clear(seen)
		l.Lists[n] = all[first:len(all):len(all)]
	}
	return l, nil
}
