// Package web is the WebGPU of a browser as a library of the port, with GOOS=js.
package web

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"syscall/js"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Provider names the library behind the port.
const Provider = "WebGPU of the browser"

const noAdapter = "the browser has none, or none for a page that comes neither from localhost nor by https"

// The objects of a browser have no types in Go.
type (
	Adapter = js.Value
	Device  = js.Value
	Buffer  = js.Value
)

// await waits for a promise. Callbacks run only while every goroutine waits.
func await(promise js.Value) (v js.Value, err error) {
	done := make(chan struct{})
	settled := func(set func(js.Value)) js.Func {
		return js.FuncOf(func(_ js.Value, args []js.Value) any {
			set(append(args, js.Undefined())[0])
			close(done)
			return nil
		})
	}
	fulfilled := settled(func(x js.Value) { v = x })
	defer fulfilled.Release()
	rejected := settled(func(x js.Value) { err = errors.New(text(x)) })
	defer rejected.Release()
	promise.Call("then", fulfilled, rejected)
	<-done
	return v, err
}

// text returns the message of an error, or v as a string.
func text(v js.Value) string {
	if v.Type() == js.TypeObject && v.Get("message").Type() == js.TypeString {
		v = v.Get("message")
	}
	return js.Global().Get("String").Invoke(v).String()
}

// try returns what f throws, as an error of a kind.
func try(kind error, f func()) (err error) {
	defer func() {
		switch x := recover().(type) {
		case nil:
		case js.Error:
			err = port.Fault(text(x.Value), kind)
		default:
			panic(x)
		}
	}()
	f()
	return nil
}

// Adapters lists the adapters of two kinds of request: browsers have no list.
func Adapters() (all []port.LibraryAdapter, err error) {
	gpu := js.Global().Get("navigator")
	if gpu.Truthy() {
		gpu = gpu.Get("gpu")
	}
	if !gpu.Truthy() {
		return nil, errors.New(noAdapter)
	}
	seen := map[gputypes.AdapterInfo]bool{}
	for _, preference := range []string{"high-performance", "low-power"} {
		a, err := await(gpu.Call("requestAdapter", map[string]any{"powerPreference": preference}))
		if x := (adapter{&a}); err == nil && a.Truthy() && !seen[x.Info().AdapterInfo] {
			seen[x.Info().AdapterInfo] = true
			all = append(all, x)
		}
	}
	if len(all) == 0 {
		return nil, errors.New(noAdapter)
	}
	return all, nil
}

type adapter struct{ *Adapter }

// has reports whether an adapter lists a feature.
func (a adapter) has(feature string) bool { return a.Get("features").Call("has", feature).Bool() }

// number returns a number of an object, 0 where a browser has none.
func number(of js.Value, name string) uint64 {
	if n := of.Get(name); n.Type() == js.TypeNumber {
		return uint64(n.Float())
	}
	return 0
}

// word returns a string of an object, "" where a browser has none.
func word(of js.Value, name string) string {
	if v := of.Get(name); v.Type() == js.TypeString {
		return v.String()
	}
	return ""
}

// Info implements port.LibraryAdapter. Browsers hide the type of a device: hardware is of type Other. A
// feature whose sizes they hide is left out.
func (a adapter) Info() port.Info {
	from := a.Get("info")
	if !from.Truthy() { // an old browser
		from = js.Global().Get("Object").New()
	}
	info := port.Info{Library: Provider, AdapterInfo: gputypes.AdapterInfo{
		Name: word(from, "description"), Vendor: word(from, "vendor"), Driver: word(from, "architecture"),
		DeviceType: gputypes.DeviceTypeOther, Backend: gputypes.BackendBrowserWebGPU,
	}}
	if info.Name == "" {
		info.Name = strings.Join(strings.Fields(info.Vendor+" "+info.Driver+" "+word(from, "device")), " ")
	}
	software := from.Get("isFallbackAdapter").Truthy()
	for _, name := range []string{"swiftshader", "llvmpipe"} {
		software = software || strings.Contains(strings.ToLower(info.Name+info.Driver), name)
	}
	if software {
		info.DeviceType = gputypes.DeviceTypeCPU
	}
	f := &info.Features
	f.F16 = a.has(shaderF16)
	if a.has(subgroups) {
		f.SubgroupMin, f.SubgroupMax = uint32(number(from, "subgroupMinSize")), uint32(number(from, "subgroupMaxSize"))
	}
	if configs := from.Get("subgroupMatrixConfigs"); f.SubgroupMax > 0 && a.has(matrices) && configs.Truthy() {
		for i := range configs.Length() {
			c := configs.Index(i)
			f.Matrices = append(f.Matrices, port.Matrix{
				M: uint32(number(c, "M")), N: uint32(number(c, "N")), K: uint32(number(c, "K")),
				Component: port.Component(word(c, "componentType")), Result: port.Component(word(c, "resultComponentType")),
			})
		}
	}
	return info
}

// eachLimit calls f with each field of l and its name in a browser.
func eachLimit(l *gputypes.Limits, f func(name string, to reflect.Value)) {
	v := reflect.ValueOf(l).Elem()
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		f(strings.ToLower(name[:1])+name[1:], v.Field(i))
	}
}

// Limits implements port.LibraryAdapter. Those that browsers do not have are 0.
func (a adapter) Limits() (l gputypes.Limits) {
	from := a.Get("limits")
	eachLimit(&l, func(name string, to reflect.Value) { to.SetUint(number(from, name)) })
	return l
}

// The features of a device, by their names in browsers.
const (
	timestampQuery = "timestamp-query"
	shaderF16      = "shader-f16"
	subgroups      = "subgroups"
	matrices       = "chromium-experimental-subgroup-matrix"
)

// Open implements port.LibraryAdapter. The device has all features of Info.
func (a adapter) Open(l gputypes.Limits) (port.Library, error) {
	limits, features, f, timed := map[string]any{}, []any{}, a.Info().Features, a.has(timestampQuery)
	eachLimit(&l, func(name string, n reflect.Value) {
		if a.Get("limits").Get(name).Type() == js.TypeNumber {
			limits[name] = float64(n.Uint())
		}
	})
	for feature, has := range map[string]bool{
		timestampQuery: timed, shaderF16: f.F16, subgroups: f.SubgroupMax > 0, matrices: len(f.Matrices) > 0,
	} {
		if has {
			features = append(features, feature)
		}
	}
	dev, err := await(a.Call("requestDevice", map[string]any{"label": "attn", "requiredLimits": limits, "requiredFeatures": features}))
	if err != nil {
		return nil, port.Fault(err.Error(), port.ErrInvalid)
	}
	lib := newLibrary(dev)
	lib.timed = timed
	return lib, nil
}

// Release does nothing: the browser collects adapters.
func (a adapter) Release() {}

// Share returns an error.
func Share(*Adapter, *Device) (l port.Library, limits gputypes.Limits, info port.Info, err error) {
	return l, limits, info, fmt.Errorf("devices of a page cannot be shared: %w", port.ErrInvalid)
}
