package native

/*
#include "native.h"

// A submission crosses from Go to C once, not once for each command, and without the binding's error scope around each
// call. Errors reach the handler of errors outside a scope.

typedef struct { void const *next; uint32_t binding; void *buffer; uint64_t offset, size; void *sampler, *view; } port_entry;
typedef struct { void const *next; char const *label; void *layout; size_t count; port_entry const *entries; } port_group_desc;

extern void wgpuCommandEncoderCopyBufferToBuffer(void *encoder, void *src, uint64_t src_offset, void *dst, uint64_t dst_offset, uint64_t size);
extern void wgpuCommandEncoderWriteTimestamp(void *encoder, void *queries, uint32_t index);
extern void wgpuCommandEncoderResolveQuerySet(void *encoder, void *queries, uint32_t first, uint32_t count, void *dst, uint64_t offset);
extern void wgpuComputePassEncoderSetPipeline(void *pass, void *pipeline);
extern void wgpuComputePassEncoderSetBindGroup(void *pass, uint32_t index, void *group, size_t n, uint32_t const *offsets);
extern void wgpuComputePassEncoderDispatchWorkgroups(void *pass, uint32_t x, uint32_t y, uint32_t z);
extern void wgpuQueueOnSubmittedWorkDone(void *queue, void (*cb)(int, void *), void *userdata);
extern void wgpuQueueSubmit(void *queue, size_t n, void *const *commands);
extern void wgpuQueueWriteBuffer(void *queue, void *buffer, uint64_t offset, void const *data, size_t size);

// A dispatch when pipeline is set, else a copy.
typedef struct {
	void *pipeline, *group;
	uint32_t groups[3], dynamic, offset;
	void *src, *dst;
	uint64_t src_offset, dst_offset, size;
} port_command;

// Two timestamps that are resolved, and copied to a buffer of their own; none when queries is null.
typedef struct { void *queries; uint32_t first; void *resolved, *staging; uint64_t size; } port_stamps;

typedef struct { void const *next; char const *label; int type; uint32_t count; void const *statistics; size_t n; } port_queries_desc;

static void port_end_pass(void **pass) {
	if (!*pass) return;
	wgpuComputePassEncoderEnd(*pass);
	wgpuComputePassEncoderRelease(*pass);
	*pass = NULL;
}

typedef struct {
	void *queue;
	port_command const *commands;
	size_t n;
	port_stamps const *stamps;
	port_state *state;
} port_submission;

static void port_on_done(int status, void *ud) { __atomic_add_fetch(&((port_state *)ud)->done, 1, __ATOMIC_RELEASE); }

// port_do_run records and submits. It submits nothing when there is an error.
static void port_do_run(void *submission) {
	port_submission *s = submission;
	port_stamps const *stamps = s->stamps;
	port_enter(s->state);
	void *encoder = wgpuDeviceCreateCommandEncoder(s->state->device, NULL), *pass = NULL;
	if (stamps->queries) wgpuCommandEncoderWriteTimestamp(encoder, stamps->queries, stamps->first);
	for (port_command const *c = s->commands; c < s->commands + s->n; c++) {
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
	void *commands = s->state->error ? NULL : wgpuCommandEncoderFinish(encoder, NULL);
	wgpuCommandEncoderRelease(encoder);
	port_leave(s->state);
	if (!s->state->error) wgpuQueueSubmit(s->queue, 1, &commands);
	if (commands) wgpuCommandBufferRelease(commands);
	if (!s->state->error) wgpuQueueOnSubmittedWorkDone(s->queue, port_on_done, s->state);
}

static void port_run(void *queue, port_command const *c, size_t n, port_stamps const *stamps, port_state *state) {
	port_submission s = { queue, c, n, stamps, state };
	port_guard(state, port_do_run, &s);
}

typedef struct { void *queue, *buffer; uint64_t offset; void const *data; size_t size; port_state *state; } port_write_args;
static void port_do_write(void *args) {
	port_write_args *w = args;
	port_enter(w->state);
	wgpuQueueWriteBuffer(w->queue, w->buffer, w->offset, w->data, w->size);
	port_leave(w->state);
}
static void port_write(void *queue, void *buffer, uint64_t offset, void const *data, size_t size, port_state *state) {
	port_write_args w = { queue, buffer, offset, data, size, state };
	port_guard(state, port_do_write, &w);
}
*/
import "C"

