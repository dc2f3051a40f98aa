package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Device computes attention on one device. It validates calls; the [backend.Backend] that
// it wraps computes them. A Device is safe for concurrent use.
type Device struct{ be backend.Backend }

// Open opens a device by name: "auto" (a hardware GPU, else the CPU), "cpu", "gpu",
// "gpu:1" by number or "gpu:NAME" by a part of the device's name. The program imports the
// backends that it wants to open.
//
// Errors: ErrNoBackend for a backend that is not imported, ErrNoDevice for a device that
// does not exist.
func Open(name string) (*Device, error) {
	be, err := backend.Open(name)
	if err != nil {
		return nil, err
	}
	return NewDevice(be), nil
}

// NewDevice returns a Device that wraps an open backend. Close closes the backend.
func NewDevice(be backend.Backend) *Device { return &Device{be} }

// Backend returns the backend, for its optional interfaces and for measurements.
func (d *Device) Backend() backend.Backend { return d.be }

// Info describes the device.
func (d *Device) Info() backend.Info { return d.be.Info() }

// Close waits for running calls and frees the device. Later calls return ErrClosed.
func (d *Device) Close() error { return d.be.Close() }

// Alloc returns a contiguous tensor with unspecified contents, for the caller to Release.
// It returns ErrMemory when there is not enough memory.
func (d *Device) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	return d.be.Alloc(ctx, dtype, shape)
}

// Upload returns the elements of host, a tensor in host memory, as a tensor in device
// memory, for the caller to Release. On a device that computes in host memory it is an
// alias: host must not change until it is released.
func (d *Device) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
	return d.be.Upload(ctx, host)
}

// Download copies src, in device memory, to host, in host memory. They must have the same
// shape and dtype.
func (d *Device) Download(ctx context.Context, host, src backend.Tensor) error {
	return d.be.Download(ctx, host, src)
}

// Copy writes dst[i] = src[i] for each i in order, rounded to the dtype of dst[i], so that a
// copy sees the results of the earlier ones. Tensors are F32, F16, BF16 or Q8.
//
// Errors: ErrShape for different shapes or numbers of tensors, ErrUnsupported when the
// backend is no [backend.Copier].
func (d *Device) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	if err := d.copy(ctx, dst, src); err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	return nil
}

func (d *Device) copy(ctx context.Context, dst, src []backend.Tensor) error {
	c, ok := d.be.(backend.Copier)
	if !ok {
		return d.lacks("copies")
	}
	if len(dst) != len(src) {
		return fmt.Errorf("there are %d destinations and %d sources: %w", len(dst), len(src), backend.ErrShape)
	}
	for i := range dst {
		if err := floatsOrQ8(backend.Operand{Name: "dst", Tensor: dst[i]}, backend.Operand{Name: "src", Tensor: src[i]}); err != nil {
			return err
		}
		if dst[i].Shape() != src[i].Shape() {
			return fmt.Errorf("dst has shape %v, src has %v: they must be equal: %w", dst[i].Shape(), src[i].Shape(), backend.ErrShape)
		}
	}
	return c.Copy(ctx, dst, src)
}

// lacks returns ErrUnsupported for an operation that the backend does not implement.
func (d *Device) lacks(operation string) error {
	return fmt.Errorf("%s has no %s: %w", d.Info().Name, operation, backend.ErrUnsupported)
}

// Project computes a linear layer for each batch and head:
//
//	y = x·w + bias
//
//	y [B, H, S, N]    x [B, H, S, M]    w [B or 1, H or 1, M, N]    bias [1, 1, 1, N]
//
// All are F32, F16 or BF16, each independently. The zero Tensor as bias means none. A NaN in
// x or w propagates to y.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the backend is no
// [backend.Projector].
func (d *Device) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	if err := d.project(ctx, y, x, w, bias); err != nil {
		return fmt.Errorf("project: %w", err)
	}
	return nil
}

func (d *Device) project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	p, ok := d.be.(backend.Projector)
	if !ok {
		return d.lacks("projections")
	}
	if err := floats(backend.Operand{Name: "x", Tensor: x}, backend.Operand{Name: "w", Tensor: w}); err != nil {
		return err
	}
	xs, n := x.Shape(), w.Shape()[backend.Dim]
	w, err := w.Broadcast(backend.Shape{xs[backend.Batch], xs[backend.Heads], xs[backend.Dim], n})
	if err != nil {
		return fmt.Errorf("w: %w", err)
	}
	float := []backend.DType{backend.F32, backend.F16, backend.BF16}
	if err := expect("y", y, backend.Shape{xs[backend.Batch], xs[backend.Heads], xs[backend.Seq], n}, "[B, H, S, N] of x and w", float...); err != nil {
		return err
	}
	if !bias.IsZero() {
		if err := expect("bias", bias, backend.Shape{1, 1, 1, n}, "[1, 1, 1, N] of w", float...); err != nil {
			return err
		}
	}
	return p.Project(ctx, y, x, w, bias)
}
