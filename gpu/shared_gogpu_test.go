//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package gpu_test

import (
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// native reports whether the library of this build is go-webgpu.
const native = false

// openNative opens a device as a program does. few is a limit with which no kernel runs.
func openNative(t *testing.T, timestamps, few bool) (*wgpu.Adapter, *wgpu.Device) {
	t.Helper()
	instance := must.Get(wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12}))(t)
	t.Cleanup(instance.Release)
	adapter := must.Get(instance.RequestAdapter(nil))(t)
	t.Cleanup(adapter.Release)
	desc := wgpu.DeviceDescriptor{RequiredLimits: adapter.Limits()}
	if timestamps {
		desc.RequiredFeatures = gputypes.Features(gputypes.FeatureTimestampQuery)
	}
	if few {
		desc.RequiredLimits.MaxBindingsPerBindGroup = 4
	}
	device := must.Get(adapter.RequestDevice(&desc))(t)
	return adapter, device
}

// TestSharedMapped wraps a mapped buffer.
func TestSharedMapped(t *testing.T) {
	p := openProgram(t, false, false)
	b := p.share(t, gpu.Options{})
	shape := backend.Shape{1, 1, 4, 8}
	mapped := must.Get(p.device.CreateBuffer(&wgpu.BufferDescriptor{Size: 128, Usage: port.ImportUsage, MappedAtCreation: true}))(t)
	defer mapped.Release()
	must.Fail(t, "Wrap", must.Err(b.Wrap(mapped, backend.F32, shape)), backend.ErrUnsupported, "the buffer is mapped, unmap it first")
	check(t, mapped.Unmap())
	wrap(t, b, mapped, shape).Release()
}
