package port

import (
	"errors"
	"fmt"
	"sync"

	"github.com/gogpu/gputypes"
)

// adapter implements Adapter. Each build has its own enumerate, infoOf, limitsOf,
// openLibrary and releaseAdapter.
type adapter struct {
	raw  *NativeAdapter
	once sync.Once
}

// Adapters lists the adapters. The caller releases them. It returns ErrNoAdapter when there
// are none.
func Adapters() ([]Adapter, error) {
	list, err := enumerate()
	if err == nil && len(list) == 0 {
		err = errors.New(noAdapter)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", err.Error(), ErrNoAdapter)
	}
	all := make([]Adapter, len(list))
	for i, raw := range list {
		all[i] = &adapter{raw: raw}
	}
	return all, nil
}

func (a *adapter) Info() gputypes.AdapterInfo { return infoOf(a.raw) }
func (a *adapter) Limits() gputypes.Limits    { return limitsOf(a.raw) }
func (a *adapter) Release()                   { a.once.Do(func() { releaseAdapter(a.raw) }) }

func (a *adapter) Open(l gputypes.Limits) (Device, error) {
	var lib *library
	err := within(l, a.Limits())
	if err == nil {
		lib, err = openLibrary(a.raw, l)
	}
	if err != nil {
		if errors.Is(err, ErrLost) {
			a.once.Do(func() {}) // the library may not be called any more
		}
		return nil, fmt.Errorf("open device on %q: %w", a.Info().Name, err)
	}
	return newDevice(lib, l), nil
}

// within returns ErrInvalid when limits that compute uses exceed those of an adapter or of
// a program's device.
func within(limits, most gputypes.Limits) error {
	for _, c := range []struct {
		name      string
		want, has uint64
	}{
		{"MaxBufferSize", limits.MaxBufferSize, most.MaxBufferSize},
		{"MaxStorageBufferBindingSize", limits.MaxStorageBufferBindingSize, most.MaxStorageBufferBindingSize},
		{"MaxComputeWorkgroupStorageSize", uint64(limits.MaxComputeWorkgroupStorageSize), uint64(most.MaxComputeWorkgroupStorageSize)},
		{"MaxComputeInvocationsPerWorkgroup", uint64(limits.MaxComputeInvocationsPerWorkgroup), uint64(most.MaxComputeInvocationsPerWorkgroup)},
		{"MaxComputeWorkgroupsPerDimension", uint64(limits.MaxComputeWorkgroupsPerDimension), uint64(most.MaxComputeWorkgroupsPerDimension)},
		{"MaxStorageBuffersPerShaderStage", uint64(limits.MaxStorageBuffersPerShaderStage), uint64(most.MaxStorageBuffersPerShaderStage)},
	} {
		if c.want > c.has {
			return fmt.Errorf("%s of %d is over the limit of %d: %w", c.name, c.want, c.has, ErrInvalid)
		}
	}
	return nil
}
