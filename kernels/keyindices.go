package kernels

import (
	"cmp"
	"fmt"
	"math/bits"

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

// keyLists checks o.KeyIndices against the lengths d and returns its lists.
func (o *Options) keyLists(d Dims) (l view.KeyLists, err error) {
	x := o.KeyIndices
	if x.TopK < 0 || x.Rows < 0 {
		return l, fmt.Errorf("key indices: TopK is %d and Rows %d, both must be at least 0: %w", x.TopK, x.Rows, ErrOption)
	}
	l.Rows, l.Heads = max(x.Rows, 1), 1
	l.Blocks = view.CeilDiv(d.SeqQ, l.Rows)
	if len(x.Indices) != d.Batch*l.Blocks*x.TopK {
		l.Heads = d.KVHeads
	}
	if want := [4]int{d.Batch, l.Heads, l.Blocks, x.TopK}; len(x.Indices) != Shape(want).Elements() {
		return l, fmt.Errorf("key indices: there are %d, [B, Hkv or 1, ⌈Sq/Rows⌉, TopK] is %v (or 1 head): %w", len(x.Indices), want, ErrShape)
	}
	place := func(n, i int) [4]int { return [4]int{n / l.Blocks / l.Heads, n / l.Blocks % l.Heads, n % l.Blocks, i} }
	const callBytes = 2 << 10 // of the backend call of a list
	lists := d.Batch * l.Heads * l.Blocks
	seen, err := backend.Make[uint64](view.CeilDiv(d.SeqK, 64))
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
