//lint:file-ignore U1000 C reads and writes the fields.

package loaded

import (
	"strings"
	"sync"
	"unsafe"
)

// The layouts and numbers of this file are those of webgpu.h since mid-2025, with Dawn's additions.
// Addresses are integers. The arena of a call holds the structures that they point to.

type (
	stringView struct{ data, length uintptr }
	chained    struct {
		next  uintptr
		sType uintptr // 32 bits and padding
	}
	list    struct{ count, items uintptr }
	toggles struct {
		chained
		enabled, disabled list
	}
	instanceDescriptor struct {
		next     uintptr
		features list
		limits   uintptr
	}
	adapterOptions struct {
		next             uintptr
		level, power     uint32
		fallback, kind   uint32
		compatibleWindow uintptr
	}
	adapterInfo struct {
		next                                      uintptr
		vendor, architecture, device, description stringView
		backend, adapter, vendorID, deviceID      uint32
		subgroupMin, subgroupMax                  uint32
	}
	matrixConfigs struct {
		chained
		configs list
	}
	matrixConfig     struct{ component, result, m, n, k uint32 }
	deviceDescriptor struct {
		next     uintptr
		label    stringView
		features list
		limits   uintptr
		queue    descriptor
		lost     callbackInfo
		uncaught struct {
			next, callback uintptr
			user           [2]uintptr
		}
	}
	callbackInfo struct { // a WGPU...CallbackInfo
		next     uintptr
		mode     uint32
		callback uintptr
		user     [2]uintptr
	}
	descriptor struct {
		next  uintptr
		label stringView
	}
	shaderSource struct {
		chained
		code stringView
	}
	listDescriptor struct { // of bind group layouts, and of pipeline layouts with a word at the end
		descriptor
		items list
		_     uintptr
	}
	pipelineDescriptor struct {
		descriptor
		layout  uintptr
		compute struct {
			next, module uintptr
			entry        stringView
			constants    list
		}
	}
	bindGroupEntry struct {
		next, binding, buffer uintptr
		offset, size          uint64
		sampler, view         uintptr
	}
	bindGroupDescriptor struct {
		descriptor
		layout uintptr
		items  list
	}
	bufferDescriptor struct {
		descriptor
		usage, size, mapped uint64
	}
	timestampWrites struct {
		next, set  uintptr
		begin, end uint32
	}
	passDescriptor struct {
		descriptor
		writes uintptr
	}
	querySetDescriptor struct {
		descriptor
		kind, count uint32
	}
	// limits has gputypes' names where they differ in the first letter only.
	limits struct {
		Next uintptr
		MaxTextureDimension1D, MaxTextureDimension2D, MaxTextureDimension3D, MaxTextureArrayLayers, MaxBindGroups, MaxBindGroupsPlusVertexBuffers,
		MaxBindingsPerBindGroup, MaxDynamicUniformBuffersPerPipelineLayout, MaxDynamicStorageBuffersPerPipelineLayout, MaxSampledTexturesPerShaderStage,
		MaxSamplersPerShaderStage, MaxStorageBuffersPerShaderStage, MaxStorageTexturesPerShaderStage, MaxUniformBuffersPerShaderStage uint32
		MaxUniformBufferBindingSize, MaxStorageBufferBindingSize                           uint64
		MinUniformBufferOffsetAlignment, MinStorageBufferOffsetAlignment, MaxVertexBuffers uint32
		MaxBufferSize                                                                      uint64
		MaxVertexAttributes, MaxVertexBufferArrayStride, MaxInterStageShaderVariables, MaxColorAttachments, MaxColorAttachmentBytesPerSample,
		MaxComputeWorkgroupStorageSize, MaxComputeInvocationsPerWorkgroup, MaxComputeWorkgroupSizeX, MaxComputeWorkgroupSizeY, MaxComputeWorkgroupSizeZ,
		MaxComputeWorkgroupsPerDimension, MaxImmediateSize uint32
	}
)

