//go:build !js

// Package pure is github.com/gogpu/wgpu as a library of the port, without cgo.
package pure

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Provider names the library behind the port.
const Provider = "gogpu/wgpu v0.34.5 (pure Go)"

var instance = sync.OnceValues(func() (*wgpu.Instance, error) {
	return wgpu.CreateInstance(&wgpu.InstanceDescriptor{
		Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12,
	})
})

// Adapters lists the adapters that three kinds of request return: the library has no list. Of several equal cards it
// finds one. Without XDG_RUNTIME_DIR, a layer of Mesa prints a line to standard error for each request.
func Adapters() (all []port.LibraryAdapter, err error) {
	growStack()
	inst, err := instance()
	if err != nil {
		return nil, err
	}
	seen := map[gputypes.AdapterInfo]bool{}
	for _, w := range []*wgpu.RequestAdapterOptions{
		{PowerPreference: wgpu.PowerPreferenceHighPerformance},
		{PowerPreference: wgpu.PowerPreferenceLowPower},
		{ForceFallbackAdapter: true},
	} {
		a, err := inst.RequestAdapter(w)
		switch {
		case err != nil: // there is no such adapter
		case seen[a.Info()]:
			a.Release()
		default:
			seen[a.Info()] = true
			all = append(all, adapter{a})
		}
	}
	return all, nil
}

type adapter struct{ *Adapter }

func (a adapter) Info() port.Info {
	return port.Info{AdapterInfo: a.Adapter.Info(), Library: Provider}
}

func (a adapter) Open(l gputypes.Limits) (port.Library, error) {
	growStack()
	dev, err := a.RequestDevice(&wgpu.DeviceDescriptor{Label: "attn", RequiredLimits: l})
	if err != nil {
		return nil, translate(err, port.ErrInvalid)
	}
	return newLibrary(dev, a.Adapter.Info().Backend), nil
}

func newLibrary(dev *wgpu.Device, api gputypes.Backend) *library {
	return &library{
		dev: dev, queue: dev.Queue(), spirv: api == gputypes.BackendVulkan,
		unwritten: map[*Buffer]bool{}, released: map[*Buffer]uint64{}, copied: map[port.Object]bool{}, filled: map[port.Object]bool{},
	}
}

// fieldOf returns an unexported field of one of the library's objects. ok is false where there is none of this type.
func fieldOf[T any](object any, field string) (value T, ok bool) {
	f := reflect.ValueOf(object).Elem().FieldByName(field)
	if !f.IsValid() {
		return value, false
	}
	value, ok = reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem().Interface().(T)
	return value, ok
}

// translate wraps the library's error in the port's sentinel: kind, unless the library has a more precise one.
func translate(err, kind error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, wgpu.ErrDeviceLost):
		kind = port.ErrLost
	case errors.Is(err, wgpu.ErrOutOfMemory):
		kind = port.ErrMemory
	case errors.Is(err, wgpu.ErrSubmitBufferDestroyed):
		kind = port.ErrReleased
	}
	return port.Fault(err.Error(), kind)
}

// The library's types, of which programs have objects.
type (
	Adapter = wgpu.Adapter
	Device  = wgpu.Device
	Buffer  = wgpu.Buffer
)

// Share returns a library over a program's device, the device's limits, and a description of its adapter.
func Share(a *Adapter, dev *Device) (port.Library, gputypes.Limits, port.Info, error) {
	info := adapter{a}.Info()
	lib := newLibrary(dev, info.Backend)
	lib.shared = true
	err := lib.Lost()
	if err == nil && lib.queue == nil {
		err = fmt.Errorf("the device has no queue: %w", port.ErrInvalid)
	}
	if err != nil {
		return nil, gputypes.Limits{}, info, err
	}
	return lib, dev.Limits(), info, nil
}

func (l *library) Import(x any) (raw port.Object, size uint64, usage gputypes.BufferUsage, err error) {
	b := x.(*Buffer)
	if owner, ok := fieldOf[*wgpu.Device](b, "device"); ok && owner != l.dev {
		return nil, 0, 0, port.ErrForeign
	}
	if released, ok := fieldOf[*atomic.Bool](b, "released"); ok && released.Load() {
		return nil, 0, 0, port.ErrReleased
	}
	if b.MapState() != wgpu.MapStateUnmapped {
		return nil, 0, 0, fmt.Errorf("the buffer is mapped, unmap it first: %w", port.ErrInvalid)
	}
	return b, b.Size(), b.Usage(), nil
}

// Reference does nothing: the library keeps the buffers of a submission until it has ended, and
// refuses released buffers in later ones.
func (l *library) Reference(port.Object) {}

// Dereference does nothing.
func (l *library) Dereference(port.Object) {}
