package kernels

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/view"
)

// KeyIndices choose the keys of each query row, or of each block of rows, as the indexer of a sparse attention does
// (DeepSeek-AI 2025, DeepSeek-V3.2: DSA; Yuan et al. 2025: NSA; Tang et al. 2024: Quest): a row sees the keys of its list
// alone, and of these only what the other options show.
//
//	Indices [B, Hkv or 1, ⌈Sq/Rows⌉, TopK]    keys, in host memory
//
// A list ends at its first -1, or after TopK keys. Its order does not matter: sums follow the order of the keys. No key
// may be listed twice. The result is that of a call with the listed keys alone, gathered, in which they keep their
// positions. A call with lists costs what its listed keys cost; each list is a pass of its own, and so is each row of
// a block that Causal or a Window shows other listed keys than its neighbours. With H = Hkv and Rows 1, the Keys of a [Top] are Indices.
//
// Other lengths are ErrShape; keys that do not exist and keys that are listed twice are ErrOption.
type KeyIndices struct {
	Indices []int32
	TopK    int // keys of a list
	Rows    int // query rows that share a list; 0 means 1
}

// keyLists are the valid lists of a call. Each is in ascending order.
type keyLists struct {
	lists        [][]int32 // [B, heads, blocks]
	heads        int       // Hkv or 1
	blocks, rows int       // blocks of query rows, rows of each
}

// keyLists checks o.KeyIndices against the lengths d and returns its lists.
func (o *Options) keyLists(d Dims) (l keyLists, err error) {
	x := o.KeyIndices
	if x.TopK < 0 || x.Rows < 0 {
		return l, fmt.Errorf("key indices: TopK is %d and Rows %d, both must be at least 0: %w", x.TopK, x.Rows, ErrOption)
	}
	l.rows, l.heads = max(x.Rows, 1), 1
	l.blocks = view.CeilDiv(d.SeqQ, l.rows)
	if len(x.Indices) != d.Batch*l.blocks*x.TopK {
		l.heads = d.KVHeads
	}
	if want := [4]int{d.Batch, l.heads, l.blocks, x.TopK}; len(x.Indices) != Shape(want).Elements() {
		return l, fmt.Errorf("key indices: there are %d, [B, Hkv or 1, ⌈Sq/Rows⌉, TopK] is %v (or 1 head): %w", len(x.Indices), want, ErrShape)
	}
	place := func(n, i int) [4]int { return [4]int{n / l.blocks / l.heads, n / l.blocks % l.heads, n % l.blocks, i} }
	const callBytes = 2 << 10 // of the backend call of a list
	lists := d.Batch * l.heads * l.blocks
	seen, err := backend.Make[uint64](view.CeilDiv(d.SeqK, 64))
	if err = cmp.Or(err, backend.CheckMemory(callBytes*int64(lists))); err != nil {
		return l, fmt.Errorf("key indices: %d lists over %d keys: %w", lists, d.SeqK, err)
	}
	l.lists = make([][]int32, lists)
	all := make([]int32, 0, len(x.Indices))
	for n := range l.lists {
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
		l.lists[n] = all[first:len(all):len(all)]
	}
	return l, nil
}

// each calls f with each part of region x of p whose rows see the same listed keys, its problem, and these keys of
// each batch, counted from the first key of x.
func (l *keyLists) each(p *problem, x region, f func(x region, own backend.Problem, listed [][]int32) error) error {
	parts, share := []region{x}, p.dims.Heads/p.dims.KVHeads
	if l.heads > 1 {
		parts = nil
		for n := range x.Len(Batch) * l.heads {
			y := x
			y.Lo[Batch] += n / l.heads
			y.Hi[Batch] = y.Lo[Batch] + 1
			y.Lo[Heads], y.Hi[Heads] = n%l.heads*share, (n%l.heads+1)*share
			parts = append(parts, y)
		}
	}
	for _, y := range parts {
		visible := y.visible(p.Visible)
		same := visible.Left == Unbounded && visible.Right == Unbounded // rows of a block see the same
		seen := func(i int) [][]int32 {
			lists := make([][]int32, y.Len(Batch))
			for b := range lists {
				list := l.lists[((y.Lo[Batch]+b)*l.heads+y.Lo[Heads]/share)*l.blocks+i/l.rows]
				lo, hi := visible.Range(b, i-y.Lo[Seq], y.Len(Dim))
				from, _ := slices.BinarySearchFunc(list, y.Lo[Dim]+lo, compareKey)
				to, _ := slices.BinarySearchFunc(list, y.Lo[Dim]+hi, compareKey)
				lists[b] = list[from:max(from, to)]
			}
			return lists
		}
		for i := y.Lo[Seq]; i < y.Hi[Seq]; {
			z, lists, end := y, seen(i), min((i/l.rows+1)*l.rows, y.Hi[Seq])
			z.Lo[Seq] = i
			for i++; i < end && (same || slices.EqualFunc(lists, seen(i), equalSpans)); i++ {
			}
			z.Hi[Seq] = i
			for b := range lists {
				if first := int32(y.Lo[Dim]); first > 0 {
					lists[b] = slices.Clone(lists[b])
					for n := range lists[b] {
						lists[b][n] -= first
					}
				}
			}
			for _, part := range z.appendTo(nil, p) {
				own := p.cut(part)
				own.Visible = backend.Visibility{Offset: own.Visible.Offset, Left: Unbounded, Right: Unbounded, KLen: make([]int, len(lists))}
				for b, list := range lists {
					own.Visible.KLen[b] = len(list)
				}
				if err := f(part, own, lists); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func compareKey(key int32, than int) int { return cmp.Compare(int(key), than) }

// equalSpans reports whether two spans of one list are the same.
func equalSpans(a, b []int32) bool {
	return len(a) == len(b) && (len(a) == 0 || a[0] == b[0])
}
