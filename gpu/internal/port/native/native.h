#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// The declarations of the package are those of webgpu.h in wgpu-native v0.17. Handles point to
// memory of the library.

typedef void *port_creator(void *of, void const *desc);
typedef void port_action(void *object);
// Functions that Go names have prototypes here, because cgo takes functions declared by a typedef for variables.
extern void *wgpuDeviceCreateBuffer(void *, void const *), *wgpuDeviceCreateBindGroup(void *, void const *),
	*wgpuDeviceCreateQuerySet(void *, void const *);
extern void wgpuBufferRelease(void *), wgpuBindGroupRelease(void *), wgpuBindGroupLayoutRelease(void *),
	wgpuComputePipelineRelease(void *), wgpuQuerySetRelease(void *), wgpuQueueRelease(void *),
	wgpuDeviceReference(void *), wgpuBufferReference(void *);
extern port_creator wgpuDeviceCreateShaderModule, wgpuDeviceCreateBindGroupLayout, wgpuDeviceCreatePipelineLayout,
	wgpuDeviceCreateComputePipeline, wgpuDeviceCreateCommandEncoder, wgpuCommandEncoderBeginComputePass,
	wgpuCommandEncoderFinish;
extern port_action wgpuDeviceRelease, wgpuBufferUnmap, wgpuShaderModuleRelease, wgpuPipelineLayoutRelease,
	wgpuCommandEncoderRelease, wgpuComputePassEncoderEnd, wgpuComputePassEncoderRelease, wgpuCommandBufferRelease;

// The results of callbacks. Every call that can run a callback holds the device's lock, but
// for compilations, which have a state of their own.
typedef struct {
	int lost;
	int error; // type of the first error outside a scope, 0 for none
	int mapped; // status + 1 of the last map, 0 while it is pending
	uint64_t done; // submissions that have ended
	char message[1024];
	void *device; // null until it is open
	int shared; // the program owns the device, and with it the handlers of errors and of its loss
	int unsound; // the library panicked although the device is not lost: it is left alone from then on
} port_state;

// The state for the errors of a compilation on this thread, which does not hold the device's
// lock; else null.
extern _Thread_local port_state *port_compiling;

extern bool wgpuDevicePoll(void *device, bool wait, void const *submission);
static inline void port_do_poll(void *device) { wgpuDevicePoll(device, 0, NULL); }

static inline void port_do(port_action *f, void *object) { f(object); }
static inline void port_note(port_state *s, char const *message) {
	strncpy(s->message, message ? message : "", sizeof s->message - 1);
}
static inline void port_on_error(int type, char const *message, void *ud) {
	port_state *s = port_compiling ? port_compiling : ud;
	if (type == 0 || s->error) return; // later ones follow from the first
	port_note(s, message);
	s->error = type;
}

extern void wgpuDevicePushErrorScope(void *device, int filter);
extern void wgpuDevicePopErrorScope(void *device, void (*cb)(int, char const *, void *), void *userdata);

// On a program's device, errors between port_enter and port_leave go to the state and not
// to the program's handler.
static inline void port_enter(port_state *s) {
	if (!s->shared) return;
	wgpuDevicePushErrorScope(s->device, 1); // lack of memory
	wgpuDevicePushErrorScope(s->device, 0); // violated rules
}
static inline void port_leave(port_state *s) {
	if (!s->shared) return;
	wgpuDevicePopErrorScope(s->device, port_on_error, s);
	wgpuDevicePopErrorScope(s->device, port_on_error, s);
}
static inline void *port_create(port_creator *create, void const *desc, port_state *state) {
	port_enter(state);
	void *object = create(state->device, desc);
	port_leave(state);
	return object;
}

// port_try calls f(arg). It returns 1 when the library panicked, where that can be caught.
int port_try(void (*f)(void *), void *arg);

// port_guard calls f(arg), in which the library panics when the device is lost, and in many
// places when host memory is exhausted. After either the device counts as lost.
static inline void port_guard(port_state *s, void (*f)(void *), void *arg) {
	if (!port_try(f, arg)) return;
	strncpy(s->message, "wgpu-native panicked, and wrote the cause to standard error", sizeof s->message - 1);
	s->lost = 1;
	s->unsound = !port_try(port_do_poll, s->device);
}
