package cpu

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/peak"
)

var _ backend.BandwidthMeter = (*Backend)(nil)

// PeakFLOPS implements backend.PeakMeter: the best of five measurements of 8
// milliseconds each, in the instructions of the backend's tier; those of the
// gonum path are the widest that the machine has, as another BLAS may use them.
// Where there are no vectors a plain Go loop gives a lower bound. It counts one
// call as running, so Close waits for it.
func (be *Backend) PeakFLOPS(ctx context.Context) (float64, error) {
	if err := be.gate.enter(ctx, "peak"); err != nil {
		return 0, err
	}
	defer be.gate.leave()
	flops, err := peak.FLOPS(ctx, be.peakTier(), be.threads())
	if err != nil {
		return 0, fmt.Errorf("cpu: peak: %w", err)
	}
	return flops, nil
}

// ReadBandwidth implements backend.BandwidthMeter: the best of three measurements
// of 8 milliseconds each, in which every thread reads its own part of the
// operands, with the loads of the backend's tier as for PeakFLOPS.
func (be *Backend) ReadBandwidth(ctx context.Context, operands ...backend.Tensor) (float64, error) {
	if err := be.gate.enter(ctx, "bandwidth"); err != nil {
		return 0, err
	}
	defer be.gate.leave()
	in := make([]backend.Operand, len(operands))
	for i, t := range operands {
		in[i] = backend.Operand{Name: fmt.Sprintf("operand %d", i), Tensor: t}
	}
	var pinned backend.Pinned
	if err := pinned.Pin(nil, where, nil, in); err != nil {
		return 0, fmt.Errorf("cpu: bandwidth: %w", err)
	}
	defer pinned.Unpin()
	var spans [][]byte
	for _, o := range in {
		v, err := viewOf(o.Name, o.Tensor)
		if err != nil {
			return 0, fmt.Errorf("cpu: bandwidth: %w", err)
		}
		spans = append(spans, v.memory())
	}
	rate, err := peak.Bandwidth(ctx, be.peakTier(), spans, be.threads())
	if err != nil {
		return 0, fmt.Errorf("cpu: bandwidth: %w", err)
	}
	return rate, nil
}

// peakTier names the loops that measure the backend's ceilings; "" is the widest.
func (be *Backend) peakTier() string {
	if be.kernels == nil {
		return ""
	}
	return be.kernels.Tier
}

// memory returns the bytes of v from its first element to its last; nil for no
// tensor.
func (v *view) memory() []byte {
	if v.isZero() {
		return nil
	}
	n := 1
	for i, l := range v.shape {
		if l == 0 {
			return nil
		}
		n += (l - 1) * v.stride[i]
	}
	switch v.dtype {
	case backend.F32:
		return bytesOf(v.f32[:n])
	case backend.Bool:
		return bytesOf(v.bools[:n])
	case backend.Q8:
		return v.q8[:q8Lead+n]
	default:
		return bytesOf(v.bits[:n])
	}
}

// bytesOf returns the memory of s.
func bytesOf[T float32 | uint16 | bool](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}
