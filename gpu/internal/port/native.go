//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

/*
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// The few calls of wgpu-native that the Go binding does not make safely: it
// hands C pointers to Go variables that nothing keeps alive (device lost, map),
// and has no way to set the handler of errors outside a scope, whose default
// aborts the process. Here all callbacks are C and write to C memory.
// Declarations follow webgpu.h as wgpu-native v0.17 ships it.

typedef struct {
	uint32_t maxTextureDimension1D, maxTextureDimension2D, maxTextureDimension3D, maxTextureArrayLayers;
	uint32_t maxBindGroups, maxBindingsPerBindGroup;
	uint32_t maxDynamicUniformBuffersPerPipelineLayout, maxDynamicStorageBuffersPerPipelineLayout;
	uint32_t maxSampledTexturesPerShaderStage, maxSamplersPerShaderStage;
	uint32_t maxStorageBuffersPerShaderStage, maxStorageTexturesPerShaderStage, maxUniformBuffersPerShaderStage;
	uint64_t maxUniformBufferBindingSize, maxStorageBufferBindingSize;
	uint32_t minUniformBufferOffsetAlignment, minStorageBufferOffsetAlignment, maxVertexBuffers;
	uint64_t maxBufferSize;
	uint32_t maxVertexAttributes, maxVertexBufferArrayStride;
	uint32_t maxInterStageShaderComponents, maxInterStageShaderVariables;
	uint32_t maxColorAttachments, maxColorAttachmentBytesPerSample;
	uint32_t maxComputeWorkgroupStorageSize, maxComputeInvocationsPerWorkgroup;
	uint32_t maxComputeWorkgroupSizeX, maxComputeWorkgroupSizeY, maxComputeWorkgroupSizeZ;
	uint32_t maxComputeWorkgroupsPerDimension;
} port_limits;

typedef struct { void *next; port_limits limits; } port_required_limits;
typedef void (*port_lost_fn)(int reason, char const *message, void *userdata);
typedef void (*port_error_fn)(int type, char const *message, void *userdata);
typedef struct {
	void *next;
	char const *label;
	size_t features_count;
	void const *features;
	port_required_limits const *required_limits;
	struct { void *next; char const *label; } default_queue;
	port_lost_fn lost;
	void *lost_userdata;
} port_device_desc;

extern void wgpuAdapterRequestDevice(void *adapter, void const *desc, void (*cb)(int, void *, char const *, void *), void *userdata);
extern void wgpuDeviceSetUncapturedErrorCallback(void *device, port_error_fn cb, void *userdata);
extern void wgpuBufferMapAsync(void *buffer, uint32_t mode, size_t offset, size_t size, void (*cb)(int, void *), void *userdata);
extern void wgpuQueueOnSubmittedWorkDone(void *queue, void (*cb)(int, void *), void *userdata);

// What the callbacks leave behind. The owner's lock is held at every call that
// can run a callback, so plain fields do.
typedef struct {
	int lost;
	int error; // type of the last error outside a scope, 0 for none
	int mapped; // status + 1 of the last map, 0 while it is pending
	uint64_t done; // submissions that have ended
	char message[1024];
} port_state;

static void port_note(port_state *s, char const *message) {
	strncpy(s->message, message ? message : "", sizeof s->message - 1);
}
static void port_on_lost(int reason, char const *message, void *ud) { port_note(ud, message); ((port_state *)ud)->lost = 1; }
static void port_on_error(int type, char const *message, void *ud) {
	if (type == 0) return;
	port_note(ud, message);
	((port_state *)ud)->error = type;
}
static void port_on_map(int status, void *ud) { ((port_state *)ud)->mapped = status + 1; }
static void port_on_done(int status, void *ud) { ((port_state *)ud)->done++; }

typedef struct { int status; void *device; char message[1024]; } port_opened;
static void port_on_device(int status, void *device, char const *message, void *ud) {
	port_opened *o = ud;
	o->status = status + 1;
	o->device = device;
	strncpy(o->message, message ? message : "", sizeof o->message - 1);
}

static port_state *port_new_state(void) { return calloc(1, sizeof(port_state)); }
static void *port_open(void *adapter, port_limits const *limits, int timestamps, port_state *state, int *status, char *message, size_t n) {
	port_required_limits required = { NULL, *limits };
	int const timestamp_query = 3; // WGPUFeatureName
	port_device_desc desc = { .label = "attn", .features_count = timestamps, .features = &timestamp_query, .required_limits = &required, .lost = port_on_lost, .lost_userdata = state };
	port_opened *o = calloc(1, sizeof *o);
	wgpuAdapterRequestDevice(adapter, &desc, port_on_device, o);
	void *device = o->status == 1 ? o->device : NULL;
	*status = o->status;
	strncpy(message, o->message, n - 1);
	free(o);
	if (device) wgpuDeviceSetUncapturedErrorCallback(device, port_on_error, state);
	return device;
}
static void port_map(void *buffer, size_t offset, size_t size, port_state *state) {
	state->mapped = 0;
	wgpuBufferMapAsync(buffer, 1, offset, size, port_on_map, state);
}
static void port_notify(void *queue, port_state *state) { wgpuQueueOnSubmittedWorkDone(queue, port_on_done, state); }
*/
import "C"

