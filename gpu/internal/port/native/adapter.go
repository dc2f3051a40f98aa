// Package native is github.com/rajveermalviya/go-webgpu/wgpu as a library of the port, through cgo:
// wgpu-native, linked statically.
package native

/*
#include "native.h"

// These are the calls of wgpu-native that the Go binding does not make safely. It passes C pointers to Go variables
// that nothing keeps alive (device lost, map), and it cannot set the handler of errors outside a scope, whose default
// aborts the process. Here all callbacks are C functions that write to C memory.

// The limits have the fields of the binding's type Limits, in the same order.
typedef struct { void *next; uint64_t limits[24]; } port_required_limits;
typedef void (*port_message_fn)(int reason, char const *message, void *userdata);
typedef struct {
	void *next;
	char const *label;
	size_t features_count;
	void const *features;
	port_required_limits const *required_limits;
	struct { void *next; char const *label; } default_queue;
	port_message_fn lost;
	void *lost_userdata;
} port_device_desc;

extern void wgpuAdapterRequestDevice(void *adapter, void const *desc, void (*cb)(int, void *, char const *, void *), void *userdata);
extern void wgpuDeviceSetUncapturedErrorCallback(void *device, port_message_fn cb, void *userdata);
extern void wgpuBufferMapAsync(void *buffer, uint32_t mode, size_t offset, size_t size, void (*cb)(int, void *), void *userdata);
extern void *wgpuDeviceGetQueue(void *device);

static void port_on_lost(int reason, char const *message, void *ud) { port_note(ud, message); ((port_state *)ud)->lost = 1; }
static void port_on_map(int status, void *ud) { ((port_state *)ud)->mapped = status + 1; }
static void port_on_device(int status, void *device, char const *message, void *ud) {
	port_note(ud, message);
	if (status == 0) ((port_state *)ud)->device = device;
}

// port_quiet makes Mesa's layer that orders devices find no Wayland display where there is
// none: without XDG_RUNTIME_DIR, libwayland prints an error to standard error at each look.
// The folder does not exist, and Go's environment, which child processes get, stays.
static void port_quiet(void) {
#ifdef __linux__
	char const *dir = getenv("XDG_RUNTIME_DIR");
	if (!dir || dir[0] != '/') setenv("XDG_RUNTIME_DIR", "/nonexistent", 1);
#endif
}

typedef struct { void *adapter; port_device_desc const *desc; port_state *state; } port_request;
static void port_do_open(void *request) {
	port_request *r = request;
	wgpuAdapterRequestDevice(r->adapter, r->desc, port_on_device, r->state);
}

// Buffers are created and unmapped without the binding's error scopes, which would take the
// errors of a compilation on another thread for theirs.
typedef struct { void const *next; char const *label; uint32_t usage; uint64_t size; bool mapped; } port_buffer_desc;
extern void *wgpuBufferGetMappedRange(void *buffer, size_t offset, size_t size);
static void port_unmap(void *buffer, port_state *state) {
	port_enter(state);
	port_guard(state, wgpuBufferUnmap, buffer);
	port_leave(state);
}

static void port_open(void *adapter, void const *limits, size_t size, bool timestamps, port_state *state) {
	port_required_limits required = { 0 };
	memcpy(required.limits, limits, size);
	int const timestamp_query = 3; // WGPUFeatureName
	port_device_desc desc = { .label = "attn", .features_count = timestamps, .features = &timestamp_query, .required_limits = &required, .lost = port_on_lost, .lost_userdata = state };
	port_request r = { adapter, &desc, state };
	if (port_try(port_do_open, &r)) {
		port_note(state, "wgpu-native panicked");
		state->lost = 1;
	}
	if (state->device) wgpuDeviceSetUncapturedErrorCallback(state->device, port_on_error, state);
}
static void port_map(void *buffer, size_t offset, size_t size, port_state *state) {
	state->mapped = 0;
	port_enter(state);
	wgpuBufferMapAsync(buffer, 1, offset, size, port_on_map, state);
	port_leave(state);
}
static void port_poll(port_state *state) { port_guard(state, port_do_poll, state->device); }
static void port_release(port_state *state) { port_guard(state, wgpuDeviceRelease, state->device); }
*/
import "C"

