// Package gpu is the WebGPU backend. It computes
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// with the WGSL of package shaders, on any adapter that WebGPU reaches: Vulkan,
// Metal, DX12, and Vulkan in software on a machine without a GPU. Importing it
// registers the family "gpu":
//
//	import _ "github.com/seed90331342/attn/gpu"
//
//	be, err := backend.Open("gpu")        // the best adapter
//	be, err := backend.Open("gpu:1")      // by number, as backend.Devices lists
//	be, err := backend.Open("gpu:nvidia") // by a part of its name
//
// Work is cut so that no limit of the adapter is the caller's concern: bindings
// are windows of tensors, dispatches stay within the workgroup counts, keys come
// in pieces that go on from one another's state, and a submission takes a bounded
// time (Options.Budget), after which the context is looked at and a trace that came
// with it is told of progress. Results do not depend on any of these cuts, to the
// bit.
//
// Tensors larger than the adapter's largest buffer take several. Those for which
// the device has no room stay in host memory, and calls bring what they need of
// them piece by piece; the results are the same, to the bit.
//
// Fused attention runs on a register-tiled kernel in one of several variants, which
// give the same bits and differ in speed only. The first call of a class of shapes on
// a GPU measures them and keeps the choice in a file for the programs to come;
// Options.Tune or ATTN_GPU_TUNE=off turn that off, and Plan says what is in use. Where
// limits are so low that no tile of 32 to 128 keys can be bound, a plainer kernel takes
// its place, with tiles of 32 keys and so with other roundings; the plan says so, and
// why.
//
// Keys and values may be q8 or lie in pages, with the bits of the same numbers in one
// float32 tensor. Kernels look pages up in a table. Where a pool is larger than what can
// be bound or in host memory, or a device has no ninth storage buffer for the table of
// the prefill kernel, the pages of a step are collected before it; the plan says so.
//
// Values of more than 256 columns take a pass over the keys for each 256 of them; the
// plan says so. Those of q8 are refused, as their rows have one scale and no slices.
//
// A bias beside a bias by distance, and a mask beside a mask of blocks, take a kernel
// with ten storage buffers, or eight for few query rows. A device that binds fewer
// refuses them together (backend.ErrUnsupported).
package gpu

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Provider names the WebGPU library that this binary was built with, and its
// version.
const Provider = port.Provider

// Options change how a device is opened. The zero value takes everything that
// the adapter offers.
type Options struct {
	// Limits replace the adapter's where they are not zero: maxima lower them,
	// minimal alignments raise them. Tests lower them to reach every branch that
	// cuts work. Looked at are MaxBufferSize, MaxStorageBufferBindingSize,
	// MaxStorageBuffersPerShaderStage, MaxComputeWorkgroupStorageSize,
	// MaxComputeInvocationsPerWorkgroup, MaxComputeWorkgroupsPerDimension,
	// MinStorageBufferOffsetAlignment and MinUniformBufferOffsetAlignment.
	Limits gputypes.Limits
	// Budget is how long a cancelled call may keep the device busy; 0 means 200 ms.
	// Submissions are sized to half of it, as two are on the device at a time, by
	// the speed of each kernel as measured while it runs. What cannot be cut, a
	// tile of one workgroup, may take longer.
	Budget time.Duration
	// MaxWork bounds the floating point operations of one submission on top of
	// that; 0 is no bound. Tests set it to cut work the same way on any machine.
	MaxWork float64
	// PoolBytes bounds the device memory that is kept for reuse after its
	// release; 0 means 64 MiB, a negative value keeps none.
	PoolBytes int64
	// Tune says where the choice among the variants of the prefill kernel comes from;
	// the zero value measures on first use on a GPU, once for a machine.
	Tune Tuning
	// TuneBudget is about how long that may take for a class of shapes; 0 means 3 s.
	TuneBudget time.Duration
	// TuneFile keeps what is measured; "" means attn/tuning.json in the user's cache
	// folder. Plan says in Why when a file could not be used.
	TuneFile string
	// decodeRows, unless 0, replaces the most query rows a key head that the decode
	// path takes: tests send everything or nothing there.
	decodeRows int

	// MemoryBytes bounds the device memory that tensors, the pool and what calls
	// stream take; 0 is no bound. Tensors for which it leaves no room, or the
	// device has none, are kept in host memory, and calls stream from and to it.
	// When it is 0 the environment variable ATTN_GPU_MEMORY is looked at, such as
	// 256MiB or 4GiB.
	MemoryBytes int64
}

func init() { backend.Register("gpu", Driver{}) }

// Driver opens WebGPU adapters as backends. The zero value is registered as
// "gpu"; register one with Options to change how backend.Open opens them.
type Driver struct {
	Options Options
}

// Devices lists the adapters: number, name, type, provider, driver and limits.
// backend.ErrNoDevice when there are none.
func (d Driver) Devices() ([]backend.Info, error) {
	adapters, err := port.Adapters()
	if err != nil {
		return nil, translate("gpu", err)
	}
	infos := make([]backend.Info, len(adapters))
	for i, a := range adapters {
		infos[i] = describe(i, a.Info(), d.Options.lower(a.Limits()))
		a.Release()
	}
	return infos, nil
}