import (
	"fmt"
	"reflect"
	"sync"
	"time"
	"unsafe"

	"github.com/gogpu/gputypes"
	"github.com/rajveermalviya/go-webgpu/wgpu"
)

// Provider names the library behind the port.
const Provider = "go-webgpu v0.17.1 (wgpu-native)"

// mapOffsetAlignment is what WebGPU asks of the offset of a map.
const mapOffsetAlignment = 8

// nativeBackends leaves out OpenGL, whose loader prints to standard error on
// machines without a display.
const nativeBackends = wgpu.InstanceBackend_Vulkan | wgpu.InstanceBackend_Metal | wgpu.InstanceBackend_DX12

// handleOf returns the C object behind one of the binding's types, which keep it
// in an unexported field.
func handleOf(object any) unsafe.Pointer {
	return reflect.ValueOf(object).Elem().FieldByName("ref").UnsafePointer()
}

// deviceOf makes the binding's Device from a C object.
func deviceOf(ref unsafe.Pointer) *wgpu.Device {
	d := new(wgpu.Device)
	*(*unsafe.Pointer)(unsafe.Pointer(d)) = ref
	return d
}

// Adapters lists the adapters in the library's order, best first. The caller
// releases them. It returns ErrNoAdapter when there are none.
//
// Each call makes an instance, and its adapters and devices keep it alive. The
// library destroys a device, with its compiled pipelines and its driver thread, only
// together with the instance. One instance for the whole process would therefore
// leak every device that a program closes.
func Adapters() ([]Adapter, error) {
	wgpu.SetLogLevel(wgpu.LogLevel_Off) // every error comes back as a value
	instance := wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: nativeBackends})
	defer instance.Release()
	var all []Adapter
	for _, a := range instance.EnumerateAdapters(&wgpu.InstanceEnumerateAdapterOptons{Backends: nativeBackends}) {
		all = append(all, &nativeAdapter{a: a})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no Vulkan, Metal or DX12 driver answered: %w", ErrNoAdapter)
	}
	return all, nil
}

type nativeAdapter struct {
	once sync.Once
	a    *wgpu.Adapter
}

func (a *nativeAdapter) Release() { a.once.Do(a.a.Release) }

func (a *nativeAdapter) Info() gputypes.AdapterInfo {
	p := a.a.GetProperties()
	info := gputypes.AdapterInfo{
		Name: p.Name, Vendor: p.VendorName, VendorID: p.VendorId, DeviceID: p.DeviceId,
		Driver: p.DriverDescription, DeviceType: gputypes.DeviceTypeOther,
	}
	switch p.AdapterType {
	case wgpu.AdapterType_DiscreteGPU:
		info.DeviceType = gputypes.DeviceTypeDiscreteGPU
	case wgpu.AdapterType_IntegratedGPU:
		info.DeviceType = gputypes.DeviceTypeIntegratedGPU
	case wgpu.AdapterType_CPU:
		info.DeviceType = gputypes.DeviceTypeCPU
	}
	switch p.BackendType {
	case wgpu.BackendType_Vulkan:
		info.Backend = gputypes.BackendVulkan
	case wgpu.BackendType_Metal:
		info.Backend = gputypes.BackendMetal
	case wgpu.BackendType_D3D12:
		info.Backend = gputypes.BackendDX12
	}
	return info
}

