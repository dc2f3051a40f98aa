package gpu

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/queue"
)

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
		return nil, queue.Translate("gpu", err)
	}
	infos := make([]backend.Info, len(adapters))
	for i, a := range adapters {
		infos[i] = describe("gpu:"+strconv.Itoa(i), a.Info(), d.Options.lower(a.Limits()))
		a.Release()
	}
	return infos, nil
}

// Open opens an adapter by number or by a part of its name; "" selects the best:
// discrete before integrated before virtual before software. backend.ErrNoDevice when no
// adapter matches.
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
	if opt.Shared != nil {
		return openShared(selector, opt)
	}
	adapters, err := port.Adapters()
	if err != nil {
		return nil, queue.Translate("gpu", err)
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
	name, limits := "gpu:"+strconv.Itoa(i), opt.lower(a.Limits())
	dev, err := a.Open(limits)
	if err != nil {
		return nil, queue.Translate(name, err)
	}
	return openOn(dev, describe(name, a.Info(), limits), opt)
}

// openOn returns a Backend on an open device, which it closes when that fails.
func openOn(dev port.Device, info backend.Info, opt Options) (*Backend, error) {
	b, err := newBackend(dev, info, opt)
	if err != nil {
		_ = dev.Close() // the error of newBackend matters more
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
			return 0, fmt.Errorf("gpu:%d: there is no such adapter, the last one is gpu:%d: %w", n, len(adapters)-1, backend.ErrNoDevice)
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

// lower returns l with the limits of o.
func (o Options) lower(l gputypes.Limits) gputypes.Limits {
	m := o.Limits
	l.MaxBufferSize = cmp.Or(m.MaxBufferSize, l.MaxBufferSize)
	l.MaxStorageBufferBindingSize = cmp.Or(m.MaxStorageBufferBindingSize, l.MaxStorageBufferBindingSize)
	l.MaxStorageBuffersPerShaderStage = cmp.Or(m.MaxStorageBuffersPerShaderStage, l.MaxStorageBuffersPerShaderStage)
	l.MaxComputeWorkgroupStorageSize = cmp.Or(m.MaxComputeWorkgroupStorageSize, l.MaxComputeWorkgroupStorageSize)
	l.MaxComputeInvocationsPerWorkgroup = cmp.Or(m.MaxComputeInvocationsPerWorkgroup, l.MaxComputeInvocationsPerWorkgroup)
	l.MaxComputeWorkgroupsPerDimension = cmp.Or(m.MaxComputeWorkgroupsPerDimension, l.MaxComputeWorkgroupsPerDimension)
	l.MinStorageBufferOffsetAlignment = cmp.Or(m.MinStorageBufferOffsetAlignment, l.MinStorageBufferOffsetAlignment)
	l.MinUniformBufferOffsetAlignment = cmp.Or(m.MinUniformBufferOffsetAlignment, l.MinUniformBufferOffsetAlignment)
	return l
}

func describe(name string, a gputypes.AdapterInfo, l gputypes.Limits) backend.Info {
	t, ok := map[gputypes.DeviceType]backend.DeviceType{
		gputypes.DeviceTypeDiscreteGPU: backend.Discrete, gputypes.DeviceTypeIntegratedGPU: backend.Integrated,
		gputypes.DeviceTypeVirtualGPU: backend.Virtual, gputypes.DeviceTypeCPU: backend.CPU,
	}[a.DeviceType]
	if !ok {
		t = backend.Other
	}
	return backend.Info{
		Name: name, Device: a.Name, Type: t, Provider: Provider, Driver: driverName(a),
		Limits: []backend.Limit{
			{Name: "max buffer bytes", Value: int64(min(l.MaxBufferSize, math.MaxInt64))},
			{Name: "max binding bytes", Value: int64(min(l.MaxStorageBufferBindingSize, math.MaxInt64))},
			{Name: "max workgroups a dimension", Value: int64(l.MaxComputeWorkgroupsPerDimension)},
			{Name: "workgroup memory bytes", Value: int64(l.MaxComputeWorkgroupStorageSize)},
			{Name: "binding alignment bytes", Value: int64(l.MinStorageBufferOffsetAlignment)},
		},
	}
}

// driverName joins the names of the API and the driver. In gogpu the driver's begins with
// the API's.
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
