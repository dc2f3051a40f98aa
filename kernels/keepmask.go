package kernels

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// KeepMask returns the weights that dropout keeps in a call of lengths d, as a Bool tensor
// [B, H, Sq, Sk] in host memory: element (b, h, i, j) is drop.Keeps(b, h, i, j). Zero
// lengths are as in [Device.AttentionFloat32]; head sizes do not matter.
//
// Errors: ErrOption as for Options.Dropout, ErrShape for lengths that are negative, missing
// or too large.
func KeepMask(drop backend.Dropout, d Dims) (backend.Tensor, error) {
	d = fillDims(d)
	shape := backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK}
	if err := drop.Check(); err != nil {
		return backend.Tensor{}, fmt.Errorf("keep mask: %w", err)
	}
	if shape.Elements() < 1 {
		return backend.Tensor{}, fmt.Errorf("keep mask: shape %v: every length must be at least 1, and the product must fit: %w", shape, backend.ErrShape)
	}
	keep := make([]bool, shape.Elements())
	least := drop.Threshold()
	key := [2]uint32{uint32(drop.Seed), uint32(drop.Seed >> 32)}
	inParallel(d.Batch*d.Heads, func(n int) {
		b, h := drop.First[backend.Batch]+n/d.Heads, drop.First[backend.Heads]+n%d.Heads
		head := keep[n*d.SeqQ*d.SeqK:]
		for i := 0; i < d.SeqQ; {
			// The generator returns the words of four rows.
			row := drop.First[backend.Seq] + i
			rows := min(4-row%4, d.SeqQ-i)
			for j := range d.SeqK {
				x := backend.Philox([4]uint32{uint32(row) / 4, uint32(drop.First[backend.Dim] + j), uint32(h), uint32(b)}, key)
				for r := range rows {
					head[(i+r)*d.SeqK+j] = x[(row+r)%4] >= least
				}
			}
			i += rows
		}
	})
	return backend.HostBool(keep, shape)
}
