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
		if err == nil && a.Truthy() && !seen[infoOf(&a)] {
			seen[infoOf(&a)] = true
			all = append(all, adapter{&a})
		}
	}
	if len(all) == 0 {
		return nil, errors.New(noAdapter)
	}
	return all, nil
}

type adapter struct{ *Adapter }

// Info implements port.LibraryAdapter.
func (a adapter) Info() port.Info {
	return port.Info{AdapterInfo: infoOf(a.Adapter), Library: Provider}
}

// Limits implements port.LibraryAdapter.
func (a adapter) Limits() gputypes.Limits { return limitsOf(a.Adapter) }

// infoOf describes an adapter. Browsers hide the type of a device: hardware is of type Other.
func infoOf(a *Adapter) gputypes.AdapterInfo {
	from := a.Get("info")
	if !from.Truthy() { // an old browser
		from = js.Global().Get("Object").New()
	}
	field := func(name string) string {
		if v := from.Get(name); v.Type() == js.TypeString {
			return v.String()
		}
		return ""
	}
	info := gputypes.AdapterInfo{
		Name: field("description"), Vendor: field("vendor"), Driver: field("architecture"),
		DeviceType: gputypes.DeviceTypeOther, Backend: gputypes.BackendBrowserWebGPU,
	}
	if info.Name == "" {
		info.Name = strings.Join(strings.Fields(info.Vendor+" "+info.Driver+" "+field("device")), " ")
	}
	software := from.Get("isFallbackAdapter").Truthy()
	for _, name := range []string{"swiftshader", "llvmpipe"} {
		software = software || strings.Contains(strings.ToLower(info.Name+info.Driver), name)
	}
	if software {
		info.DeviceType = gputypes.DeviceTypeCPU
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

// limitsOf returns the limits of an adapter or a device. Those that browsers do not have are 0.
func limitsOf(a *js.Value) (l gputypes.Limits) {
	from := a.Get("limits")
	eachLimit(&l, func(name string, to reflect.Value) {
		if n := from.Get(name); n.Type() == js.TypeNumber {
			to.SetUint(uint64(n.Float()))
		}
	})
	return l
}

const timestampQuery = "timestamp-query"

// Open implements port.LibraryAdapter.
func (a adapter) Open(l gputypes.Limits) (port.Library, error) {
	limits, features := map[string]any{}, []any{}
	eachLimit(&l, func(name string, n reflect.Value) {
		if a.Get("limits").Get(name).Type() == js.TypeNumber {
			limits[name] = float64(n.Uint())
		}
	})
	timed := a.Get("features").Call("has", timestampQuery).Bool()
	if timed {
		features = append(features, timestampQuery)
	}
	dev, err := await(a.Call("requestDevice", map[string]any{"label": "attn", "requiredLimits": limits, "requiredFeatures": features}))
	if err != nil {
		return nil, port.Fault(err.Error(), port.ErrInvalid)
	}
	lib := newLibrary(dev)
	if timed {
		lib.clock = port.NewClock(lib)
	}
	return lib, nil
}

// Release does nothing: the browser collects adapters.
func (a adapter) Release() {}

// Share returns an error.
func Share(*Adapter, *Device) (l port.Library, limits gputypes.Limits, info port.Info, err error) {
	return l, limits, info, fmt.Errorf("devices of a page cannot be shared: %w", port.ErrInvalid)
}