import (
	"fmt"
	"math"
	"reflect"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gogpu/gputypes"
	"github.com/rajveermalviya/go-webgpu/wgpu"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Provider names the library behind the port.
const Provider = "go-webgpu v0.17.1 (wgpu-native)"

// nativeBackends excludes OpenGL, whose loader prints to standard error on machines without a display.
const nativeBackends = wgpu.InstanceBackend_Vulkan | wgpu.InstanceBackend_Metal | wgpu.InstanceBackend_DX12

// library is a device of wgpu-native.
type library struct {
	state     *C.port_state
	queue     unsafe.Pointer
	scopes    sync.Mutex  // see scoped
	broken    atomic.Bool // a compilation panicked, see unsound
	submitted port.Ticket
	timed     bool
	encoder   nativeEncoder
}

// newState returns the state of a device that is open already, or of one to open. That of a device is
// never freed, because the library may report a loss after its release. It has about 1 KB.
func newState(device unsafe.Pointer, shared C.int) *C.port_state {
	s := (*C.port_state)(C.calloc(1, C.sizeof_port_state))
	s.device, s.shared = device, shared
	return s
}

// Traits implements port.Library. Errors of compilations reach one state of the device.
func (l *library) Traits() port.Traits { return port.Traits{DynamicStep: 1, Timed: l.timed} }

// handleOf returns the C object of one of the binding's types, which have it in an unexported field.
func handleOf(object any) unsafe.Pointer {
	return reflect.ValueOf(object).Elem().FieldByName("ref").UnsafePointer()
}

// load keeps the drivers loaded until the process ends, by an instance without devices. NVIDIA's driver
// fails when it has been loaded and unloaded some dozens of times.
var load = sync.OnceValue(func() *wgpu.Instance {
	C.port_quiet()                      // before the driver has threads that read the environment
	wgpu.SetLogLevel(wgpu.LogLevel_Off) // all errors are returned as values
	return newInstance()
})

func newInstance() *wgpu.Instance {
	return wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: nativeBackends})
}

// Adapters lists the adapters in the library's order, best first.
//
// Each call makes an instance, and its adapters and devices keep it alive. The library destroys a device, with its
// compiled pipelines and its driver thread, only together with the instance. One instance for the whole process would
// therefore leak every device that a program closes.
func Adapters() (all []port.LibraryAdapter, _ error) {
	load()
	instance := newInstance()
	defer instance.Release()
	for _, a := range instance.EnumerateAdapters(&wgpu.InstanceEnumerateAdapterOptons{Backends: nativeBackends}) {
		all = append(all, adapter{a})
	}
	return all, nil
}

type adapter struct{ *Adapter }

func (a adapter) Limits() gputypes.Limits { return limitsOf(a.Adapter) }

func (a adapter) Info() port.Info {
	p := a.GetProperties()
	kinds := map[wgpu.AdapterType]gputypes.DeviceType{ // others are the zero, DeviceTypeOther
		wgpu.AdapterType_DiscreteGPU: gputypes.DeviceTypeDiscreteGPU, wgpu.AdapterType_IntegratedGPU: gputypes.DeviceTypeIntegratedGPU,
		wgpu.AdapterType_CPU: gputypes.DeviceTypeCPU,
	}
	apis := map[wgpu.BackendType]gputypes.Backend{
		wgpu.BackendType_Vulkan: gputypes.BackendVulkan, wgpu.BackendType_Metal: gputypes.BackendMetal, wgpu.BackendType_D3D12: gputypes.BackendDX12,
	}
	return port.Info{Library: Provider, AdapterInfo: gputypes.AdapterInfo{
		Name: p.Name, Vendor: p.VendorName, VendorID: p.VendorId, DeviceID: p.DeviceId,
		Driver: p.DriverDescription, DeviceType: kinds[p.AdapterType], Backend: apis[p.BackendType],
	}}
}

// limitsOf returns the limits of an adapter or a device.
func limitsOf(a interface{ GetLimits() wgpu.SupportedLimits }) (l gputypes.Limits) {
	has := a.GetLimits().Limits
	port.CopyFields(&l, &has)
	// NVIDIA's driver names no limit. As a request, the library takes the largest number for the default of 256 MiB.
	l.MaxBufferSize = min(l.MaxBufferSize, math.MaxInt64)
	return l
}

func (a adapter) Open(l gputypes.Limits) (port.Library, error) {
	required := wgpu.Limits{MaxInterStageShaderComponents: wgpu.LimitU32Undefined} // the library's default
	port.CopyFields(&required, &l)
	lib := &library{state: newState(nil, 0), timed: a.HasFeature(wgpu.FeatureName_TimestampQuery)}
	C.port_open(handleOf(a.Adapter), unsafe.Pointer(&required), C.size_t(unsafe.Sizeof(required)), C.bool(lib.timed), lib.state)
	if err := lib.Lost(); err != nil { // the library panicked, and its instance is unsound
		return nil, err
	}
	if lib.state.device == nil {
		return nil, port.Fault(message(lib.state), port.ErrInvalid)
	}
	lib.queue = C.wgpuDeviceGetQueue(lib.state.device)
	return lib, nil
}

// The library's types, of which programs have objects.
type (
	Adapter = wgpu.Adapter
	Device  = wgpu.Device
	Buffer  = wgpu.Buffer
)

// Share returns a library over a program's device, to which it keeps a reference until Close, the
// device's limits, and a description of its adapter.
func Share(a *Adapter, dev *Device) (port.Library, gputypes.Limits, port.Info, error) {
	device := handleOf(dev)
	C.wgpuDeviceReference(device)
	lib := &library{state: newState(device, 1), queue: C.wgpuDeviceGetQueue(device), timed: dev.HasFeature(wgpu.FeatureName_TimestampQuery)}
	return lib, limitsOf(dev), adapter{a}.Info(), nil
}

