//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"errors"
	"fmt"
	"sync"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
)

// Provider names the library behind the port.
const Provider = "gogpu/wgpu v0.34.5 (pure Go)"

// quiet keeps a driver from printing to standard error; nil where no driver does.
var quiet func()

var instance = sync.OnceValues(func() (*wgpu.Instance, error) {
	if quiet != nil {
		quiet()
	}
	return wgpu.CreateInstance(&wgpu.InstanceDescriptor{
		Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12,
	})
})

// Adapters lists the adapters. The caller releases them. It returns ErrNoAdapter when
// there are none. The library has no list: this one has the adapters that three kinds of
// request return, and only one of several equal cards.
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
		unwritten: map[rawBuffer]bool{}, copied: map[rawBuffer]bool{}, filled: map[rawBuffer]bool{},
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