// Limits copies field by field: the two libraries' structures differ in order
// and in a few fields that compute does not meet.
func (a *nativeAdapter) Limits() gputypes.Limits {
	l := a.a.GetLimits().Limits
	return gputypes.Limits{
		MaxTextureDimension1D:                     l.MaxTextureDimension1D,
		MaxTextureDimension2D:                     l.MaxTextureDimension2D,
		MaxTextureDimension3D:                     l.MaxTextureDimension3D,
		MaxTextureArrayLayers:                     l.MaxTextureArrayLayers,
		MaxBindGroups:                             l.MaxBindGroups,
		MaxBindingsPerBindGroup:                   l.MaxBindingsPerBindGroup,
		MaxDynamicUniformBuffersPerPipelineLayout: l.MaxDynamicUniformBuffersPerPipelineLayout,
		MaxDynamicStorageBuffersPerPipelineLayout: l.MaxDynamicStorageBuffersPerPipelineLayout,
		MaxSampledTexturesPerShaderStage:          l.MaxSampledTexturesPerShaderStage,
		MaxSamplersPerShaderStage:                 l.MaxSamplersPerShaderStage,
		MaxStorageBuffersPerShaderStage:           l.MaxStorageBuffersPerShaderStage,
		MaxStorageTexturesPerShaderStage:          l.MaxStorageTexturesPerShaderStage,
		MaxUniformBuffersPerShaderStage:           l.MaxUniformBuffersPerShaderStage,
		MaxUniformBufferBindingSize:               l.MaxUniformBufferBindingSize,
		MaxStorageBufferBindingSize:               l.MaxStorageBufferBindingSize,
		MinUniformBufferOffsetAlignment:           l.MinUniformBufferOffsetAlignment,
		MinStorageBufferOffsetAlignment:           l.MinStorageBufferOffsetAlignment,
		MaxVertexBuffers:                          l.MaxVertexBuffers,
		MaxBufferSize:                             l.MaxBufferSize,
		MaxVertexAttributes:                       l.MaxVertexAttributes,
		MaxVertexBufferArrayStride:                l.MaxVertexBufferArrayStride,
		MaxInterStageShaderVariables:              l.MaxInterStageShaderVariables,
		MaxColorAttachments:                       l.MaxColorAttachments,
		MaxColorAttachmentBytesPerSample:          l.MaxColorAttachmentBytesPerSample,
		MaxComputeWorkgroupStorageSize:            l.MaxComputeWorkgroupStorageSize,
		MaxComputeInvocationsPerWorkgroup:         l.MaxComputeInvocationsPerWorkgroup,
		MaxComputeWorkgroupSizeX:                  l.MaxComputeWorkgroupSizeX,
		MaxComputeWorkgroupSizeY:                  l.MaxComputeWorkgroupSizeY,
		MaxComputeWorkgroupSizeZ:                  l.MaxComputeWorkgroupSizeZ,
		MaxComputeWorkgroupsPerDimension:          l.MaxComputeWorkgroupsPerDimension,
		MaxPushConstantSize:                       l.MaxPushConstantSize,
	}
}

