//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/seed90331342/attn/gpu/internal/port"
)

// TestUpstreamHasNoShaderF16 fails when a later version of wgpu-native compiles f16.
func TestUpstreamHasNoShaderF16(t *testing.T) {
	_, err := open(t, nil).CreatePipeline(port.PipelineDesc{
		Label: "f16", Entry: "main", Bindings: []port.BindingKind{port.ReadOnly, port.ReadWrite},
		WGSL: `enable f16;
@group(0) @binding(0) var<storage, read> x: array<vec4<f16>>;
@group(0) @binding(1) var<storage, read_write> y: array<vec4<f32>>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) t: u32) { y[t] = vec4<f32>(x[t]); }`,
	})
	if !errors.Is(err, port.ErrShader) || !strings.Contains(err.Error(), "found 'enable'") {
		t.Errorf("the library accepts 'enable f16' now: remove the unpacking of f16 in kernels of devices with shader-f16, and this test: %v", err)
	}
}
