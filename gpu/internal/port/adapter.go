package port

import (
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/gogpu/gputypes"
)

// Adapter is a device that can be opened.
type Adapter struct {
	LibraryAdapter
	once sync.Once
}

// NewAdapter returns an adapter of a library.
func NewAdapter(raw LibraryAdapter) *Adapter { return &Adapter{LibraryAdapter: raw} }

// Release releases the adapter. Devices opened from it remain valid.
func (a *Adapter) Release() { a.once.Do(a.LibraryAdapter.Release) }

// Open opens a device with exactly these limits: those of Limits, with maxima lowered or alignments raised. It returns
// ErrInvalid for limits beyond those of the adapter and ErrLost when the device does not start.
func (a *Adapter) Open(l gputypes.Limits) (Device, error) {
	var lib Library
	err := Within(l, a.Limits())
	if err == nil {
		lib, err = a.LibraryAdapter.Open(l)
	}
	if err != nil {
		// After a loss the library may not be called any more. For lack of memory wgpu-native drops Vulkan's device
		// without destroying it: the adapter keeps the instance, which has to outlive its devices.
		if errors.Is(err, ErrLost) || errors.Is(err, ErrMemory) {
			a.once.Do(func() {})
		}
		return nil, fmt.Errorf("open device on %q: %w", a.Info().Name, err)
	}
	return newDevice(lib, l, a.Info().Features), nil
}

// Share returns a Device with the limits l over a device that the program has opened with the limits most. Close
// releases what was created through it, and leaves the device and its adapter to the program.
// Share returns ErrInvalid for limits beyond most.
func Share(lib Library, l, most gputypes.Limits) (Device, error) {
	if err := Within(l, most); err != nil {
		lib.Close()
		return nil, err
	}
	return newDevice(lib, l, Features{}), nil
}

// CopyFields copies the fields that two structures have both, unless they are zero. Those of the libraries
// differ in their order and in a few fields that compute does not use.
func CopyFields(to, from any) {
	dst, src := reflect.ValueOf(to).Elem(), reflect.ValueOf(from).Elem()
	for i := range dst.NumField() {
		if f := src.FieldByName(dst.Type().Field(i).Name); f.IsValid() && !f.IsZero() && dst.Field(i).CanSet() {
			dst.Field(i).Set(f)
		}
	}
}

// Within returns ErrInvalid when limits that compute uses exceed those of an adapter or of a program's device.
func Within(limits, most gputypes.Limits) error {
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
