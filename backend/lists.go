package backend

import (
	"context"
	"fmt"
	"slices"
)

// ListKeys returns a call without Lists in which Listed has the keys that ids, the elements of Lists in row-major order,
// list: of each batch those that exist and that Visible shows to its row, ascending. Other numbers, such as -1, are skipped,
// wherever they are, and a key that is listed twice counts once. It returns ErrMemory when there is not enough memory.
func (c *Call) ListKeys(ids []int32) (*Call, error) {
	own, batch, n := *c, c.Q.Shape()[Batch], c.Lists.Shape()[Dim]
	own.Lists = Tensor{}
	keys := own.Positions()
	all, err := Make[int32](len(ids))
	if err != nil {
		return nil, fmt.Errorf("%d lists of %d keys: %w", batch, n, err)
	}
	own.Listed, own.Visible.KLen = make([][]int32, batch), make([]int, batch)
	own.Visible.Left, own.Visible.Right = Unbounded, Unbounded
	for b := range batch {
		lo, hi := c.Visible.Range(b, 0, keys)
		list := all[b*n : b*n : (b+1)*n]
		for _, key := range ids[b*n:][:n] {
			if int(key) >= lo && int(key) < hi {
				list = append(list, key)
			}
		}
		slices.Sort(list)
		own.Listed[b] = slices.Compact(list)
		own.Visible.KLen[b] = len(own.Listed[b])
	}
	return &own, nil
}

// FillLists returns c with Listed as long as Lists can be, for plans, which know no keys. Lists stay.
func (c *Call) FillLists() (*Call, error) {
	own, all := *c, c.Lists.Shape()
	list, err := Make[int32](all[Dim])
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i] = int32(min(i, c.Positions()-1))
	}
	own.Listed, own.Visible = slices.Repeat([][]int32{list}, all[Batch]), Everything()
	if c.Slopes != nil {
		own.Visible.Offset, own.Visible.Offsets = c.Visible.Offset, c.Visible.Offsets
	}
	return &own, nil
}

// Indexer is implemented by backends that choose keys by index scores.
type Indexer interface {
	// Index returns the keys that c, which package kernels has validated, chooses for each row, for the caller to Release:
	//
	//	keys [B, 1, Sq, TopK] I32, of any strides    in ascending order, -1 after the last one
	//
	// It uses O(Sq·TopK + Sk) memory in addition to the operands.
	Index(ctx context.Context, c *Index) (keys Tensor, err error)
}

// Index is one call of the lightning indexer of a sparse attention, with the formula and the operands of
// kernels.Device.Index: for each query row, the TopK keys with the largest index scores among those that Visible shows to it.
type Index struct {
	Q, K, W Tensor
	TopK    int // 1 to Sk
	Visible Visibility
}

// Operands returns the inputs under the names that errors use.
func (c *Index) Operands() [3]Operand { return [3]Operand{{"q", c.Q}, {"k", c.K}, {"w", c.W}} }
