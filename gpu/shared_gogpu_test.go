//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package gpu_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// native reports whether the library of this build is go-webgpu.
const native = false

// openNative opens a device as a program does. few is a limit with which no kernel runs.
func openNative(t *testing.T, timestamps, few bool) (*wgpu.Adapter, *wgpu.Device) {
	t.Helper()
	instance, err := wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12})
	check(t, err)
	t.Cleanup(instance.Release)
	adapter, err := instance.RequestAdapter(nil)
	check(t, err)
	t.Cleanup(adapter.Release)
	desc := wgpu.DeviceDescriptor{RequiredLimits: adapter.Limits()}
	if timestamps {
		desc.RequiredFeatures = gputypes.Features(gputypes.FeatureTimestampQuery)
	}
	if few {
		desc.RequiredLimits.MaxBindingsPerBindGroup = 4
	}
	device, err := adapter.RequestDevice(&desc)
	check(t, err)
	return adapter, device
}

// TestSharedMapped wraps a mapped buffer.
func TestSharedMapped(t *testing.T) {
	p := openProgram(t, false, false)
	b := p.share(t, gpu.Options{})
	shape := backend.Shape{1, 1, 4, 8}
	mapped, err := p.device.CreateBuffer(&wgpu.BufferDescriptor{Size: 128, Usage: port.ImportUsage, MappedAtCreation: true})
	check(t, err)
	defer mapped.Release()
	if _, err := b.Wrap(mapped, backend.F32, shape); !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), "the buffer is mapped, unmap it first") {
		t.Errorf("Wrap: %v", err)
	}
	check(t, mapped.Unmap())
	wrap(t, b, mapped, shape).Release()
}
