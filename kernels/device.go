package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Device computes attention on one device. It is safe for concurrent use. Its
// methods validate their arguments; the [backend.Backend] below computes.
type Device struct{ be backend.Backend }

// Open opens a device by name: "auto" (a hardware GPU, else the CPU), "cpu", "gpu",
// "gpu:1" by number or "gpu:NAME" by a part of its name. The program imports the
// backends that it wants.
//
// Errors: ErrNoBackend for a family that is not imported, ErrNoDevice when the family
// has no such device.
func Open(name string) (*Device, error) {
	be, err := backend.Open(name)
	if err != nil {
		return nil, err
	}
	return NewDevice(be), nil
}

// NewDevice returns a Device on an open backend. Its Close closes the backend.
func NewDevice(be backend.Backend) *Device { return &Device{be} }

// Backend returns the backend, for its optional abilities and measurements.
func (d *Device) Backend() backend.Backend { return d.be }

// Info describes the device.
func (d *Device) Info() backend.Info { return d.be.Info() }

// Close waits for running calls, then frees the device. Later calls return ErrClosed.
func (d *Device) Close() error { return d.be.Close() }

// Alloc returns a contiguous tensor with unspecified contents, for the caller to
// Release. ErrMemory when there is no room.
func (d *Device) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	return d.be.Alloc(ctx, dtype, shape)
}

// Upload returns host, a tensor in host memory, as a tensor in device memory, for the
// caller to Release. A device that computes in host memory returns an alias: host must
// not change until the result is released.
func (d *Device) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
	return d.be.Upload(ctx, host)
}

// Download copies src, in device memory, to host, in host memory, of the same shape
// and dtype.
func (d *Device) Download(ctx context.Context, host, src backend.Tensor) error {
	return d.be.Download(ctx, host, src)
}

// FromFloat32 returns data as a contiguous tensor of dtype F32, F16, BF16 or Q8 in
// device memory, rounded to nearest even, for the caller to Release. A device that
// computes in host memory returns an F32 tensor that is data, not a copy.
//
// Errors: ErrShape when data does not have the elements of shape, ErrDType for another
// dtype.
func (d *Device) FromFloat32(ctx context.Context, dtype backend.DType, data []float32, shape backend.Shape) (backend.Tensor, error) {
	return FromFloat32(ctx, d.be, dtype, data, shape)
}

// Float32s returns the elements of t, of any numeric dtype and any strides, in
// row-major order. ErrDType for a Bool tensor.
func (d *Device) Float32s(ctx context.Context, t backend.Tensor) ([]float32, error) {
	return Float32s(ctx, d.be, t)
}

// Copy writes dst[i] = src[i] for each i in order, rounded to dst's dtype: a copy sees
// the results of those before it. Both are F32, F16, BF16 or Q8, of equal shapes.
//
// Errors: ErrShape, and ErrUnsupported when the device is no [backend.Copier].
func (d *Device) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	c, ok := d.be.(backend.Copier)
	switch {
	case !ok:
		return fmt.Errorf("copy: %s: %w", d.Info().Name, backend.ErrUnsupported)
	case len(dst) != len(src):
		return fmt.Errorf("copy: %d destinations, %d sources: %w", len(dst), len(src), backend.ErrShape)
	}
	for i := range dst {
		if dst[i].Shape() != src[i].Shape() {
			return fmt.Errorf("copy %d: dst has shape %v, src %v: they must be equal: %w", i, dst[i].Shape(), src[i].Shape(), backend.ErrShape)
		}
	}
	return backend.CopyBatch(ctx, c, dst, src)
}

// Project computes a linear layer for each batch and head:
//
//	y = x·w + bias
//	y [B, H, S, N]    x [B, H, S, M]    w [1 or B, 1 or H, M, N]    bias [1, 1, 1, N] or none
//
// All are F32, F16 or BF16, each on its own. Errors: ErrShape and ErrDType name the
// operand, ErrUnsupported when the device is no [backend.Projector].
func (d *Device) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	p, ok := d.be.(backend.Projector)
	if !ok {
		return fmt.Errorf("project: %s: %w", d.Info().Name, backend.ErrUnsupported)
	}
	if err := floats(backend.Operand{Name: "y", Tensor: y}, backend.Operand{Name: "x", Tensor: x}, backend.Operand{Name: "w", Tensor: w}); err != nil {
		return fmt.Errorf("project: %w", err)
	}
	xs, n := x.Shape(), w.Shape()[backend.Dim]
	w, err := w.Broadcast(backend.Shape{xs[backend.Batch], xs[backend.Heads], xs[backend.Dim], n})
	if err != nil {
		return fmt.Errorf("project: w: %w", err)
	}
	if ys := (backend.Shape{xs[backend.Batch], xs[backend.Heads], xs[backend.Seq], n}); y.Shape() != ys {
		return fmt.Errorf("project: y has shape %v, it must be %v, the [B, H, S, N] of x and w: %w", y.Shape(), ys, backend.ErrShape)
	}
	if !bias.IsZero() {
		if err := expect("bias", bias, backend.Shape{1, 1, 1, n}, "[1, 1, 1, N] of w", backend.F32, backend.F16, backend.BF16); err != nil {
			return fmt.Errorf("project: %w", err)
		}
	}
	return p.Project(ctx, y, x, w, bias)
}

// QK is the first of the three stages, see the function of that name.
func (d *Device) QK(ctx context.Context, q, k backend.Tensor) (backend.Tensor, error) {
	return QK(ctx, d.be, q, k)
}

// Softmax is the second of the three stages.
func (d *Device) Softmax(ctx context.Context, s, lse backend.Tensor, opt Options) error {
	return Softmax(ctx, d.be, s, lse, opt)
}

// PV is the third of the three stages.
func (d *Device) PV(ctx context.Context, w, v backend.Tensor) (backend.Tensor, error) {
	return PV(ctx, d.be, w, v)
}

// Scores computes scores as they are at a point before the softmax.
func (d *Device) Scores(ctx context.Context, q, k backend.Tensor, at backend.ScorePoint, opt Options) (backend.Tensor, error) {
	return Scores(ctx, d.be, q, k, at, opt)
}

// TopWeights computes the n largest weights of each row.
func (d *Device) TopWeights(ctx context.Context, q, k backend.Tensor, n int, opt Options) (Top, error) {
	return TopWeights(ctx, d.be, q, k, n, opt)
}

// Merge combines results over two disjoint sets of keys, in place of r.
func (d *Device) Merge(ctx context.Context, r, part Result) error { return Merge(ctx, d.be, r, part) }

// Attention computes attention and allocates the result, for the caller to Release.
func (d *Device) Attention(ctx context.Context, q, k, v backend.Tensor, opt Options) (Result, error) {
	if opt.CuQ != nil || opt.CuK != nil {
		return AttentionVarlen(ctx, d.be, q, k, v, opt.CuQ, opt.CuK, opt)
	}
	return Attention(ctx, d.be, q, k, v, opt)
}

// AttentionFloat32 computes attention of slices in host memory.
func (d *Device) AttentionFloat32(ctx context.Context, dims Dims, q, k, v []float32, opt Options) ([]float32, error) {
	return AttentionFloat32(ctx, d.be, dims, q, k, v, opt)
}
