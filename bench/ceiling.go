package bench

import (
	"github.com/seed90331342/attn/backend"
)

// Bound says which ceiling a call meets first.
type Bound string

// The ceilings.
const (
	// BoundFMA is the rate of fused multiply-adds in registers.
	BoundFMA Bound = "fma"
	// BoundRead is the rate at which the operands can be read.
	BoundRead Bound = "read"
	// BoundLaunch is the time that the device takes for a call that does nothing.
	BoundLaunch Bound = "launch"
)

// bind returns the ceiling that a call of so many operations and bytes meets
// first, from what was measured: operations and bytes a second and the seconds of a
// launch, 0 for what was not. It is "" without the first, and BoundFMA when it alone
// was measured: that a call is bound by something else is never guessed.
func bind(flops, bytes int64, peak, read, launch float64) Bound {
	if peak <= 0 {
		return ""
	}
	bound, seconds := BoundFMA, float64(flops)/peak
	if read > 0 && float64(bytes)/read > seconds {
		bound, seconds = BoundRead, float64(bytes)/read
	}
	if launch > seconds {
		bound = BoundLaunch
	}
	return bound
}

// ceilings measures the ceilings that the backend can measure, once.
func (b *bencher) ceilings() (r round, err error) {
	if meter, ok := b.be.(backend.PeakMeter); ok {
		if r.peak, err = meter.PeakFLOPS(b.work); err != nil {
			return r, err
		}
	}
	if meter, ok := b.be.(backend.BandwidthMeter); ok {
		if r.read, err = meter.ReadBandwidth(b.work, b.read()...); err != nil {
			return r, err
		}
	}
	if meter, ok := b.be.(backend.LaunchMeter); ok {
		launch, err := meter.LaunchTime(b.work)
		if err != nil {
			return r, err
		}
		r.launch = launch.Seconds()
	}
	return r, nil
}

// read returns the operands that a call reads. Where a window hides keys from all
// rows it is as much of the keys and values as they see, from the start instead
// of from each head: the same number of bytes, which decides what cache they fit.
func (b *bencher) read() []backend.Tensor {
	k, v := b.op.k, b.op.v
	d := b.c.Dims
	switch b.c.Variant {
	case QK:
		return []backend.Tensor{b.op.q, k}
	case Softmax:
		return []backend.Tensor{b.op.w, b.op.bias}
	case PV:
		return []backend.Tensor{b.op.w, v}
	case Stages:
		return []backend.Tensor{b.op.q, k, v, b.op.bias, b.op.w}
	}
	if seen := b.c.keys(); seen < d.SeqK {
		rows := d.Batch * d.KVHeads * seen
		part := func(t backend.Tensor, dim int) backend.Tensor {
			shape := backend.Shape{1, 1, rows, dim}
			if view, err := t.View(shape, shape.Contiguous(), t.Offset()); err == nil {
				return view
			}
			return t
		}
		k, v = part(k, d.Dim), part(v, d.ValueDim)
	}
	return []backend.Tensor{b.op.q, k, v, b.op.bias}
}
