//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

/*
#include <stddef.h>
#include <stdint.h>

// A submission crosses from Go to C once, not once a command, and without the
// binding's error scope and handle round each call: what goes wrong comes to the
// handler of errors outside a scope. Declarations follow webgpu.h as wgpu-native
// v0.17 ships it; handles are pointers to what C owns.

typedef struct { void const *next; uint32_t binding; void *buffer; uint64_t offset, size; void *sampler, *view; } port_entry;
typedef struct { void const *next; char const *label; void *layout; size_t count; port_entry const *entries; } port_group_desc;

extern void *wgpuDeviceCreateBindGroup(void *device, port_group_desc const *desc);
extern void wgpuBindGroupRelease(void *group);
extern void *wgpuDeviceCreateCommandEncoder(void *device, void const *desc);
extern void wgpuCommandEncoderRelease(void *encoder);
extern void wgpuCommandEncoderCopyBufferToBuffer(void *encoder, void *src, uint64_t src_offset, void *dst, uint64_t dst_offset, uint64_t size);
extern void wgpuCommandEncoderWriteTimestamp(void *encoder, void *queries, uint32_t index);
extern void wgpuCommandEncoderResolveQuerySet(void *encoder, void *queries, uint32_t first, uint32_t count, void *dst, uint64_t offset);
extern void *wgpuCommandEncoderFinish(void *encoder, void const *desc);
extern void *wgpuCommandEncoderBeginComputePass(void *encoder, void const *desc);
extern void wgpuComputePassEncoderSetPipeline(void *pass, void *pipeline);
extern void wgpuComputePassEncoderSetBindGroup(void *pass, uint32_t index, void *group, size_t n, uint32_t const *offsets);
extern void wgpuComputePassEncoderDispatchWorkgroups(void *pass, uint32_t x, uint32_t y, uint32_t z);
extern void wgpuComputePassEncoderEnd(void *pass);
extern void wgpuComputePassEncoderRelease(void *pass);
extern void wgpuCommandBufferRelease(void *commands);
extern void wgpuQueueSubmit(void *queue, size_t n, void *const *commands);
extern void wgpuQueueWriteBuffer(void *queue, void *buffer, uint64_t offset, void const *data, size_t size);

// A dispatch when pipeline is set, else a copy.
typedef struct {
	void *pipeline, *group;
	uint32_t groups[3], dynamic, offset;
	void *src, *dst;
	uint64_t src_offset, dst_offset, size;
} port_command;

// Two timestamps that are resolved into a buffer of their own; none when queries
// is null.
typedef struct { void *queries; uint32_t first; void *resolved, *staging; uint64_t size; } port_stamps;

static void *port_make_group(void *device, void *layout, port_entry const *entries, size_t n) {
	port_group_desc desc = { .layout = layout, .count = n, .entries = entries };
	return wgpuDeviceCreateBindGroup(device, &desc);
}

static void port_end_pass(void **pass) {
	if (!*pass) return;
	wgpuComputePassEncoderEnd(*pass);
	wgpuComputePassEncoderRelease(*pass);
	*pass = NULL;
}

// port_run records and submits. It returns 0 and submits nothing when *error is
// set by then.
static int port_run(void *device, void *queue, port_command const *c, size_t n, port_stamps const *stamps, int const *error) {
	void *encoder = wgpuDeviceCreateCommandEncoder(device, NULL), *pass = NULL;
	if (stamps->queries) wgpuCommandEncoderWriteTimestamp(encoder, stamps->queries, stamps->first);
	for (; n > 0; n--, c++) {
		if (!c->pipeline) {
			port_end_pass(&pass);
			wgpuCommandEncoderCopyBufferToBuffer(encoder, c->src, c->src_offset, c->dst, c->dst_offset, c->size);
			continue;
		}
		if (!pass) pass = wgpuCommandEncoderBeginComputePass(encoder, NULL);
		wgpuComputePassEncoderSetPipeline(pass, c->pipeline);
		wgpuComputePassEncoderSetBindGroup(pass, 0, c->group, c->dynamic, &c->offset);
		wgpuComputePassEncoderDispatchWorkgroups(pass, c->groups[0], c->groups[1], c->groups[2]);
	}
	port_end_pass(&pass);
	if (stamps->queries) {
		wgpuCommandEncoderWriteTimestamp(encoder, stamps->queries, stamps->first + 1);
		wgpuCommandEncoderResolveQuerySet(encoder, stamps->queries, stamps->first, 2, stamps->resolved, 0);
		wgpuCommandEncoderCopyBufferToBuffer(encoder, stamps->resolved, 0, stamps->staging, 0, stamps->size);
	}
	void *commands = *error ? NULL : wgpuCommandEncoderFinish(encoder, NULL);
	wgpuCommandEncoderRelease(encoder);
	int ok = *error == 0;
	if (ok) wgpuQueueSubmit(queue, 1, &commands);
	if (commands) wgpuCommandBufferRelease(commands);
	return ok && *error == 0;
}
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// nativeEncoder is what a submission is put together in, over and over, under the
// device's lock.
type nativeEncoder struct {
	commands []C.port_command
	entries  [maxKeyBindings]C.port_entry
	key      groupKey
	stamps   C.port_stamps
}

// run submits commands; the device's clock is read into slot before and after
// them unless it is nil.
func (d *nativeDevice) run(commands []Command, slot *timedSlot) error {
	e := &d.encoder
	e.commands = e.commands[:0]
	for i := range commands {
		c := &commands[i]
		if c.Pipeline == nil {
			src, _ := c.Src.(*nativeBuffer)
			dst, _ := c.Dst.(*nativeBuffer)
			if !d.buffers[src] || !d.buffers[dst] {
				return fmt.Errorf("copy with a buffer that is not there")
			}
			e.commands = append(e.commands, C.port_command{
				src: src.ref, src_offset: C.uint64_t(c.SrcOffset),
				dst: dst.ref, dst_offset: C.uint64_t(c.DstOffset), size: C.uint64_t(c.Size),
			})
			continue
		}
		x := C.port_command{groups: [3]C.uint32_t{C.uint32_t(c.Groups[0]), C.uint32_t(c.Groups[1]), C.uint32_t(c.Groups[2])}}
		if err := d.bind(c, &x); err != nil {
			return err
		}
		e.commands = append(e.commands, x)
	}
	e.stamps = C.port_stamps{}
	if slot != nil {
		e.stamps = C.port_stamps{
			queries: handleOf(d.clock.queries), first: C.uint32_t(slot.first),
			resolved: handleOf(slot.resolved), staging: handleOf(slot.staging), size: stampBytes,
		}
	}
	if C.port_run(d.ref, d.queueRef, unsafe.SliceData(e.commands), C.size_t(len(e.commands)), &e.stamps, &d.state.error) == 0 {
		return fmt.Errorf("submission of %d commands", len(commands))
	}
	return nil
}

// bind fills in the pipeline, the group of its bindings and where its uniform
// starts. Groups are kept; the offset of the uniform is no part of them, so that
// a call finds its group again wherever its parameters come to lie.
func (d *nativeDevice) bind(c *Command, x *C.port_command) error {
	p, _ := c.Pipeline.(*nativePipeline)
	if !d.pipelines[p] {
		return fmt.Errorf("dispatch of a pipeline that is not there")
	}
	e := &d.encoder
	if len(c.Bindings) > len(e.entries) {
		return fmt.Errorf("dispatch with %d bindings, at most %d are taken", len(c.Bindings), len(e.entries))
	}
	x.pipeline = p.ref
	e.key = groupKey{pipeline: p.id}
	for i := range c.Bindings {
		b := &c.Bindings[i]
		nb, _ := b.Buffer.(*nativeBuffer)
		if !d.buffers[nb] {
			return fmt.Errorf("binding %d is a buffer that is not there", i)
		}
		offset := b.Offset
		if i == p.dynamic {
			x.dynamic, x.offset = 1, C.uint32_t(offset)
			offset = 0
		}
		e.key.add(nb.id, offset, b.Size)
		e.entries[i] = C.port_entry{binding: C.uint32_t(i), buffer: nb.ref, offset: C.uint64_t(offset), size: C.uint64_t(b.Size)}
	}
	if g, ok := d.groups.get(&e.key); ok {
		x.group = g
		return nil
	}
	g := C.port_make_group(d.ref, p.layoutRef, &e.entries[0], C.size_t(len(c.Bindings)))
	if d.state.error != 0 {
		C.wgpuBindGroupRelease(g)
		return fmt.Errorf("bindings of a dispatch")
	}
	d.groups.put(&e.key, g)
	x.group = g
	return nil
}

func freeGroup(g unsafe.Pointer) { C.wgpuBindGroupRelease(g) }

// write starts a copy of data, which is not empty, into a buffer.
func (d *nativeDevice) write(b *nativeBuffer, offset uint64, data []byte) {
	C.wgpuQueueWriteBuffer(d.queueRef, b.ref, C.uint64_t(offset), unsafe.Pointer(unsafe.SliceData(data)), C.size_t(len(data)))
}