func (a *nativeAdapter) Open(l gputypes.Limits) (Device, error) {
	undefined := C.uint32_t(wgpu.LimitU32Undefined) // the library's default
	limits := C.port_limits{
		maxTextureDimension1D:                     C.uint32_t(l.MaxTextureDimension1D),
		maxTextureDimension2D:                     C.uint32_t(l.MaxTextureDimension2D),
		maxTextureDimension3D:                     C.uint32_t(l.MaxTextureDimension3D),
		maxTextureArrayLayers:                     C.uint32_t(l.MaxTextureArrayLayers),
		maxBindGroups:                             C.uint32_t(l.MaxBindGroups),
		maxBindingsPerBindGroup:                   C.uint32_t(l.MaxBindingsPerBindGroup),
		maxDynamicUniformBuffersPerPipelineLayout: C.uint32_t(l.MaxDynamicUniformBuffersPerPipelineLayout),
		maxDynamicStorageBuffersPerPipelineLayout: C.uint32_t(l.MaxDynamicStorageBuffersPerPipelineLayout),
		maxSampledTexturesPerShaderStage:          C.uint32_t(l.MaxSampledTexturesPerShaderStage),
		maxSamplersPerShaderStage:                 C.uint32_t(l.MaxSamplersPerShaderStage),
		maxStorageBuffersPerShaderStage:           C.uint32_t(l.MaxStorageBuffersPerShaderStage),
		maxStorageTexturesPerShaderStage:          C.uint32_t(l.MaxStorageTexturesPerShaderStage),
		maxUniformBuffersPerShaderStage:           C.uint32_t(l.MaxUniformBuffersPerShaderStage),
		maxUniformBufferBindingSize:               C.uint64_t(l.MaxUniformBufferBindingSize),
		maxStorageBufferBindingSize:               C.uint64_t(l.MaxStorageBufferBindingSize),
		minUniformBufferOffsetAlignment:           C.uint32_t(l.MinUniformBufferOffsetAlignment),
		minStorageBufferOffsetAlignment:           C.uint32_t(l.MinStorageBufferOffsetAlignment),
		maxVertexBuffers:                          C.uint32_t(l.MaxVertexBuffers),
		maxBufferSize:                             C.uint64_t(l.MaxBufferSize),
		maxVertexAttributes:                       C.uint32_t(l.MaxVertexAttributes),
		maxVertexBufferArrayStride:                C.uint32_t(l.MaxVertexBufferArrayStride),
		maxInterStageShaderComponents:             undefined,
		maxInterStageShaderVariables:              C.uint32_t(l.MaxInterStageShaderVariables),
		maxColorAttachments:                       C.uint32_t(l.MaxColorAttachments),
		maxColorAttachmentBytesPerSample:          C.uint32_t(l.MaxColorAttachmentBytesPerSample),
		maxComputeWorkgroupStorageSize:            C.uint32_t(l.MaxComputeWorkgroupStorageSize),
		maxComputeInvocationsPerWorkgroup:         C.uint32_t(l.MaxComputeInvocationsPerWorkgroup),
		maxComputeWorkgroupSizeX:                  C.uint32_t(l.MaxComputeWorkgroupSizeX),
		maxComputeWorkgroupSizeY:                  C.uint32_t(l.MaxComputeWorkgroupSizeY),
		maxComputeWorkgroupSizeZ:                  C.uint32_t(l.MaxComputeWorkgroupSizeZ),
		maxComputeWorkgroupsPerDimension:          C.uint32_t(l.MaxComputeWorkgroupsPerDimension),
	}
	// The state outlives the device by design: the library may report its loss
	// late. It is about 1 KB for each device ever opened.
	state := C.port_new_state()
	var status C.int
	message := make([]byte, 1024)
	timestamps := C.int(0)
	if a.a.HasFeature(wgpu.FeatureName_TimestampQuery) {
		timestamps = 1
	}
	ref := C.port_open(handleOf(a.a), &limits, timestamps, state, &status, (*C.char)(unsafe.Pointer(&message[0])), 1024)
	if ref == nil {
		return nil, fmt.Errorf("open device on %q: %s: %w", a.Info().Name, C.GoString((*C.char)(unsafe.Pointer(&message[0]))), ErrInvalid)
	}
	d := &nativeDevice{dev: deviceOf(ref), limits: l, state: state, buffers: map[*nativeBuffer]bool{}, pipelines: map[*nativePipeline]bool{}}
	d.queue = d.dev.GetQueue()
	d.ref, d.queueRef = ref, handleOf(d.queue)
	d.groups = newGroups(freeGroup)
	d.clock.there = timestamps == 1
	return d, nil
}

// nativeDevice holds its lock around every call of the library, because error
// scopes belong to the device and not to the goroutine that pushed them.
type nativeDevice struct {
	dev    *wgpu.Device
	queue  *wgpu.Queue
	limits gputypes.Limits
	state  *C.port_state

	mu        sync.Mutex
	closed    bool
	submitted uint64
	live      Live
	buffers   map[*nativeBuffer]bool
	pipelines map[*nativePipeline]bool
	lastID    uint64 // of a buffer or pipeline
	groups    *groups[unsafe.Pointer]
	encoder   nativeEncoder
	clock     nativeClock

	ref, queueRef unsafe.Pointer // dev and queue as C knows them
}

func (d *nativeDevice) Limits() gputypes.Limits { return d.limits }

func (d *nativeDevice) Live() Live {
	d.mu.Lock()
	defer d.mu.Unlock()
	live := d.live
	live.Groups = len(d.groups.byKey)
	return live
}

func (d *nativeDevice) Lost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state.lost == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", d.note(), ErrLost)
}

// usable is the first thing that a call asks, under the lock.
func (d *nativeDevice) usable() error {
	if d.closed {
		return ErrClosed
	}
	if d.state.lost != 0 {
		return fmt.Errorf("%s: %w", d.note(), ErrLost)
	}
	return nil
}

func (d *nativeDevice) note() string { return C.GoString(&d.state.message[0]) }

// Error types of webgpu.h.
const (
	errorOutOfMemory = 2
	errorDeviceLost  = 5
)

// outcome is the last thing: it turns the call's own error, of which kind
// otherwise says the type, and what the callbacks noted meanwhile into one error.
func (d *nativeDevice) outcome(err, kind error) error {
	noted := d.state.error
	d.state.error = 0
	switch {
	case d.state.lost != 0 || noted == errorDeviceLost:
		d.state.lost = 1
		return fmt.Errorf("%s: %w", d.note(), ErrLost)
	case noted == errorOutOfMemory:
		return fmt.Errorf("%s: %w", d.note(), ErrMemory)
	case err != nil:
		return fmt.Errorf("%s: %w", err.Error(), kind)
	case noted != 0:
		return fmt.Errorf("%s: %w", d.note(), kind)
	}
	return nil
}

