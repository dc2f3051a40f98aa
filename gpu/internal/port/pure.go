//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
)

// Provider names the library behind the port.
const Provider = "gogpu/wgpu v0.34.5 (pure Go)"

var instance = sync.OnceValues(func() (*wgpu.Instance, error) {
	return wgpu.CreateInstance(&wgpu.InstanceDescriptor{
		Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12,
	})
})

// Adapters lists the adapters. The caller releases them. It returns ErrNoAdapter when
// there are none. The library has no list: this one has the adapters that three kinds of
// request return, and only one of several equal cards. Without XDG_RUNTIME_DIR, a layer of
// Mesa prints a line to standard error for each request.
func Adapters() ([]Adapter, error) {
	growStack()
	inst, err := instance()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", err.Error(), ErrNoAdapter)
	}
	requests := []*wgpu.RequestAdapterOptions{
		{PowerPreference: wgpu.PowerPreferenceHighPerformance},
		{PowerPreference: wgpu.PowerPreferenceLowPower},
		{ForceFallbackAdapter: true},
	}
	var all []Adapter
	seen := map[gputypes.AdapterInfo]bool{}
	for _, w := range requests {
		a, err := inst.RequestAdapter(w)
		if err != nil {
			continue // there is no such adapter
		}
		if seen[a.Info()] {
			a.Release()
			continue
		}
		seen[a.Info()] = true
		all = append(all, &pureAdapter{a: a})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("there is no Vulkan, Metal or DX12 driver: %w", ErrNoAdapter)
	}
	return all, nil
}

type pureAdapter struct {
	once sync.Once
	a    *wgpu.Adapter
}

func (a *pureAdapter) Release()                   { a.once.Do(a.a.Release) }
func (a *pureAdapter) Info() gputypes.AdapterInfo { return a.a.Info() }
func (a *pureAdapter) Limits() gputypes.Limits    { return a.a.Limits() }

// Open checks the limits that compute uses, because the library accepts any.
func (a *pureAdapter) Open(l gputypes.Limits) (Device, error) {
	growStack()
	if err := within(l, a.a.Limits()); err != nil {
		return nil, fmt.Errorf("open device on %q: %w", a.a.Info().Name, err)
	}
	dev, err := a.a.RequestDevice(&wgpu.DeviceDescriptor{Label: "attn", RequiredLimits: l})
	if err != nil {
		return nil, fmt.Errorf("open device on %q: %w", a.a.Info().Name, translate(err, ErrInvalid))
	}
	lib := newLibrary(dev, a.a.Info().Backend)
	lib.clock.there = true
	return newDevice(lib, l), nil
}

func newLibrary(dev *wgpu.Device, api gputypes.Backend) *library {
	return &library{
		dev: dev, queue: dev.Queue(), spirv: api == gputypes.BackendVulkan,
		unwritten: map[rawBuffer]span{}, copied: map[rawBuffer]bool{}, filled: map[rawBuffer]bool{},
	}
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