const (
	typeWGSL          = 0x2
	typeToggles       = 0x5000A
	typeMatrixConfigs = 0x5003B

	featureTimestamps = 0x9
	featureF16        = 0xB
	featureSubgroups  = 0x12
	featureLocks      = 0x50004 // ImplicitDeviceSynchronization
	featureMatrices   = 0x50034

	instanceManyDevices = 3 // devices of an adapter

	levelCore   = 2
	success     = 1 // of all statuses
	spontaneous = 3 // callbacks at any time; others when the instance processes events
	onEvents    = 2

	lostUnknown      = 1 // reasons of a loss
	errorOutOfMemory = 3

	mapRead      = 1
	computeStage = 4
	queryTimes   = 2
	noIndex      = ^uint32(0)
)

// functions are addresses of functions by their names without the prefix wgpu.
type functions struct {
	// GetInstanceFeatures is not called. It came with the layouts of header.go.
	CreateInstance, GetInstanceFeatures, InstanceProcessEvents, InstanceRequestAdapter,
	AdapterGetInfo, AdapterGetLimits, AdapterHasFeature, AdapterRelease, AdapterRequestDevice,
	DeviceCreateBindGroup, DeviceCreateBindGroupLayout, DeviceCreateBuffer, DeviceCreateCommandEncoder, DeviceCreateComputePipeline,
	DeviceCreateComputePipelineAsync, DeviceCreatePipelineLayout, DeviceCreateQuerySet, DeviceCreateShaderModule, DeviceGetQueue, DeviceRelease,
	BindGroupRelease, BindGroupLayoutRelease, PipelineLayoutRelease, ShaderModuleRelease, ComputePipelineRelease, QuerySetRelease,
	BufferDestroy, BufferGetConstMappedRange, BufferMapAsync, BufferRelease, BufferUnmap,
	CommandEncoderBeginComputePass, CommandEncoderCopyBufferToBuffer, CommandEncoderFinish, CommandEncoderRelease, CommandEncoderResolveQuerySet,
	ComputePassEncoderDispatchWorkgroups, ComputePassEncoderEnd, ComputePassEncoderRelease, ComputePassEncoderSetBindGroup, ComputePassEncoderSetPipeline,
	CommandBufferRelease, QueueOnSubmittedWorkDone, QueueRelease, QueueSubmit, QueueWriteBuffer uintptr
}

// arena is memory for the arguments of a call of C. It is on the heap, and so does not move.
type arena struct {
	words [1 << 10]uintptr
	used  int
}

var arenas = sync.Pool{New: func() any { return new(arena) }}

func newArena() *arena { return arenas.Get().(*arena) }

// free ends the use of an arena, which keeps it until then.
func (a *arena) free() {
	clear(a.words[:a.used])
	a.used = 0
	arenas.Put(a)
}

// place copies values to the arena.
func place[T any](a *arena, values ...T) *T {
	n := (int(unsafe.Sizeof(values[0]))*len(values) + 7) / 8
	at := (*T)(unsafe.Pointer(&a.words[a.used : a.used+n][0]))
	a.used += n
	copy(unsafe.Slice(at, len(values)), values)
	return at
}

// put copies values to the arena and returns their address.
func put[T any](a *arena, values ...T) uintptr { return address(place(a, values...)) }

func address[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// pointer returns an address of C's memory, or of an object that is kept, as a pointer.
func pointer(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

func listOf[T any](a *arena, values ...T) list {
	if len(values) == 0 {
		return list{}
	}
	return list{uintptr(len(values)), put(a, values...)}
}

// String copies the string: its length is the largest number where a 0 ends it.
func (v stringView) String() string {
	if v.data == 0 {
		return ""
	}
	p, length := pointer(v.data), v.length
	if length == ^uintptr(0) {
		for length = 0; *(*byte)(unsafe.Add(p, length)) != 0; length++ {
		}
	}
	return strings.Clone(unsafe.String((*byte)(p), length))
}

// view returns a string, which the caller keeps.
func view(s string) stringView {
	return stringView{uintptr(unsafe.Pointer(unsafe.StringData(s))), uintptr(len(s))}
}

// names returns a list of strings that a 0 ends.
func (a *arena) names(all ...string) list {
	at := make([]uintptr, len(all))
	for i, s := range all {
		at[i] = put(a, append([]byte(s), 0)...)
	}
	return listOf(a, at...)
}
