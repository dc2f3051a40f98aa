//go:build cgo

package native_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/native"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// open opens a device of the first adapter.
func open(t *testing.T) port.Device {
	t.Helper()
	all, err := native.Adapters()
	if err != nil || len(all) == 0 {
		t.Skipf("needs a WebGPU adapter: %v", err)
	}
	for _, a := range all {
		t.Cleanup(a.Release)
	}
	d := must.Get(port.NewAdapter(all[0]).Open(all[0].Limits()))(t)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// TestUpstreamHasNoShaderF16 fails when a later version of wgpu-native compiles f16.
func TestUpstreamHasNoShaderF16(t *testing.T) {
	_, err := open(t).CreatePipeline(port.PipelineDesc{
		Label: "f16", Entry: "main", Bindings: []gputypes.BufferBindingType{port.ReadOnly, port.ReadWrite},
		WGSL: `enable f16;
@group(0) @binding(0) var<storage, read> x: array<vec4<f16>>;
@group(0) @binding(1) var<storage, read_write> y: array<vec4<f32>>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) t: u32) { y[t] = vec4<f32>(x[t]); }`,
	})
	must.Fail(t, "the library accepts 'enable f16' now: remove the unpacking of f16 in kernels of devices with shader-f16, and this test", err, port.ErrShader, "found 'enable'")
}

const quietChild = "ATTN_PORT_QUIET"

// TestQuiet opens a device in a process without XDG_RUNTIME_DIR. Its drivers print nothing,
// and its own child processes get no such variable.
func TestQuiet(t *testing.T) {
	if os.Getenv(quietChild) != "" {
		open(t)
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", "echo $XDG_RUNTIME_DIR").Output(); err != nil || strings.TrimSpace(string(out)) != "" {
			t.Errorf("child processes have XDG_RUNTIME_DIR=%s, %v", out, err)
		}
		return
	}
	open(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestQuiet$")
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "XDG_RUNTIME_DIR=") }), quietChild+"=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if out, err := cmd.Output(); err != nil || stderr.Len() > 0 {
		t.Errorf("%v, standard error %q\n%s", err, stderr.String(), out)
	}
}
