package native

/*
#include "native.h"

// A pipeline is compiled in one call of C, while other threads use the device: its errors reach a state of its own by
// port_compiling, and there are no error scopes, which the threads of a device share, but on a program's device.

typedef struct port_chained { struct port_chained const *next; int type; } port_chained;
typedef struct { port_chained chain; char const *code; } port_wgsl;
typedef struct { port_chained const *next; char const *label; size_t n_hints; void const *hints; } port_module_desc;
typedef struct {
	void const *next;
	uint32_t binding, visibility;
	struct { void const *next; int type; bool dynamic; uint64_t least; } buffer;
	struct { void const *next; int type; } sampler;
	struct { void const *next; int type, dimension; bool multisampled; } texture;
	struct { void const *next; int access, format, dimension; } storage_texture;
} port_layout_entry;
typedef struct { void const *next; char const *label; size_t n; port_layout_entry const *entries; } port_layout_desc;
typedef struct { void const *next; char const *label; size_t n; void *const *layouts; } port_pipeline_layout_desc;
typedef struct {
	void const *next;
	char const *label;
	void *layout;
	struct { void const *next; void *module; char const *entry; size_t n_constants; void const *constants; } compute;
} port_pipeline_desc;

enum { port_max_entries = 16 };

typedef struct {
	char const *label, *code, *entry;
	uint32_t types[port_max_entries]; // of the bindings
	size_t n;
	int dynamic;
	void *layout, *pipeline; // results, also of a compilation that failed
	port_state *state;
} port_compilation;

static void port_do_compile(void *compilation) {
	port_compilation *c = compilation;
	port_state *s = c->state;
	void *device = s->device;
	int const wgsl_type = 6, compute_stage = 4; // WGPUSType, WGPUShaderStage
	port_wgsl wgsl = { .chain = { .type = wgsl_type }, .code = c->code };
	port_module_desc module_desc = { .next = &wgsl.chain, .label = c->label };
	void *module = wgpuDeviceCreateShaderModule(device, &module_desc), *layout = NULL;
	if (!s->error) {
		port_layout_entry entries[port_max_entries] = { 0 };
		for (size_t i = 0; i < c->n; i++) {
			entries[i].binding = i;
			entries[i].visibility = compute_stage;
			entries[i].buffer.type = c->types[i];
			entries[i].buffer.dynamic = (int)i == c->dynamic;
		}
		port_layout_desc desc = { .label = c->label, .n = c->n, .entries = entries };
		c->layout = wgpuDeviceCreateBindGroupLayout(device, &desc);
	}
	if (!s->error) {
		port_pipeline_layout_desc desc = { .label = c->label, .n = 1, .layouts = &c->layout };
		layout = wgpuDeviceCreatePipelineLayout(device, &desc);
	}
	if (!s->error) {
		port_pipeline_desc desc = { .label = c->label, .layout = layout };
		desc.compute.module = module;
		desc.compute.entry = c->entry;
		c->pipeline = wgpuDeviceCreateComputePipeline(device, &desc);
	}
	if (layout) wgpuPipelineLayoutRelease(layout);
	if (module) wgpuShaderModuleRelease(module);
}

static void port_compile(port_compilation *c) {
	port_compiling = c->state;
	port_enter(c->state);
	port_guard(c->state, port_do_compile, c);
	port_leave(c->state);
	port_compiling = NULL;
}
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/seed90331342/attn/gpu/internal/port"
)

// pipeline has the C objects of a pipeline and of the layout of its bindings.
type pipeline struct{ ref, layoutRef unsafe.Pointer }

// CreatePipeline may run while other goroutines use the device. The library holds locks of
// its own meanwhile: submissions wait for them, polls do not.
func (l *library) CreatePipeline(desc port.PipelineDesc, dynamic int) (port.Object, error) {
	if len(desc.Bindings) > C.port_max_entries {
		return nil, fmt.Errorf("%d bindings, the limit is %d: %w", len(desc.Bindings), C.port_max_entries, port.ErrInvalid)
	}
	c := (*C.port_compilation)(C.calloc(1, C.sizeof_port_compilation))
	c.state = newState(l.state.device, l.state.shared)
	c.n, c.dynamic = C.size_t(len(desc.Bindings)), C.int(dynamic)
	c.label, c.code, c.entry = C.CString(desc.Label), C.CString(desc.WGSL), C.CString(desc.Entry)
	defer func() {
		for _, p := range []unsafe.Pointer{unsafe.Pointer(c.label), unsafe.Pointer(c.code), unsafe.Pointer(c.entry), unsafe.Pointer(c.state), unsafe.Pointer(c)} {
			C.free(p)
		}
	}()
	for i, k := range desc.Bindings {
		c.types[i] = C.uint32_t(k) // WGPUBufferBindingType has the same numbers
	}
	defer l.scoped()()
	C.port_compile(c)
	if c.state.unsound != 0 {
		l.broken.Store(true)
	}
	p := &pipeline{c.pipeline, c.layout}
	if err := outcome(c.state, port.ErrShader); err != nil {
		l.ReleasePipeline(p)
		return nil, err
	}
	return p, nil
}

func (l *library) ReleasePipeline(x port.Object) {
	p := x.(*pipeline)
	l.release(C.wgpuComputePipelineRelease, p.ref)
	l.release(C.wgpuBindGroupLayoutRelease, p.layoutRef)
}
