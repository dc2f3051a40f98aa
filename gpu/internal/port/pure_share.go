//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"fmt"
	"sync/atomic"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
)

// The library's types, of which programs have objects.
type (
	NativeAdapter = wgpu.Adapter
	NativeDevice  = wgpu.Device
	NativeBuffer  = wgpu.Buffer
)

// Share returns a Device over a device that the program has opened on an adapter, and its
// queue. Close releases what was created through it and neither the device nor the adapter.
// lower returns the limits to keep, of those of the device. Share returns ErrInvalid for
// limits beyond those and ErrLost for a device that was released.
func Share(a *NativeAdapter, dev *NativeDevice, lower func(gputypes.Limits) gputypes.Limits) (Device, gputypes.AdapterInfo, error) {
	growStack()
	info := a.Info()
	lib := newLibrary(dev, info.Backend)
	lib.shared = true
	if err := lib.lost(); err != nil {
		return nil, info, err
	}
	if lib.queue == nil {
		return nil, info, fmt.Errorf("the device has no queue: %w", ErrInvalid)
	}
	lib.clock.there = dev.Features().Contains(gputypes.FeatureTimestampQuery)
	l := lower(dev.Limits())
	if err := within(l, dev.Limits()); err != nil {
		return nil, info, err
	}
	return newDevice(lib, l), info, nil
}

// importBuffer returns a program's buffer, its size and its usages.
func (l *library) importBuffer(b *NativeBuffer) (raw rawBuffer, size uint64, usage gputypes.BufferUsage, err error) {
	if owner, ok := driverOf[*wgpu.Device](b, "device"); ok && owner != l.dev {
		return nil, 0, 0, ErrForeign
	}
	if released, ok := driverOf[*atomic.Bool](b, "released"); ok && released.Load() {
		return nil, 0, 0, ErrReleased
	}
	if b.MapState() != wgpu.MapStateUnmapped {
		return nil, 0, 0, fmt.Errorf("the buffer is mapped, unmap it first: %w", ErrInvalid)
	}
	return b, b.Size(), b.Usage(), nil
}

// reference and dereference do nothing: the library keeps the buffers of a submission until
// it has ended, and refuses released buffers in later ones.
func (l *library) reference(rawBuffer)   {}
func (l *library) dereference(rawBuffer) {}