// Open opens an adapter by number or by a part of its name; "" takes the best:
// discrete before integrated before virtual before software.
// backend.ErrNoDevice when there is none such.
func (d Driver) Open(selector string) (backend.Backend, error) {
	b, err := Open(selector, d.Options)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Open opens an adapter as [Driver.Open] does, with options.
func Open(selector string, opt Options) (*Backend, error) {
	if opt.MemoryBytes == 0 {
		var err error
		if opt.MemoryBytes, err = memoryFromEnv(); err != nil {
			return nil, err
		}
	}
	adapters, err := port.Adapters()
	if err != nil {
		return nil, translate("gpu", err)
	}
	defer func() {
		for _, a := range adapters {
			a.Release()
		}
	}()
	i, err := pick(selector, adapters)
	if err != nil {
		return nil, err
	}
	a := adapters[i]
	limits := opt.lower(a.Limits())
	dev, err := a.Open(limits)
	if err != nil {
		return nil, translate("gpu:"+strconv.Itoa(i), err)
	}
	b, err := newBackend(dev, describe(i, a.Info(), limits), opt)
	if err != nil {
		dev.Close()
		return nil, err
	}
	return b, nil
}

func pick(selector string, adapters []port.Adapter) (int, error) {
	names := make([]string, len(adapters))
	best, rank := 0, -1
	for i, a := range adapters {
		info := a.Info()
		names[i] = info.Name
		r := map[gputypes.DeviceType]int{
			gputypes.DeviceTypeDiscreteGPU: 4, gputypes.DeviceTypeIntegratedGPU: 3,
			gputypes.DeviceTypeVirtualGPU: 2, gputypes.DeviceTypeOther: 1,
		}[info.DeviceType]
		if r > rank {
			best, rank = i, r
		}
	}
	if selector == "" {
		return best, nil
	}
	if n, err := strconv.Atoi(selector); err == nil {
		if n < 0 || n >= len(adapters) {
			return 0, fmt.Errorf("gpu:%d: there are %d adapters, numbered from 0: %w", n, len(adapters), backend.ErrNoDevice)
		}
		return n, nil
	}
	i := slices.IndexFunc(names, func(n string) bool {
		return strings.Contains(strings.ToLower(n), strings.ToLower(selector))
	})
	if i < 0 {
		return 0, fmt.Errorf("gpu:%s: no adapter's name contains that, there are %q: %w", selector, names, backend.ErrNoDevice)
	}
	return i, nil
}

// lower applies the limits that are set by hand.
func (o Options) lower(l gputypes.Limits) gputypes.Limits {
	set32 := func(dst *uint32, v uint32) {
		if v != 0 {
			*dst = v
		}
	}
	set64 := func(dst *uint64, v uint64) {
		if v != 0 {
			*dst = v
		}
	}
	set64(&l.MaxBufferSize, o.Limits.MaxBufferSize)
	set64(&l.MaxStorageBufferBindingSize, o.Limits.MaxStorageBufferBindingSize)
	set32(&l.MaxStorageBuffersPerShaderStage, o.Limits.MaxStorageBuffersPerShaderStage)
	set32(&l.MaxComputeWorkgroupStorageSize, o.Limits.MaxComputeWorkgroupStorageSize)
	set32(&l.MaxComputeInvocationsPerWorkgroup, o.Limits.MaxComputeInvocationsPerWorkgroup)
	set32(&l.MaxComputeWorkgroupsPerDimension, o.Limits.MaxComputeWorkgroupsPerDimension)
	set32(&l.MinStorageBufferOffsetAlignment, o.Limits.MinStorageBufferOffsetAlignment)
	set32(&l.MinUniformBufferOffsetAlignment, o.Limits.MinUniformBufferOffsetAlignment)
	return l
}

func describe(i int, a gputypes.AdapterInfo, l gputypes.Limits) backend.Info {
	types := map[gputypes.DeviceType]backend.DeviceType{
		gputypes.DeviceTypeDiscreteGPU: backend.Discrete, gputypes.DeviceTypeIntegratedGPU: backend.Integrated,
		gputypes.DeviceTypeVirtualGPU: backend.Virtual, gputypes.DeviceTypeCPU: backend.CPU,
	}
	t, ok := types[a.DeviceType]
	if !ok {
		t = backend.Other
	}
	return backend.Info{
		Name: fmt.Sprintf("gpu:%d", i), Device: a.Name, Type: t, Provider: Provider, Driver: driverName(a),
		Limits: limitList(l),
	}
}

// driverName joins the API and what the driver says of itself, which in gogpu
// starts with the API's name again.
func driverName(a gputypes.AdapterInfo) string {
	api := a.Backend.String()
	name := api
	for _, s := range []string{a.Driver, a.DriverInfo} {
		if s = strings.TrimSpace(strings.TrimPrefix(s, api)); s != "" {
			name += " " + s
		}
	}
	return name
}

func limitList(l gputypes.Limits) []backend.Limit {
	return []backend.Limit{
		{Name: "max buffer bytes", Value: clampInt64(l.MaxBufferSize)},
		{Name: "max binding bytes", Value: clampInt64(l.MaxStorageBufferBindingSize)},
		{Name: "max workgroups a dimension", Value: int64(l.MaxComputeWorkgroupsPerDimension)},
		{Name: "workgroup memory bytes", Value: int64(l.MaxComputeWorkgroupStorageSize)},
		{Name: "binding alignment bytes", Value: int64(l.MinStorageBufferOffsetAlignment)},
	}
}

func clampInt64(v uint64) int64 { return int64(min(v, 1<<63-1)) }

// translate wraps an error of the port in the sentinel that callers know.
func translate(what string, err error) error {
	if err == nil {
		return nil
	}
	for _, t := range []struct{ port, backend error }{
		{port.ErrNoAdapter, backend.ErrNoDevice},
		{port.ErrLost, backend.ErrDeviceLost},
		{port.ErrMemory, backend.ErrMemory},
		{port.ErrClosed, backend.ErrClosed},
		{port.ErrShader, backend.ErrUnsupported},
		{port.ErrInvalid, backend.ErrUnsupported},
	} {
		if errors.Is(err, t.port) {
			return fmt.Errorf("%s: %w: %w", what, err, t.backend)
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}
