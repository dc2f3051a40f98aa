//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
)

// Provider names the library behind the port.
const Provider = "gogpu/wgpu v0.34.5 (pure Go)"

const noAdapter = "there is no Vulkan, Metal or DX12 driver"

var instance = sync.OnceValues(func() (*wgpu.Instance, error) {
	return wgpu.CreateInstance(&wgpu.InstanceDescriptor{
		Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12,
	})
})

// enumerate lists the adapters that three kinds of request return: the library has no list.
// Of several equal cards it finds one. Without XDG_RUNTIME_DIR, a layer of Mesa prints a line to
// standard error for each request.
func enumerate() (all []*NativeAdapter, err error) {
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
			all = append(all, a)
		}
	}
	return all, nil
}

func infoOf(a *NativeAdapter) gputypes.AdapterInfo { return a.Info() }

// limitsOf returns the limits of an adapter or a device.
func limitsOf(a interface{ Limits() gputypes.Limits }) gputypes.Limits { return a.Limits() }

func releaseAdapter(a *NativeAdapter) { a.Release() }

func openLibrary(a *NativeAdapter, l gputypes.Limits) (*library, error) {
	growStack()
	dev, err := a.RequestDevice(&wgpu.DeviceDescriptor{Label: "attn", RequiredLimits: l})
	if err != nil {
		return nil, translate(err, ErrInvalid)
	}
	return newLibrary(dev, a.Info().Backend), nil
}

func newLibrary(dev *wgpu.Device, api gputypes.Backend) *library {
	return &library{
		dev: dev, queue: dev.Queue(), spirv: api == gputypes.BackendVulkan,
		unwritten: map[rawBuffer]bool{}, released: map[rawBuffer]uint64{}, copied: map[rawBuffer]bool{}, filled: map[rawBuffer]bool{},
	}
}

// fieldOf returns an unexported field of one of the library's objects. ok is false where there is
// none of this type.
func fieldOf[T any](object any, field string) (value T, ok bool) {
	f := reflect.ValueOf(object).Elem().FieldByName(field)
	if !f.IsValid() {
		return value, false
	}
	value, ok = reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem().Interface().(T)
	return value, ok
}

// translate wraps the library's error in the port's sentinel: kind, unless the library
// has a more precise one.
func translate(err, kind error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, wgpu.ErrDeviceLost):
		kind = ErrLost
	case errors.Is(err, wgpu.ErrOutOfMemory):
		kind = ErrMemory
	case errors.Is(err, wgpu.ErrSubmitBufferDestroyed):
		kind = ErrReleased
	}
	return fault(err.Error(), kind)
}

// The library's types, of which programs have objects.
type (
	NativeAdapter = wgpu.Adapter
	NativeDevice  = wgpu.Device
	NativeBuffer  = wgpu.Buffer
)

func shareLibrary(dev *NativeDevice, api gputypes.Backend) (*library, error) {
	lib := newLibrary(dev, api)
	lib.shared = true
	err := lib.lost()
	if err == nil && lib.queue == nil {
		err = fmt.Errorf("the device has no queue: %w", ErrInvalid)
	}
	return lib, err
}

// importBuffer returns a program's buffer, its size and its usages.
func (l *library) importBuffer(b *NativeBuffer) (raw rawBuffer, size uint64, usage gputypes.BufferUsage, err error) {
	if owner, ok := fieldOf[*wgpu.Device](b, "device"); ok && owner != l.dev {
		return nil, 0, 0, ErrForeign
	}
	if released, ok := fieldOf[*atomic.Bool](b, "released"); ok && released.Load() {
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
