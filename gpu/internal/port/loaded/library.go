// Package loaded is any webgpu.h library, opened at run time, as a library of the port: Dawn, with f16,
// subgroups and matrices, and wgpu-native from version 29 on, as far as it goes.
package loaded

import (
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"runtime"
	"sync"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// library is a library that is open. It is never closed, and has one instance, because drivers fail
// when they have been loaded and unloaded some dozens of times.
type library struct {
	functions
	name     string // with its version
	dawn     bool
	instance uintptr
}

// opened are the libraries by name.
var (
	mu     sync.Mutex
	opened = map[string]*library{}
)

// ages name versions of webgpu.h by functions that they brought, the newest first.
var ages = []struct{ symbol, age string }{
	{"wgpuSupportedFeaturesFreeMembers", "early 2025"}, {"wgpuAdapterInfoFreeMembers", "2024"}, {"wgpuCreateInstance", "2023 or before"},
}

// Adapters opens a library by its path, or by a name that the system's loader finds, and lists its
// adapters. It returns port.ErrNoAdapter when the library is not there, is none or is too old.
func Adapters(name string) ([]port.LibraryAdapter, error) {
	mu.Lock()
	defer mu.Unlock()
	l := opened[name]
	if l == nil {
		var err error
		if l, err = open(name); err != nil {
			return nil, fmt.Errorf("WebGPU library %s: %w: %w", name, err, port.ErrNoAdapter)
		}
		opened[name] = l
	}
	all, err := l.adapters()
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("it finds no Vulkan, Metal or DX12 driver: %w", port.ErrNoAdapter)
	}
	if err != nil {
		return nil, fmt.Errorf("WebGPU library %s: %w", name, err)
	}
	return all, nil
}

func open(name string) (*library, error) {
	handle, err := openLibrary(name)
	if err != nil {
		return nil, err
	}
	l := &library{dawn: true, name: filepath.Base(name)}
	if v := symbolOf(handle, "wgpuGetVersion"); v != 0 {
		n := uint32(call(v))
		l.dawn, l.name = false, fmt.Sprintf("%s (wgpu-native %d.%d.%d.%d)", l.name, n>>24, n>>16&255, n>>8&255, n&255)
	} else if symbolOf(handle, "wgpuDeviceTick") != 0 {
		l.name += " (Dawn)"
	}
	table := reflect.ValueOf(&l.functions).Elem()
	for i := range table.NumField() {
		symbol := "wgpu" + table.Type().Field(i).Name
		address := symbolOf(handle, symbol)
		if address == 0 {
			return nil, l.misfit(handle, symbol)
		}
		table.Field(i).SetUint(uint64(address))
	}
	mem := newArena()
	defer mem.free()
	desc := instanceDescriptor{next: l.toggles(mem)}
	if l.dawn {
		desc.features = listOf(mem, uint32(instanceManyDevices))
	}
	if l.instance = call(l.CreateInstance, put(mem, desc)); l.instance == 0 {
		return nil, fmt.Errorf("wgpuCreateInstance failed")
	}
	return l, nil
}

// misfit explains why a library that lacks a symbol cannot be used.
func (l *library) misfit(handle uintptr, symbol string) error {
	for _, x := range ages {
		if symbolOf(handle, x.symbol) != 0 {
			if symbol != "wgpuGetInstanceFeatures" {
				return fmt.Errorf("%s lacks the function %s, take a complete build", l.name, symbol)
			}
			return fmt.Errorf("%s has the webgpu.h of %s, take one of July 2025 or later (Dawn, or wgpu-native 29)", l.name, x.age)
		}
	}
	return fmt.Errorf("it is not a webgpu.h library: it lacks the function %s", symbol)
}

// toggles returns Dawn's switches for matrices: the feature is experimental, SPIR-V needs Vulkan's memory
// model for them, and f16 is off on NVIDIA. Dawn rounds timestamps to 100 us unless told otherwise. Other libraries have none.
func (l *library) toggles(a *arena) uintptr {
	if !l.dawn {
		return 0
	}
	return put(a, toggles{
		chained:  chained{sType: typeToggles},
		enabled:  a.names("allow_unsafe_apis", "use_vulkan_memory_model", "vulkan_enable_f16_on_nvidia"),
		disabled: a.names("timestamp_quantization"),
	})
}

// call calls a function with up to six words.
func call(f uintptr, words ...uintptr) uintptr {
	var w [6]uintptr
	return callWords(f, copy(w[:], words), w)
}