// Import implements port.Sharer. The library does not report whether a buffer is mapped or destroyed.
func (l *library) Import(x any) (raw port.Object, size uint64, usage gputypes.BufferUsage, err error) {
	b := x.(*Buffer)
	if reflect.ValueOf(b).Elem().FieldByName("deviceRef").UnsafePointer() != l.state.device {
		return nil, 0, 0, port.ErrForeign
	}
	return handleOf(b), b.GetSize(), gputypes.BufferUsage(b.GetUsage()), nil
}

func (l *library) Reference(b port.Object) { C.wgpuBufferReference(b.(unsafe.Pointer)) }

func (l *library) Dereference(b port.Object) { l.ReleaseBuffer(b) }

// scoped takes the lock of the error scopes of a program's device and returns the function that frees it. A compilation
// may run next to another call of the library, and the scopes belong to the device.
func (l *library) scoped() func() {
	if l.state.shared == 0 {
		return func() {}
	}
	l.scopes.Lock()
	return l.scopes.Unlock
}

func (l *library) CreateBuffer(size uint64, usage gputypes.BufferUsage) (port.Object, error) {
	desc := C.port_buffer_desc{size: C.uint64_t(size), usage: C.uint32_t(usage)}
	return l.create(C.wgpuDeviceCreateBuffer, C.wgpuBufferRelease, unsafe.Pointer(&desc))
}

// create calls a function that creates an object, which release releases after an error.
func (l *library) create(f, release, desc unsafe.Pointer) (port.Object, error) {
	defer l.scoped()()
	object := C.port_create((*C.port_creator)(f), desc, l.state)
	if err := l.outcome(); err != nil {
		l.release(release, object)
		return nil, err
	}
	return object, nil
}

// release calls a function that releases an object, unless there is none.
func (l *library) release(f, object unsafe.Pointer) {
	if object != nil && !l.unsound() {
		C.port_do((*C.port_action)(f), object)
	}
}

// ReleaseBuffer polls, because the library frees released memory only then.
func (l *library) ReleaseBuffer(b port.Object) {
	if !l.unsound() {
		C.wgpuBufferRelease(b.(unsafe.Pointer))
		C.port_poll(l.state)
	}
}

func (l *library) CopyMapped(x port.Object, offset uint64, dst []byte) error {
	b := x.(unsafe.Pointer)
	copy(dst, unsafe.Slice((*byte)(C.wgpuBufferGetMappedRange(b, C.size_t(offset), C.size_t(len(dst)))), len(dst)))
	defer l.scoped()()
	C.port_unmap(b, l.state)
	return l.outcome()
}

func (l *library) StartMap(b port.Object, offset, size uint64) error {
	defer l.scoped()()
	C.port_map(b.(unsafe.Pointer), C.size_t(offset), C.size_t(size), l.state)
	return nil
}

// EndMap ends a map that is pending by running its callback. The library aborts the process when it
// drops a callback that never ran, which the release of a lost device does.
func (l *library) EndMap(b port.Object) {
	if l.state.mapped == 0 && !l.unsound() {
		defer l.scoped()()
		C.port_unmap(b.(unsafe.Pointer), l.state)
	}
}

// unsound reports whether the library must not be called any more: what the device has stays allocated.
func (l *library) unsound() bool { return l.state.unsound != 0 || l.broken.Load() }

func (l *library) Close() {
	if !l.unsound() {
		C.wgpuQueueRelease(l.queue)
		C.port_release(l.state)
	}
}

func (l *library) Lost() error {
	if l.state.lost == 0 {
		return nil
	}
	return lossOf(l.state)
}

// Error types of webgpu.h.
const (
	errorOutOfMemory = 2
	errorDeviceLost  = 5
)

// outcome returns the error that callbacks have noted since the last call.
func (l *library) outcome() error { return outcome(l.state, port.ErrInvalid) }

// outcome returns the error that callbacks have noted in s since the last call. kind is the
// sentinel of all but lost devices and lack of memory.
func outcome(s *C.port_state, kind error) error {
	noted := s.error
	s.error = 0
	switch {
	case s.lost != 0 || noted == errorDeviceLost:
		s.lost = 1
		return lossOf(s)
	case noted == 0:
		return nil
	case noted == errorOutOfMemory:
		kind = port.ErrMemory
	}
	return port.Fault(message(s), kind)
}

func lossOf(s *C.port_state) error { return fmt.Errorf("%s: %w", message(s), port.ErrLost) }

// message returns the text of the last callback.
func message(s *C.port_state) string { return C.GoString(&s.message[0]) }

// Poll runs the callbacks that are due and returns the last submission that has ended.
func (l *library) Poll() (port.Ticket, error) {
	C.port_poll(l.state)
	return port.Ticket(l.state.done), l.outcome()
}

// Mapped reports whether the map of StartMap has ended.
func (l *library) Mapped() (bool, error) {
	if l.state.mapped == 0 {
		C.port_poll(l.state)
	}
	if err := l.outcome(); err != nil {
		return false, err
	}
	if s := l.state.mapped - 1; s > 0 {
		return false, fmt.Errorf("map ended with status %d: %w", s, port.ErrInvalid)
	}
	return l.state.mapped != 0, nil
}
