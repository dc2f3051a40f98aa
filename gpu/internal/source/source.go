// Package source describes a kernel with the constants of a call, for programs and compilers
// that are not of this module.
package source

import (
	"encoding/binary"
	"fmt"
	"regexp"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/wgsl"
	"github.com/seed90331342/attn/shaders"
)

// Source is a kernel with the constants of a call, and the first dispatch in which the call runs it.
type Source struct {
	Kernel    string            `json:"kernel"`            // file of package shaders
	Variant   string            `json:"variant,omitempty"` // of several that compute the same
	Entry     string            `json:"entry"`             // point of the shader
	Constants map[string]uint32 `json:"constants"`
	Threads   int               `json:"threads"`          // of a workgroup
	Memory    int               `json:"workgroup_memory"` // in bytes
	Bindings  []Binding         `json:"bindings"`         // of group 0, in order
	Uniform   []uint32          `json:"uniform"`          // words of the uniform
	Grid      [3]uint32         `json:"grid"`             // workgroups dispatched
	Groups    int               `json:"groups"`           // workgroups of them that compute

	WGSL  string   `json:"-"`
	SPIRV []uint32 `json:"-"` // of the WGSL, as gogpu's compiler translates it
}

// Metal returns the kernel in Metal's language, as gogpu's compiler translates it, with bounds
// checks. The numbers of buffers and of the fields of _mslBufferSizes are those of bindings.
func (k *Source) Metal() (string, error) {
	code, err := wgsl.Metal(k.WGSL)
	if err != nil {
		return "", fmt.Errorf("kernel %s: %w: %w", k.Kernel, err, backend.ErrUnsupported)
	}
	return code, nil
}

// Binding is a binding of a kernel.
type Binding struct {
	Name  string `json:"name"`  // in the WGSL
	Kind  string `json:"kind"`  // read, read_write or uniform
	Bytes uint64 `json:"bytes"` // bound
}

// bindingName finds the name of a binding in WGSL.
var bindingName = regexp.MustCompile(`(?m)^@group\(0\) @binding\(\d+\) var<[^>]*> (\w+):`)

// Of returns the source of the kernel of a dispatch.
func Of(x queue.Dispatch) (k Source, err error) {
	about := shaders.Describe(x.Kernel)
	k = Source{
		Kernel: x.Kernel.Name(), Entry: "main", Constants: about.Constants, Threads: about.Threads, Memory: about.WorkgroupMemory,
		Grid: x.Grid, Groups: x.Groups,
	}
	for b := x.Params.Append(nil); len(b) > 0; b = b[4:] {
		k.Uniform = append(k.Uniform, binary.LittleEndian.Uint32(b))
	}
	if k.WGSL, err = shaders.Render(x.Kernel); err != nil {
		return k, err
	}
	names := bindingName.FindAllStringSubmatch(k.WGSL, -1)
	if len(names) != len(x.Sizes) {
		return k, fmt.Errorf("kernel %s declares %d bindings and gets %d: %w", k.Kernel, len(names), len(x.Sizes), backend.ErrUnsupported)
	}
	for i, size := range x.Sizes {
		kind := map[byte]string{'r': "read", 'w': "read_write", 'u': "uniform"}[about.Bindings[i]]
		k.Bindings = append(k.Bindings, Binding{names[i][1], kind, size})
	}
	if k.SPIRV, err = wgsl.SPIRV(k.WGSL); err != nil {
		return k, fmt.Errorf("kernel %s: %w: %w", k.Kernel, err, backend.ErrUnsupported)
	}
	return k, nil
}