// adapters lists the adapters that three kinds of request return: webgpu.h has no list.
func (l *library) adapters() (all []port.LibraryAdapter, err error) {
	seen := map[gputypes.AdapterInfo]bool{}
	kind := map[string]uint32{"windows": 4, "darwin": 5, "ios": 5}[runtime.GOOS] // D3D12, Metal
	if kind == 0 {
		kind = 6 // Vulkan: OpenGL prints to standard error on machines without a display
	}
	mem := newArena()
	defer mem.free()
	for _, o := range []adapterOptions{{power: 2}, {power: 1}, {fallback: 1}} {
		o.next, o.level, o.kind = l.toggles(mem), levelCore, kind
		r, err := l.request(port.HangLimit, l.InstanceRequestAdapter, l.instance, put(mem, o))
		if err != nil {
			return nil, err
		}
		if r.status != success || r.object == 0 {
			continue // there is no such adapter
		}
		a, err := l.describe(r.object)
		if err == nil && !seen[a.info.AdapterInfo] {
			seen[a.info.AdapterInfo] = true
			all = append(all, a)
			continue
		}
		call(l.AdapterRelease, r.object)
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// request calls a function that answers with an object, and waits for it.
func (l *library) request(limit time.Duration, f uintptr, words ...uintptr) (reply, error) {
	s := newState()
	defer s.forget()
	async(f, callbacks().object, s, gotObject, words...)
	for start := time.Now(); ; port.Pause(start, time.Time{}) {
		call(l.InstanceProcessEvents, l.instance)
		if r := s.read(); r.object != nil {
			return *r.object, nil
		}
		if time.Since(start) > limit {
			return reply{}, fmt.Errorf("no answer within %v: %w", limit, port.ErrLost)
		}
	}
}

// async calls a function that calls a callback later.
func async(f, callback uintptr, s *state, kind uintptr, words ...uintptr) {
	var w [6]uintptr
	info := callbackInfo{mode: onEvents, callback: callback, user: [2]uintptr{s.id, kind}}
	callWithInfo(f, info, copy(w[:], words), w)
}

type adapter struct {
	*library
	handle uintptr
	info   port.Info
	limits gputypes.Limits
	timed  bool
}

var components = map[uint32]port.Component{1: port.F32, 2: port.F16, 3: "u32", 4: "i32", 5: "u8", 6: "i8"}

// describe asks for all that an adapter has. Values that no adapter can have mean another layout.
func (l *library) describe(handle uintptr) (*adapter, error) {
	a := &adapter{library: l, handle: handle}
	has := func(f uintptr) bool { return byte(call(l.AdapterHasFeature, handle, f)) != 0 }
	mem := newArena()
	defer mem.free()
	info, most := place(mem, adapterInfo{}), place(mem, limits{})
	configs := place(mem, matrixConfigs{chained: chained{sType: typeMatrixConfigs}})
	if l.dawn && has(featureMatrices) {
		info.next = address(configs)
	}
	call(l.AdapterGetInfo, handle, address(info))
	call(l.AdapterGetLimits, handle, address(most))
	port.CopyFields(&a.limits, most)
	a.limits.MaxBufferSize = min(a.limits.MaxBufferSize, math.MaxInt64)
	odd := func(alignment uint32) bool { return alignment == 0 || 256%alignment != 0 } // no power of two up to the default
	if err := port.Within(gputypes.DefaultLimits(), a.limits); err != nil || info.adapter-1 > 3 || info.backend-1 > 7 ||
		odd(most.MinStorageBufferOffsetAlignment) || odd(most.MinUniformBufferOffsetAlignment) {
		return nil, fmt.Errorf("%s describes its adapters in an unknown way, take another version: %w", l.name, port.ErrNoAdapter)
	}
	kinds := map[uint32]gputypes.DeviceType{1: gputypes.DeviceTypeDiscreteGPU, 2: gputypes.DeviceTypeIntegratedGPU, 3: gputypes.DeviceTypeCPU} // 4 is the zero, DeviceTypeOther
	a.info = port.Info{Library: l.name, AdapterInfo: gputypes.AdapterInfo{
		Name: info.device.String(), Vendor: info.vendor.String(), VendorID: info.vendorID, DeviceID: info.deviceID,
		Driver: info.description.String(), DeviceType: kinds[info.adapter],
		Backend: map[uint32]gputypes.Backend{4: gputypes.BackendDX12, 5: gputypes.BackendMetal, 6: gputypes.BackendVulkan}[info.backend],
	}}
	f := &a.info.Features
	f.F16, a.timed = has(featureF16), l.dawn && has(featureTimestamps)
	if has(featureSubgroups) {
		f.SubgroupMin, f.SubgroupMax = info.subgroupMin, info.subgroupMax
	}
	for i := range configs.configs.count {
		c := *(*matrixConfig)(pointer(configs.configs.items + i*20))
		f.Matrices = append(f.Matrices, port.Matrix{M: c.m, N: c.n, K: c.k, Component: components[c.component], Result: components[c.result]})
	}
	return a, nil
}

func (a *adapter) Info() port.Info         { return a.info }
func (a *adapter) Limits() gputypes.Limits { return a.limits }
func (a *adapter) Release()                { call(a.AdapterRelease, a.handle) }

// Open implements port.LibraryAdapter. The device has all features of the adapter.
func (a *adapter) Open(l gputypes.Limits) (port.Library, error) {
	d := &device{library: a.library, state: newState(), timed: a.timed}
	mem := newArena()
	defer mem.free()
	want := place(mem, limits{})
	call(a.AdapterGetLimits, a.handle, address(want)) // for those that gputypes has not
	port.CopyFields(want, &l)
	var features []uint32
	for f, has := range map[uint32]bool{
		featureTimestamps: a.timed, featureF16: a.info.Features.F16, featureSubgroups: a.info.Features.SubgroupMax > 0,
		featureMatrices: len(a.info.Features.Matrices) > 0, featureLocks: a.dawn,
	} {
		if has {
			features = append(features, f)
		}
	}
	desc := deviceDescriptor{next: a.toggles(mem), features: listOf(mem, features...), limits: address(want)}
	user := func(kind uintptr) [2]uintptr { return [2]uintptr{d.state.id, kind} }
	desc.lost.mode, desc.lost.callback, desc.lost.user = spontaneous, callbacks().device, user(gotLoss)
	desc.uncaught.callback, desc.uncaught.user = callbacks().device, user(gotError)
	r, err := a.request(port.HangLimit, a.AdapterRequestDevice, a.handle, put(mem, desc))
	if err == nil && (r.status != success || r.object == 0) {
		err = port.Fault(r.message, port.ErrInvalid)
	}
	if err != nil {
		d.state.forget()
		return nil, err
	}
	d.handle, d.queue = r.object, call(a.DeviceGetQueue, r.object)
	return d, nil
}