type nativeBuffer struct {
	d    *nativeDevice
	b    *wgpu.Buffer
	ref  unsafe.Pointer // b as C knows it
	id   uint64         // in groupKey
	size uint64
}

func (b *nativeBuffer) Size() uint64 { return b.size }

func (b *nativeBuffer) Release() {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	if b.d.buffers[b] {
		b.d.drop(b)
	}
}

func (d *nativeDevice) drop(b *nativeBuffer) {
	delete(d.buffers, b)
	d.live.Buffers--
	d.live.Bytes -= b.size
	d.groups.dropBuffer(b.id)
	b.b.Release()
}

func (d *nativeDevice) CreateBuffer(size uint64, usage gputypes.BufferUsage) (Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	if size > d.limits.MaxBufferSize {
		return nil, fmt.Errorf("buffer of %d bytes is over the limit of %d: %w", size, d.limits.MaxBufferSize, ErrInvalid)
	}
	b, err := d.dev.CreateBuffer(&wgpu.BufferDescriptor{Size: size, Usage: wgpu.BufferUsage(usage)})
	if err := d.outcome(err, ErrInvalid); err != nil {
		if b != nil {
			b.Release()
		}
		return nil, fmt.Errorf("buffer of %d bytes: %w", size, err)
	}
	d.lastID++
	nb := &nativeBuffer{d: d, b: b, ref: handleOf(b), id: d.lastID, size: size}
	d.buffers[nb] = true
	d.live.Buffers++
	d.live.Bytes += size
	return nb, nil
}

func (d *nativeDevice) Write(b Buffer, offset uint64, data []byte) error {
	nb, _ := b.(*nativeBuffer)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if !d.buffers[nb] {
		return fmt.Errorf("write to a buffer that is not there: %w", ErrInvalid)
	}
	if len(data) == 0 {
		return nil
	}
	d.write(nb, offset, data)
	return d.outcome(nil, ErrInvalid)
}

func (d *nativeDevice) Read(b Buffer, offset uint64, dst []byte) error {
	nb, _ := b.(*nativeBuffer)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if !d.buffers[nb] || offset%mapOffsetAlignment != 0 || len(dst)%4 != 0 || offset+uint64(len(dst)) > nb.size {
		return fmt.Errorf("read %d bytes at %d: %w", len(dst), offset, ErrInvalid)
	}
	if len(dst) == 0 {
		return nil
	}
	return d.read(nb.b, offset, dst)
}

// read is Read under the lock.
func (d *nativeDevice) read(b *wgpu.Buffer, offset uint64, dst []byte) error {
	C.port_map(handleOf(b), C.size_t(offset), C.size_t(len(dst)), d.state)
	for start := time.Now(); d.mapStatus() == 0; {
		if err := d.outcome(nil, ErrInvalid); err != nil {
			return err
		}
		if time.Since(start) > stallLimit {
			d.state.lost = 1
			return fmt.Errorf("map did not end within %v: %w", stallLimit, ErrLost)
		}
		if d.dev.Poll(false, nil); d.mapStatus() == 0 {
			pause(start)
		}
	}
	if err := d.outcome(nil, ErrInvalid); err != nil {
		return err
	}
	if s := d.mapStatus() - 1; s != 0 {
		return fmt.Errorf("map ended with status %d: %w", s, ErrInvalid)
	}
	copy(dst, b.GetMappedRange(uint(offset), uint(len(dst))))
	return d.outcome(b.Unmap(), ErrInvalid)
}

func (d *nativeDevice) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	d.drain()
	for p := range d.pipelines {
		d.dropPipeline(p)
	}
	for b := range d.buffers {
		d.drop(b)
	}
	d.clock.release()
	d.closed = true
	d.queue.Release()
	d.dev.Release()
}

func (d *nativeDevice) mapStatus() int { return int(d.state.mapped) }

// ended says how many submissions have ended.
func (d *nativeDevice) ended() uint64 { return uint64(d.state.done) }

// notify asks to be told when everything submitted so far has ended.
func (d *nativeDevice) notify() { C.port_notify(handleOf(d.queue), d.state) }

// drain waits for the queue under the lock, for as long as the device lives.
func (d *nativeDevice) drain() {
	for start := time.Now(); d.ended() < d.submitted; {
		if d.state.lost != 0 || time.Since(start) > stallLimit {
			return
		}
		d.dev.Poll(false, nil)
		pause(start)
	}
}
