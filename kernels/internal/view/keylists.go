package view

import (
	"cmp"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// KeyLists are the valid lists of a call. Each is in ascending order.
type KeyLists struct {
	Lists        [][]int32 // [B, heads, blocks]
	Heads        int       // Hkv or 1
	Blocks, Rows int       // blocks of query rows, rows of each
}

// each calls f with each part of region x of p whose rows see the same listed keys, its problem, and these keys of
// each batch, counted from the first key of x.
func (l *KeyLists) each(p *Problem, x Region, f func(x Region, own backend.Problem, listed [][]int32) error) error {
	parts, share := []Region{x}, p.Dims.Heads/p.Dims.KVHeads
	if l.Heads > 1 {
		parts = nil
		for n := range x.Len(backend.Batch) * l.Heads {
			y := x
			y.Lo[backend.Batch] += n / l.Heads
			y.Hi[backend.Batch] = y.Lo[backend.Batch] + 1
			y.Lo[backend.Heads], y.Hi[backend.Heads] = n%l.Heads*share, (n%l.Heads+1)*share
			parts = append(parts, y)
		}
	}
	for _, y := range parts {
		visible := y.visible(p.Visible)
		same := visible.Left == backend.Unbounded && visible.Right == backend.Unbounded // rows of a block see the same
		seen := func(i int) [][]int32 {
			lists := make([][]int32, y.Len(backend.Batch))
			for b := range lists {
				list := l.Lists[((y.Lo[backend.Batch]+b)*l.Heads+y.Lo[backend.Heads]/share)*l.Blocks+i/l.Rows]
				lo, hi := visible.Range(b, i-y.Lo[backend.Seq], y.Len(backend.Dim))
				from, _ := slices.BinarySearchFunc(list, y.Lo[backend.Dim]+lo, compareKey)
				to, _ := slices.BinarySearchFunc(list, y.Lo[backend.Dim]+hi, compareKey)
				lists[b] = list[from:max(from, to)]
			}
			return lists
		}
		for i := y.Lo[backend.Seq]; i < y.Hi[backend.Seq]; {
			z, lists, end := y, seen(i), min((i/l.Rows+1)*l.Rows, y.Hi[backend.Seq])
			z.Lo[backend.Seq] = i
			for i++; i < end && (same || slices.EqualFunc(lists, seen(i), equalSpans)); i++ {
			}
			z.Hi[backend.Seq] = i
			for b := range lists {
				if first := int32(y.Lo[backend.Dim]); first > 0 {
					lists[b] = slices.Clone(lists[b])
					for n := range lists[b] {
						lists[b][n] -= first
					}
				}
			}
			for _, part := range z.AppendTo(nil, p) {
				own := p.Cut(part)
				own.Visible.Left, own.Visible.Right, own.Visible.KLen = backend.Unbounded, backend.Unbounded, make([]int, len(lists))
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
