//go:build !js

package pure

import (
	"reflect"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
	"github.com/gogpu/wgpu/core"
	"github.com/gogpu/wgpu/hal/vulkan/vk"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// The tests of this file fail when a later version of gogpu/wgpu no longer has a defect that this package works around. They name the code that can then go.

func fixed(t *testing.T, what, remove string) {
	t.Helper()
	t.Errorf("the library %s now: remove %s and this check", what, remove)
}

func TestUpstreamAPI(t *testing.T) {
	if _, ok := reflect.TypeFor[wgpu.ComputePassDescriptor]().FieldByName("TimestampWrites"); ok {
		fixed(t, "has timestamps of compute passes", "the lack of them in library.go, docs and tests")
	}
	m, ok := reflect.TypeFor[*vk.Commands]().MethodByName("MapMemory")
	if last := m.Type.NumIn() - 1; !ok || m.Type.In(last).Kind() != reflect.Uintptr {
		fixed(t, "passes a pointer to vkMapMemory", "growStack")
	}
	for _, name := range []string{"EnumerateAdapters", "Adapters"} {
		if _, ok := reflect.TypeFor[*wgpu.Instance]().MethodByName(name); ok {
			fixed(t, "lists adapters", "the requests of Adapters")
		}
	}
	if m, ok := reflect.TypeFor[*wgpu.Queue]().MethodByName("Poll"); !ok || m.Type.NumOut() != 1 {
		fixed(t, "reports losses when it polls", "the submission of poll")
	}
}

// The compiler accepts f16, but Vulkan devices do not offer it.
func TestUpstreamHasNoShaderF16(t *testing.T) {
	all, err := Adapters()
	if err != nil || len(all) == 0 {
		t.Skipf("needs a WebGPU adapter: %v", err)
	}
	for _, each := range all {
		t.Cleanup(each.Release)
		a := each.(adapter)
		if a.Info().Backend == gputypes.BackendVulkan && a.Adapter.Features().Contains(gputypes.FeatureShaderF16) {
			fixed(t, "offers shader-f16", "the unpacking of f16 in kernels of such devices")
		}
	}
}

// openRaw opens the library's device of the first adapter.
func openRaw(t *testing.T, limits func(*gputypes.Limits)) (*wgpu.Device, error) {
	t.Helper()
	all, err := Adapters()
	if err != nil || len(all) == 0 {
		t.Skipf("needs a WebGPU adapter: %v", err)
	}
	for _, a := range all {
		t.Cleanup(a.Release)
	}
	l := all[0].Limits()
	if limits != nil {
		limits(&l)
	}
	growStack()
	d, err := all[0].(adapter).RequestDevice(&wgpu.DeviceDescriptor{RequiredLimits: l})
	if err == nil {
		t.Cleanup(d.Release)
	}
	return d, err
}

func TestUpstreamAcceptsAnyLimits(t *testing.T) {
	if _, err := openRaw(t, func(l *gputypes.Limits) { l.MaxComputeInvocationsPerWorkgroup++ }); err != nil {
		fixed(t, "checks limits", "the checks of Open")
	}
}

func rawBuffers(t *testing.T, d *wgpu.Device) (a, b *wgpu.Buffer) {
	t.Helper()
	growStack()
	var bufs [2]*wgpu.Buffer
	for i := range bufs {
		bufs[i] = must.Get(d.CreateBuffer(&wgpu.BufferDescriptor{Size: 16, Usage: gputypes.BufferUsageCopySrc | gputypes.BufferUsageCopyDst}))(t)
		t.Cleanup(bufs[i].Release)
	}
	return bufs[0], bufs[1]
}

func TestUpstreamRefusesCopiesBothWays(t *testing.T) {
	d := must.Get(openRaw(t, nil))(t)
	a, b := rawBuffers(t, d)
	e := must.Get(d.CreateCommandEncoder(nil))(t)
	e.CopyBufferToBuffer(a, 0, b, 0, 16)
	e.CopyBufferToBuffer(b, 0, a, 0, 16)
	commands, err := e.Finish()
	if err == nil {
		commands.Release()
		fixed(t, "accepts copies to and from a buffer", "the command buffers of copy")
	}
}

// A write needs its destination until the submission that contains it has ended.
func TestUpstreamDestroysWrittenBuffers(t *testing.T) {
	d := must.Get(openRaw(t, nil))(t)
	a, _ := rawBuffers(t, d)
	raw, ok := fieldOf[*core.Buffer](a, "core")
	if !ok {
		t.Fatal("a buffer has no core")
	}
	must.Do(t, d.Queue().WriteBuffer(a, 0, make([]byte, 16)))
	if a.Release(); !raw.IsDestroyed() {
		fixed(t, "keeps buffers with pending writes", "unwritten and released")
	}
	// The write is dropped with the device.
}