import (
	"runtime"
	"unsafe"

	"github.com/seed90331342/attn/gpu/internal/port"
)

// nativeEncoder collects a submission. Its memory is used again by the next one.
type nativeEncoder struct {
	commands []C.port_command
	stamps   C.port_stamps
}

// Submit starts steps.
func (l *library) Submit(steps []port.Step, stamps *port.Stamps) (port.Ticket, error) {
	defer l.scoped()()
	e := &l.encoder
	e.commands, e.stamps = e.commands[:0], C.port_stamps{}
	for i := range steps {
		s := &steps[i]
		c := C.port_command{
			groups:  [3]C.uint32_t{C.uint32_t(s.Groups[0]), C.uint32_t(s.Groups[1]), C.uint32_t(s.Groups[2])},
			dynamic: C.uint32_t(s.Dynamic), offset: C.uint32_t(s.Offset[0]),
			src_offset: C.uint64_t(s.SrcOffset), dst_offset: C.uint64_t(s.DstOffset), size: C.uint64_t(s.Size),
		}
		if s.Pipeline != nil {
			c.pipeline, c.group = s.Pipeline.(*pipeline).ref, s.Group.(unsafe.Pointer)
		} else {
			c.src, c.dst = s.Src.(unsafe.Pointer), s.Dst.(unsafe.Pointer)
		}
		e.commands = append(e.commands, c)
	}
	if stamps != nil {
		e.stamps = C.port_stamps{
			queries: stamps.Queries.(unsafe.Pointer), first: C.uint32_t(stamps.First),
			resolved: stamps.Resolved.(unsafe.Pointer), staging: stamps.Staging.(unsafe.Pointer), size: port.StampBytes,
		}
	}
	C.port_run(l.queue, unsafe.SliceData(e.commands), C.size_t(len(e.commands)), &e.stamps, l.state)
	if err := l.outcome(); err != nil {
		return 0, err
	}
	l.submitted++
	return l.submitted, nil
}

func (l *library) CreateGroup(p port.Object, spans []port.Span) (port.Object, error) {
	var entries [port.MaxBindings]C.port_entry
	for i, s := range spans {
		entries[i] = C.port_entry{binding: C.uint32_t(i), buffer: s.Buffer.(unsafe.Pointer), offset: C.uint64_t(s.Offset), size: C.uint64_t(s.Size)}
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&entries)
	desc := C.port_group_desc{layout: p.(*pipeline).layoutRef, count: C.size_t(len(spans)), entries: &entries[0]}
	return l.create(C.wgpuDeviceCreateBindGroup, C.wgpuBindGroupRelease, unsafe.Pointer(&desc))
}

func (l *library) ReleaseGroup(g port.Object) { l.release(C.wgpuBindGroupRelease, g.(unsafe.Pointer)) }

func (l *library) CreateQueries(count int) (port.Object, error) {
	desc := C.port_queries_desc{_type: 2, count: C.uint32_t(count)} // timestamps
	return l.create(C.wgpuDeviceCreateQuerySet, C.wgpuQuerySetRelease, unsafe.Pointer(&desc))
}

func (l *library) ReleaseQueries(q port.Object) { l.release(C.wgpuQuerySetRelease, q.(unsafe.Pointer)) }

// Write starts a copy of data, which is not empty, to a buffer.
func (l *library) Write(b port.Object, offset uint64, data []byte) error {
	defer l.scoped()()
	C.port_write(l.queue, b.(unsafe.Pointer), C.uint64_t(offset), unsafe.Pointer(unsafe.SliceData(data)), C.size_t(len(data)), l.state)
	return l.outcome()
}
