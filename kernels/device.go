package kernels

import (
	"context"
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Device computes attention on one device. It validates calls; the backend that it wraps
// computes them. A Device is safe for concurrent use.
type Device struct {
	be       backend.Backend // or nil: use it after on, need or Alloc, which check
	verify   atomic.Int64    // rows of each run
	verified atomic.Uint64   // runs
}

// Open opens a device by name: "auto" or "" (a hardware GPU, else the CPU), "cpu", "gpu", "gpu:1" by number or
// "gpu:NAME" by a part of the device's name. The program imports the backends that it wants to open.
//
// Errors: ErrNoBackend for a backend that is not imported, ErrNoDevice for a device that does not exist.
func Open(name string) (*Device, error) {
	be, err := backend.Open(name)
	if err != nil {
		return nil, err
	}
	return NewDevice(be), nil
}

// NewDevice returns a Device that wraps an open backend. Close closes the backend. The calls
// of a Device without a backend return ErrNoBackend.
func NewDevice(be backend.Backend) *Device {
	if v := reflect.ValueOf(be); v.Kind() == reflect.Pointer && v.IsNil() { // of a failed Open
		be = nil
	}
	return &Device{be: be}
}

// Backend returns the backend or nil, for measurements and tests. Programs do not need it.
func (d *Device) Backend() backend.Backend {
	if d == nil {
		return nil
	}
	return d.be
}

// need returns the backend of d for a call with ctx, with an optional ability, see [op.Need].
func need[T any](ctx context.Context, d *Device, ability string) (able T, err error) {
	if able, err = op.Need[T](d.Backend(), ability); err == nil && ctx == nil {
		err = fmt.Errorf("the context is nil, pass context.Background(): %w", ErrOption)
	}
	return able, err
}

// on returns the backend for a call with ctx.
func (d *Device) on(ctx context.Context) (backend.Backend, error) {
	return need[backend.Backend](ctx, d, "calls")
}

// attend runs backend calls. Without any it returns the errors of a closed device and of ctx.
func (d *Device) attend(ctx context.Context, calls ...*backend.Call) error {
	be, err := d.on(ctx)
	if err == nil {
		err = be.Attention(ctx, calls...)
	}
	return err
}

// Info describes the device.
func (d *Device) Info() Info {
	if be := d.Backend(); be != nil {
		return Info(be.Info())
	}
	return Info{}
}

// Close waits for running calls and frees the device. Later calls return ErrClosed.
func (d *Device) Close() error {
	if be := d.Backend(); be != nil {
		return be.Close()
	}
	return nil
}

// SetVerify makes each later run of a call on d recompute a number of random rows in float64, as
// [Call.Check] does, other rows in each run. The run returns ErrVerify when a value differs by more
// than its error bound, as on defective devices and memory. 0, the default, turns it off.
//
// A row takes the download of the keys and values of its head, and Sk·(D+Dv) products on one core
// of about 20 ns each. Stages, gradients and merges are not verified.
func (d *Device) SetVerify(rows int) {
	if d != nil {
		d.verify.Store(int64(max(rows, 0)))
	}
}

// Alloc returns a contiguous tensor with unspecified contents, for the caller to Release.
// It returns ErrMemory when there is not enough memory.
func (d *Device) Alloc(ctx context.Context, dtype DType, shape Shape) (Tensor, error) {
	be, err := d.on(ctx)
	if err != nil {
		return Tensor{}, err
	}
	return be.Alloc(ctx, dtype, shape)
}

// Upload returns the elements of host, a tensor in host memory, as a tensor in device memory, for the caller to
// Release. On a device that computes in host memory it is an alias: host must not change until it is released.
func (d *Device) Upload(ctx context.Context, host Tensor) (Tensor, error) {
	be, err := d.on(ctx)
	if err != nil {
		return Tensor{}, err
	}
	return be.Upload(ctx, host)
}

// Download copies src, in device memory, to host, in host memory. They must have the same shape and dtype.
func (d *Device) Download(ctx context.Context, host, src Tensor) error {
	be, err := d.on(ctx)
	if err == nil {
		err = be.Download(ctx, host, src)
	}
	return err
}

// Wait waits until all calls of the device are complete, as measurements need. It returns the first
// error that occurred after a call had returned and that no other call has returned.
//
// On a GPU a call returns when it is submitted. Calls that use its result follow it on the device,
// and those that return host data wait for it. An error of the device is then returned, with the
// name of the failed call, by the first call that uses its result.
func (d *Device) Wait(ctx context.Context) error {
	be, err := d.on(ctx)
	if err == nil {
		err = be.Wait(ctx)
	}
	return err
}
