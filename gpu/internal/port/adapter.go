package port

import (
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/gogpu/gputypes"
)

// Adapter is a device that can be opened. Each build has its own enumerate, infoOf, limitsOf,
// openLibrary and releaseAdapter.
type Adapter struct {
	raw  *NativeAdapter
	once sync.Once
}

// Adapters lists the adapters. The caller releases them. It returns ErrNoAdapter when there
// are none.
func Adapters() ([]*Adapter, error) {
	list, err := enumerate()
	if err == nil && len(list) == 0 {
		err = errors.New(noAdapter)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", err.Error(), ErrNoAdapter)
	}
	all := make([]*Adapter, len(list))
	for i, raw := range list {
		all[i] = &Adapter{raw: raw}
	}
	return all, nil
}

// Info describes the adapter.
func (a *Adapter) Info() gputypes.AdapterInfo { return infoOf(a.raw) }

// Limits are the adapter's own limits, the most that Open grants.
func (a *Adapter) Limits() gputypes.Limits { return limitsOf(a.raw) }

// Release releases the adapter. Devices opened from it remain valid.
func (a *Adapter) Release() { a.once.Do(func() { releaseAdapter(a.raw) }) }

// Open opens a device with exactly these limits: those of Limits, with maxima lowered or
// alignments raised. It returns ErrInvalid for limits beyond those of the adapter and ErrLost
// when the device does not start.
func (a *Adapter) Open(l gputypes.Limits) (Device, error) {
	var lib *library
	err := within(l, a.Limits())
	if err == nil {
		lib, err = openLibrary(a.raw, l)
	}
	if err != nil {
		// After a loss the library may not be called any more. For lack of memory wgpu-native drops
		// Vulkan's device without destroying it: the adapter keeps the instance, without which the
		// driver would be unloaded while the device's threads start.
		if errors.Is(err, ErrLost) || errors.Is(err, ErrMemory) {
			a.once.Do(func() {})
		}
		return nil, fmt.Errorf("open device on %q: %w", a.Info().Name, err)
	}
	return newDevice(lib, l), nil
}

// within returns ErrInvalid when limits that compute uses exceed those of an adapter or of
// a program's device.
func within(limits, most gputypes.Limits) error {
	for _, name := range []string{
		"MaxBufferSize", "MaxStorageBufferBindingSize", "MaxStorageBuffersPerShaderStage", "MaxComputeWorkgroupStorageSize",
		"MaxComputeInvocationsPerWorkgroup", "MaxComputeWorkgroupsPerDimension",
	} {
		want, has := reflect.ValueOf(limits).FieldByName(name).Uint(), reflect.ValueOf(most).FieldByName(name).Uint()
		if want > has {
			return fmt.Errorf("%s of %d is over the limit of %d: %w", name, want, has, ErrInvalid)
		}
	}
	return nil
}
