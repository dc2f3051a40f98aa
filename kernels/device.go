package kernels

import (
	"context"

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
