package port_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

const (
	storage = gputypes.BufferUsageStorage | gputypes.BufferUsageCopySrc | gputypes.BufferUsageCopyDst
	uniform = gputypes.BufferUsageUniform | gputypes.BufferUsageCopyDst
	staging = gputypes.BufferUsageMapRead | gputypes.BufferUsageCopyDst
)

// adapter returns the first adapter. Without one it skips the test, or fails it if the environment has CI=true.
func adapter(t *testing.T) *port.Adapter {
	t.Helper()
	all, err := libraries.Adapters("")
	if err != nil {
		if !errors.Is(err, port.ErrNoAdapter) {
			t.Fatal(err)
		}
		if os.Getenv("CI") == "true" {
			t.Fatalf("CI=true promises an adapter: %v", err)
		}
		t.Skipf("needs a WebGPU adapter: %v", err)
	}
	for _, a := range all[1:] {
		a.Release()
	}
	t.Cleanup(all[0].Release)
	return all[0]
}

func open(t *testing.T, lower func(*gputypes.Limits)) port.Device {
	t.Helper()
	a := adapter(t)
	l := a.Limits()
	if lower != nil {
		lower(&l)
	}
	d := must.Get(a.Open(l))(t)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// buffer returns a buffer of d.
func buffer(t *testing.T, d port.Device, size uint64, usage gputypes.BufferUsage) port.Buffer {
	t.Helper()
	return must.Get(d.CreateBuffer(size, usage))(t)
}

// submit runs commands and waits for them.
func submit(t *testing.T, d port.Device, commands ...port.Command) {
	t.Helper()
	ticket, err := d.Submit(commands, false)
	if err == nil {
		_, err = d.Wait(t.Context(), ticket, time.Time{})
	}
	must.Do(t, err)
}

// read returns the bytes of a buffer that can be mapped.
func read(t *testing.T, d port.Device, b port.Buffer) []byte {
	t.Helper()
	got := make([]byte, b.Size())
	must.Do(t, d.Read(b, 0, got))
	return got
}

const doubler = `
@group(0) @binding(0) var<storage, read> a: array<u32>;
@group(0) @binding(1) var<storage, read_write> b: array<u32>;
@group(0) @binding(2) var<uniform> add: vec4<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
	if (id.x < arrayLength(&a)) { b[id.x] = 2u * a[id.x] + add.x; }
}`

var doublerDesc = port.PipelineDesc{
	Label: "doubler", WGSL: doubler, Entry: "main",
	Bindings: []gputypes.BufferBindingType{port.ReadOnly, port.ReadWrite, port.Uniform},
}

func words(w ...uint32) []byte {
	b := make([]byte, 0, 4*len(w))
	for _, x := range w {
		b = binary.LittleEndian.AppendUint32(b, x)
	}
	return b
}

// roundTrip doubles four numbers twice in one submission and reads them back. The input is bound at an offset.
func roundTrip(d port.Device) error {
	p, err := d.CreatePipeline(doublerDesc)
	if err != nil {
		return err
	}
	defer p.Release()
	var bufs [4]port.Buffer
	for i, c := range []struct {
		size  uint64
		usage gputypes.BufferUsage
	}{{1024, storage}, {16, storage}, {16, uniform}, {16, staging}} {
		if bufs[i], err = d.CreateBuffer(c.size, c.usage); err != nil {
			return err
		}
		defer bufs[i].Release()
	}
	if err := errors.Join(d.Write(bufs[0], 256, words(1, 2, 3, 4)), d.Write(bufs[2], 0, words(5, 0, 0, 0))); err != nil {
		return err
	}
	in := port.Binding{Buffer: bufs[0], Offset: 256, Size: 16}
	out := port.Binding{Buffer: bufs[1], Size: 16}
	add := port.Binding{Buffer: bufs[2], Size: 16}
	t, err := d.Submit([]port.Command{
		{Pipeline: p, Bindings: []port.Binding{in, out, add}, Groups: [3]uint32{1, 1, 1}},
		{Src: bufs[1], Dst: bufs[0], DstOffset: 256, Size: 16},
		{Pipeline: p, Bindings: []port.Binding{in, out, add}, Groups: [3]uint32{1, 1, 1}},
		{Src: bufs[1], Dst: bufs[3], Size: 16},
	}, false)
	if err == nil {
		_, err = d.Wait(context.Background(), t, time.Time{})
	}
	got := make([]byte, 16)
	if err == nil {
		err = d.Read(bufs[3], 0, got)
	}
	if want := words(19, 23, 27, 31); err == nil && string(got) != string(want) {
		err = errors.New("got " + string(got))
	}
	return err
}

func TestManyGoroutines(t *testing.T) {
	d := open(t, nil)
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			for range 5 {
				if errs[i] = roundTrip(d); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	must.Do(t, errors.Join(errs...))
	if l := d.Live(); l != (port.Live{}) {
		t.Errorf("left behind: %+v", l)
	}
}

// TestReleaseAfterWrite releases buffers whose writes have not run yet.
func TestReleaseAfterWrite(t *testing.T) {
	d := open(t, nil)
	for range 20 {
		b := buffer(t, d, 1<<16, storage)
		must.Do(t, d.Write(b, 0, make([]byte, 1<<16)))
		b.Release()
	}
	must.Do(t, roundTrip(d))
}

// TestCopiesBothWays copies from one buffer to another and back in one submission.
func TestCopiesBothWays(t *testing.T) {
	d := open(t, nil)
	x, y, out := buffer(t, d, 16, storage), buffer(t, d, 16, storage), buffer(t, d, 16, staging)
	must.Do(t, d.Write(x, 0, words(1, 2, 3, 4)))
	submit(t, d,
		port.Command{Src: x, Dst: y, DstOffset: 8, Size: 8},
		port.Command{Src: y, SrcOffset: 8, Dst: x, DstOffset: 8, Size: 8},
		port.Command{Src: x, Dst: out, Size: 16})
	if got := read(t, d, out); string(got) != string(words(1, 2, 1, 2)) {
		t.Errorf("read %v", got)
	}
}

func TestErrorsAreTyped(t *testing.T) {
	d := open(t, func(l *gputypes.Limits) {
		l.MaxBufferSize = 1 << 20
		l.MaxStorageBufferBindingSize = 1 << 16
		l.MaxComputeWorkgroupsPerDimension = 100
	})
	if _, err := d.CreatePipeline(port.PipelineDesc{Label: "bad", WGSL: "fn main( {", Entry: "main"}); !errors.Is(err, port.ErrShader) {
		t.Errorf("bad WGSL: %v", err)
	} else if !strings.Contains(err.Error(), "bad") {
		t.Errorf("the error does not name the pipeline: %v", err)
	}
	must.Fail(t, "buffer over the limit", must.Err(d.CreateBuffer(2<<20, storage)), port.ErrInvalid)
	p := must.Get(d.CreatePipeline(doublerDesc))(t)
	a, b, u := buffer(t, d, 1<<17, storage), buffer(t, d, 1<<17, storage), buffer(t, d, 256, uniform)
	submit := func(groups uint32, size uint64) error {
		_, err := d.Submit([]port.Command{{Pipeline: p, Groups: [3]uint32{groups, 1, 1}, Bindings: []port.Binding{
			{Buffer: a, Size: size}, {Buffer: b, Size: size}, {Buffer: u, Size: 16}}}}, false)
		return err
	}
	must.Fail(t, "too many workgroups", submit(101, 1<<16), port.ErrInvalid)
	must.Fail(t, "binding over the limit", submit(100, 1<<17), port.ErrInvalid)
	must.Pass(t, "after the errors", submit(100, 1<<16))
	must.Do(t, d.Close())
	a.Release() // after Close: nothing happens
	must.Fail(t, "after Close", submit(1, 4096), port.ErrClosed)
	must.Fail(t, "after Close", must.Err(d.CreateBuffer(16, storage)), port.ErrClosed)
	if l := d.Live(); l != (port.Live{}) {
		t.Errorf("Close left %+v", l)
	}
}

// TestLimitsOverTheAdapters exceeds each limit by 1. The error is that of Open, because gogpu opens devices with such limits.
func TestLimitsOverTheAdapters(t *testing.T) {
	a := adapter(t)
	for _, name := range []string{
		"MaxBufferSize", "MaxStorageBufferBindingSize", "MaxStorageBuffersPerShaderStage", "MaxComputeWorkgroupStorageSize",
		"MaxComputeInvocationsPerWorkgroup", "MaxComputeWorkgroupsPerDimension",
	} {
		l := a.Limits()
		f := reflect.ValueOf(&l).Elem().FieldByName(name)
		most := f.Uint()
		if f.SetUint(most + 1); f.Uint() == 0 {
			continue // no number is over the adapter's limit
		}
		must.Fail(t, name, must.Err(a.Open(l)), port.ErrInvalid, fmt.Sprintf("%s of %d is over the limit of %d", name, most+1, most))
	}
}

// The device's clock measures less time than the host's, and more time for more work.
func TestTimedSubmissions(t *testing.T) {
	d := open(t, nil)
	p, err := d.CreatePipeline(port.PipelineDesc{Label: "slow", Entry: "main", Bindings: []gputypes.BufferBindingType{port.ReadWrite}, WGSL: `
@group(0) @binding(0) var<storage, read_write> x: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
	var h = id.x;
	for (var i = 0u; i < 1000u; i++) { h = h * 1664525u + 1013904223u; }
	x[id.x] = h;
}`})
	must.Do(t, err)
	const groups = 4096
	buf := buffer(t, d, 4*64*groups, storage)
	timed := func(dispatches int) (wall, device time.Duration, ok bool) {
		t.Helper()
		var commands []port.Command
		for range dispatches {
			commands = append(commands, port.Command{Pipeline: p, Bindings: []port.Binding{{Buffer: buf, Size: buf.Size()}}, Groups: [3]uint32{groups, 1, 1}})
		}
		begin := time.Now()
		ticket, err := d.Submit(commands, true)
		if err == nil {
			_, err = d.Wait(t.Context(), ticket, time.Time{})
		}
		wall = time.Since(begin)
		if err == nil {
			device, ok, err = d.Took(ticket)
		}
		must.Do(t, err)
		return wall, device, ok
	}
	timed(1) // compiles, and starts the clock
	// Other programs only add to a time, so the shortest times of enough attempts are proportional to the work.
	var least [2]time.Duration
	for attempt := 0; attempt < 3 || attempt < 30 && least[1] < 4*least[0]; attempt++ {
		for n, dispatches := range []int{1, 8} {
			wall, device, ok := timed(dispatches)
			if !ok {
				if strings.HasPrefix(libraries.Provider, "gogpu") {
					t.Skip("gogpu has no timestamps")
				}
				if adapter(t).Info().Backend == gputypes.BackendVulkan {
					t.Fatal("no timestamps on Vulkan")
				}
				t.Skip("this device has no timestamps")
			}
			if device <= 0 || device > wall+wall/50 {
				t.Errorf("%d dispatches took %v by the device's clock, %v by the wall's", dispatches, device, wall)
			}
			if least[n] == 0 || device < least[n] {
				least[n] = device
			}
		}
	}
	if least[1] < 4*least[0] {
		t.Errorf("8 dispatches took %v, one %v", least[1], least[0])
	}
	if _, ok, err := d.Took(1 << 40); ok || err != nil {
		t.Errorf("a submission that is not there: %v %v", ok, err)
	}
}

// Bind groups are kept for the next dispatch with the same bindings, up to a bound, and
// released with the buffers that they bind.
func TestGroupsAreKept(t *testing.T) {
	d := open(t, nil)
	p := must.Get(d.CreatePipeline(doublerDesc))(t)
	const windows = 600
	in, out := buffer(t, d, 256*windows, storage), buffer(t, d, 256*windows, storage)
	add, copied := buffer(t, d, 256*windows, uniform), buffer(t, d, 256*windows, staging)
	for i := range windows {
		must.Do(t, d.Write(in, uint64(256*i), words(uint32(i))))
		must.Do(t, d.Write(add, uint64(256*i), words(uint32(1000*i), 0, 0, 0)))
	}
	run := func(commands ...port.Command) int {
		t.Helper()
		submit(t, d, commands...)
		return d.Live().Groups
	}
	window := func(i int) port.Command {
		at := uint64(256 * i)
		return port.Command{Pipeline: p, Groups: [3]uint32{1, 1, 1}, Bindings: []port.Binding{
			{Buffer: in, Offset: at, Size: 4}, {Buffer: out, Offset: at, Size: 4}, {Buffer: add, Offset: at, Size: 16}}}
	}
	if n := run(window(0)); n != 1 {
		t.Errorf("%d groups after one dispatch", n)
	}
	if n := run(window(0), window(0)); n != 1 {
		t.Errorf("%d groups after the same dispatch again", n)
	}
	if n := run(window(1)); n != 2 {
		t.Errorf("%d groups after another window", n)
	}
	var all []port.Command
	for i := range windows {
		all = append(all, window(i))
	}
	most := run(all...)
	if most < 100 || most >= windows {
		t.Errorf("%d groups kept of %d", most, windows)
	}
	if n := run(append(all, port.Command{Src: out, Dst: copied, Size: out.Size()})...); n != most {
		t.Errorf("%d groups, before %d", n, most)
	}
	got := read(t, d, copied)
	for i := range windows {
		if x := binary.LittleEndian.Uint32(got[256*i:]); x != uint32(1002*i) {
			t.Fatalf("window %d gave %d", i, x)
		}
	}
	run(window(0))
	in.Release()
	if n := d.Live().Groups; n != 0 {
		t.Errorf("%d groups after the release of a buffer that all of them bind", n)
	}
	must.Fail(t, "a dispatch on a buffer that was released", must.Err(d.Submit([]port.Command{window(0)}, false)), port.ErrInvalid)
}

// A let declaration keeps the value that it read from memory, and its components, despite later writes.
func TestNamesKeepTheirValues(t *testing.T) {
	d := open(t, nil)
	for what, body := range map[string]string{
		"workgroup memory": "let v = tile[t]; tile[t] = vec4<u32>(7u); x[t] = vec4<u32>(v.x, v.y, v.z, v.w);",
		"a buffer":         "let v = x[t]; x[t] = vec4<u32>(7u); x[t] = vec4<u32>(v.x, v.y, v.z, v.w);",
		"a barrier":        "let v : vec4<u32> = tile[t]; workgroupBarrier(); tile[63u - t] = vec4<u32>(7u); workgroupBarrier(); x[t] = vec4<u32>(v.x, v.y, v.z, v.w);",
	} {
		p, err := d.CreatePipeline(port.PipelineDesc{Label: what, Entry: "main", Bindings: []gputypes.BufferBindingType{port.ReadWrite}, WGSL: `
@group(0) @binding(0) var<storage, read_write> x: array<vec4<u32>>;
var<workgroup> tile: array<vec4<u32>, 64>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) t: u32) {
	tile[t] = x[t];
	workgroupBarrier();
	` + body + `
}`})
		must.Do(t, err)
		buf, out := buffer(t, d, 1024, storage), buffer(t, d, 1024, staging)
		var want []byte
		for i := range uint32(256) {
			want = append(want, words(100+i)...)
		}
		must.Do(t, d.Write(buf, 0, want))
		submit(t, d,
			port.Command{Pipeline: p, Bindings: []port.Binding{{Buffer: buf, Size: 1024}}, Groups: [3]uint32{1, 1, 1}},
			port.Command{Src: buf, Dst: out, Size: 1024})
		got := read(t, d, out)
		if string(got) != string(want) {
			t.Errorf("%s: the first is %v, want %v", what, got[:4], want[:4])
		}
	}
}
