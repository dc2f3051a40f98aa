// Package adapter chooses among the adapters of a machine and describes them.
package adapter

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
)

// byRank lists the types of adapters, the best last.
var byRank = []backend.DeviceType{backend.CPU, backend.Other, backend.Virtual, backend.Integrated, backend.Discrete}

var deviceTypes = map[gputypes.DeviceType]backend.DeviceType{
	gputypes.DeviceTypeDiscreteGPU: backend.Discrete, gputypes.DeviceTypeIntegratedGPU: backend.Integrated,
	gputypes.DeviceTypeVirtualGPU: backend.Virtual, gputypes.DeviceTypeCPU: backend.CPU,
}

// Pick returns the number of the adapter that a selector names: a number, a part of a name, or ""
// for the best. It returns backend.ErrNoDevice when there is none.
func Pick(selector string, adapters []*port.Adapter) (int, error) {
	names := make([]string, len(adapters))
	best, rank := 0, -1
	for i, a := range adapters {
		info := a.Info()
		names[i] = info.Name
		if r := slices.Index(byRank, cmp.Or(deviceTypes[info.DeviceType], backend.Other)); r > rank {
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
	for i, name := range names {
		if strings.Contains(strings.ToLower(name), strings.ToLower(selector)) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("gpu:%s: no adapter's name contains that, there are %q: %w", selector, names, backend.ErrNoDevice)
}

// Describe returns what a program sees of an adapter under a name, with the limits l.
func Describe(name string, a port.Info, l gputypes.Limits) backend.Info {
	return backend.Info{
		Name: name, Device: a.Name, Type: cmp.Or(deviceTypes[a.DeviceType], backend.Other), Provider: a.Library, Driver: driverName(a),
		Features: features(a.Features),
		Limits: []backend.Limit{
			{Name: "max buffer bytes", Value: int64(min(l.MaxBufferSize, math.MaxInt64))},
			{Name: "max binding bytes", Value: int64(min(l.MaxStorageBufferBindingSize, math.MaxInt64))},
			{Name: "max workgroups a dimension", Value: int64(l.MaxComputeWorkgroupsPerDimension)},
			{Name: "workgroup memory bytes", Value: int64(l.MaxComputeWorkgroupStorageSize)},
			{Name: "binding alignment bytes", Value: int64(l.MinStorageBufferOffsetAlignment)},
		},
	}
}

func features(f port.Features) (list []string) {
	if f.F16 {
		list = append(list, "f16")
	}
	if f.SubgroupMax > 0 {
		lanes := strconv.Itoa(int(f.SubgroupMin))
		if f.SubgroupMax > f.SubgroupMin {
			lanes += " to " + strconv.Itoa(int(f.SubgroupMax))
		}
		list = append(list, "subgroups of "+lanes+" lanes")
	}
	for _, m := range f.Matrices {
		list = append(list, m.String())
	}
	if f.Unreached {
		list = append(list, "matrix units only with a library such as Dawn's, see ATTN_WEBGPU in docs/gpu.md")
	}
	return list
}

// driverName joins the names of the API and the driver. In gogpu the driver's begins with the API's.
func driverName(a port.Info) string {
	api := a.Backend.String()
	name := api
	for _, s := range []string{a.Driver, a.DriverInfo} {
		if s = strings.TrimSpace(strings.TrimPrefix(s, api)); s != "" {
			name += " " + s
		}
	}
	return name
}
