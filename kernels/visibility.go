package kernels

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// visibility returns Causal, Window, Align, Offset, Offsets and KLen as the one rule of
// backend.Visibility, as far as it can express them: regions handles the Offsets that
// offsetsDiffer reports.
func (o *Options) visibility(d Dims) (backend.Visibility, error) {
	vis := backend.Everything()
	if o.Offset < -maxOffset || o.Offset > maxOffset {
		return vis, fmt.Errorf("offset is %d, it must lie within ±%d: %w", o.Offset, maxOffset, backend.ErrOption)
	}
	if w := o.Window; w != nil {
		if w.Left < 0 || w.Right < 0 {
			return vis, fmt.Errorf("window is %d,%d, both sides must be at least 0 (Unbounded for no limit): %w", w.Left, w.Right, backend.ErrOption)
		}
		vis.Left, vis.Right = w.Left, w.Right
	}
	if o.Causal {
		vis.Right = 0
	}
	switch o.Align {
	case UpperLeft:
		vis.Offset = o.Offset
	case LowerRight:
		vis.Offset = o.Offset + d.SeqK - d.SeqQ
	default:
		return vis, fmt.Errorf("align is %d, it must be UpperLeft or LowerRight: %w", o.Align, backend.ErrOption)
	}
	furthest, err := o.checkOffsets(d)
	if err != nil {
		return vis, err
	}
	// A window wider than the distance of any row to any key hides nothing. Unbounded
	// lets backends skip the test.
	reach := d.SeqQ + d.SeqK + max(vis.Offset, -vis.Offset) + furthest
	if vis.Left >= reach {
		vis.Left = backend.Unbounded
	}
	if vis.Right >= reach {
		vis.Right = backend.Unbounded
	}
	if o.KLen != nil {
		if len(o.KLen) != d.Batch {
			return vis, fmt.Errorf("klen has %d lengths, there are %d batches: give one for each: %w", len(o.KLen), d.Batch, backend.ErrShape)
		}
		for b, n := range o.KLen {
			if n < 0 || n > d.SeqK {
				return vis, fmt.Errorf("klen[%d] is %d, there are %d keys: it must be 0 to %d: %w", b, n, d.SeqK, d.SeqK, backend.ErrOption)
			}
		}
		vis.KLen = o.KLen
	}
	o.foldOffsets(&vis, d)
	return vis, nil
}

// checkOffsets checks Offsets and returns the largest magnitude.
func (o *Options) checkOffsets(d Dims) (furthest int, err error) {
	if o.Offsets != nil && len(o.Offsets) != d.Batch {
		return 0, fmt.Errorf("offsets has %d, there are %d batches: give one for each: %w", len(o.Offsets), d.Batch, backend.ErrShape)
	}
	for b, n := range o.Offsets {
		if n < -maxOffset || n > maxOffset {
			return 0, fmt.Errorf("offsets[%d] is %d, it must lie within ±%d: %w", b, n, maxOffset, backend.ErrOption)
		}
		furthest = max(furthest, n, -n)
	}
	return furthest, nil
}

// foldOffsets expresses Offsets by vis, unless batches need calls of their own.
func (o *Options) foldOffsets(vis *backend.Visibility, d Dims) {
	switch {
	case o.Offsets == nil || o.offsetsDiffer(d):
	case o.Prefix == nil && o.onlyLastKey(d):
		if !o.Causal {
			return
		}
		klen := make([]int, d.Batch)
		for b := range klen {
			klen[b] = max(0, min(vis.Offset+o.Offsets[b]+1, d.SeqK))
			if vis.KLen != nil {
				klen[b] = min(klen[b], vis.KLen[b])
			}
		}
		vis.Right, vis.KLen = backend.Unbounded, klen
	default:
		vis.Offset += o.Offsets[0]
	}
}

// onlyLastKey reports whether the position of a batch's rows decides nothing but their last
// visible key, and this is the same for all of them. KLen can express that.
func (o *Options) onlyLastKey(d Dims) bool {
	return (d.SeqQ == 1 || !o.Causal) && o.Window == nil && o.ALiBi == nil
}

// offsetsDiffer reports whether batches with different offsets need calls of their own.
func (o *Options) offsetsDiffer(d Dims) bool {
	if o.Offsets == nil || o.Prefix == nil && o.onlyLastKey(d) {
		return false
	}
	for _, n := range o.Offsets {
		if n != o.Offsets[0] {
			return true
		}
	}
	return false
}
