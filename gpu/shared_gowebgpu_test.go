//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package gpu_test

import (
	"sync"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/rajveermalviya/go-webgpu/wgpu"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// native reports whether the library of this build is go-webgpu.
const native = true

// openNative opens a device as a program does. few is a limit with which no kernel runs.
func openNative(t *testing.T, timestamps, few bool) (*wgpu.Adapter, *wgpu.Device) {
	t.Helper()
	instance := wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: wgpu.InstanceBackend_Primary})
	t.Cleanup(instance.Release)
	adapter := must.Get(instance.RequestAdapter(&wgpu.RequestAdapterOptions{}))(t)
	t.Cleanup(adapter.Release)
	limits := adapter.GetLimits()
	desc := wgpu.DeviceDescriptor{RequiredLimits: &wgpu.RequiredLimits{Limits: limits.Limits}}
	if timestamps {
		desc.RequiredFeatures = []wgpu.FeatureName{wgpu.FeatureName_TimestampQuery}
	}
	if few {
		desc.RequiredLimits.Limits.MaxBindingsPerBindGroup = 4
	}
	device := must.Get(adapter.RequestDevice(&desc))(t)
	return adapter, device
}

// TestSharedErrors makes calls of the backend fail in the library: their errors are returned and do not reach the
// program's handler, which would end the process. The program's own errors remain its own.
func TestSharedErrors(t *testing.T) {
	p := openProgram(t, false, false)
	b := p.share(t, gpu.Options{})
	destroyed, ob, x, o := p.operands(t, b)
	destroyed.Destroy()
	for range 2 {
		must.Fail(t, "a call with a destroyed buffer", attend(t.Context(), b, x, o), backend.ErrUnsupported, "destroyed")
	}
	must.Fail(t, "a buffer with usages that exclude each other", must.Err(gpu.Port(b).CreateBuffer(128, gputypes.BufferUsageMapRead|gputypes.BufferUsageStorage)), port.ErrInvalid)
	must.Fail(t, "a wrong shader", must.Err(gpu.Port(b).CreatePipeline(port.PipelineDesc{Label: "wrong", WGSL: "no shader", Entry: "main"})), port.ErrShader)
	another, _ := p.buffer(t, 4*64*32, port.ImportUsage)
	if err := compute(p.device, ob, "no statement"); err == nil {
		t.Error("the program's wrong shader is not refused")
	}
	must.Pass(t, "with another buffer", attend(t.Context(), b, wrap(t, b, another, o.Shape()), o))
	p.fill(t, ob, "x[i] = 1.0;")
}

// TestSharedPolls polls the device in another goroutine during calls: the end of each
// submission is counted once, whichever goroutine hears of it.
func TestSharedPolls(t *testing.T) {
	p := openProgram(t, false, false)
	b := p.share(t, gpu.Options{})
	_, _, x, o := p.operands(t, b)
	stop, polls := make(chan struct{}), sync.WaitGroup{}
	polls.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				p.device.Poll(false, nil)
			}
		}
	})
	for range 100 {
		if err := attend(t.Context(), b, x, o); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	polls.Wait()
}
