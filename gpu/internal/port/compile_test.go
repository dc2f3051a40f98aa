package port_test

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// A compilation holds up no other call of the device: each would wait forever here.
func TestCallsDuringCompilation(t *testing.T) {
	d := open(t, nil)
	src, dst := buffer(t, d, 64, storage), buffer(t, d, 64, staging)
	ran := 0
	defer port.WhileCompiling(func() {
		ran++
		must.Pass(t, "write", d.Write(src, 0, words(1, 2)))
		ticket, err := d.Submit([]port.Command{{Src: src, Dst: dst, Size: 8}}, false)
		must.Pass(t, "submit", err)
		must.Pass(t, "wait", must.Err(d.Wait(t.Context(), ticket, time.Time{})))
		got := make([]byte, 8)
		if err := d.Read(dst, 0, got); err != nil || string(got) != string(words(1, 2)) {
			t.Errorf("read %v, %v", got, err)
		}
		b, err := d.CreateBuffer(16, storage)
		if must.Pass(t, "a buffer", err); err == nil {
			b.Release()
		}
		if l := d.Live(); l.Buffers != 2 || d.Hung() || d.Lost() != nil {
			t.Errorf("%+v, hung %v, lost %v", l, d.Hung(), d.Lost())
		}
	})()
	p, err := d.CreatePipeline(doublerDesc)
	if err != nil || ran != 1 {
		t.Fatalf("%d compilations, %v", ran, err)
	}
	p.Release()
}

// A device that is closed during a compilation is closed after it, and leaves nothing.
func TestCloseDuringCompilation(t *testing.T) {
	d := open(t, nil)
	closed := make(chan error)
	defer port.WhileCompiling(func() {
		go func() { closed <- d.Close() }()
		for { // until the device refuses calls
			b, err := d.CreateBuffer(16, storage)
			if err != nil {
				break
			}
			b.Release()
		}
		select {
		case <-closed:
			t.Error("closed while a shader compiles")
		default:
		}
	})()
	must.Fail(t, "the pipeline of a closed device", must.Err(d.CreatePipeline(doublerDesc)), port.ErrClosed)
	must.Do(t, <-closed)
	if l := d.Live(); l != (port.Live{}) {
		t.Errorf("Close left %+v", l)
	}
}

// The errors of compilations and of other calls at the same time reach their own callers.
func TestErrorsDuringCompilation(t *testing.T) {
	d := open(t, nil)
	wrong := doublerDesc
	wrong.WGSL = strings.Replace(doubler, "2u", "undeclared", 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for range 20 {
			must.Fail(t, "a wrong shader", must.Err(d.CreatePipeline(wrong)), port.ErrShader, "undeclared")
			p, err := d.CreatePipeline(doublerDesc)
			if err != nil {
				t.Errorf("a right shader: %v", err)
				continue
			}
			p.Release()
		}
	})
	for range 200 {
		b := buffer(t, d, 64, storage)
		must.Do(t, d.Write(b, 0, words(1, 2)))
		submit(t, d)
		must.Fail(t, "a write behind the end", d.Write(b, 64, words(1, 2)), port.ErrInvalid)
		b.Release()
	}
}

// After a loss every call returns ErrLost, Release and Close work in any order, and another device opens.
func TestLost(t *testing.T) {
	d := open(t, nil)
	must.Do(t, d.Lost())
	p := must.Get(d.CreatePipeline(doublerDesc))(t)
	var bufs []port.Buffer
	for _, usage := range []gputypes.BufferUsage{storage, storage, uniform, staging} {
		bufs = append(bufs, buffer(t, d, 256, usage))
	}
	dispatch := []port.Command{{Pipeline: p, Groups: [3]uint32{1, 1, 1}, Bindings: []port.Binding{
		{Buffer: bufs[0], Size: 256}, {Buffer: bufs[1], Size: 256}, {Buffer: bufs[2], Size: 16}}}}
	ticket, err := d.Submit(dispatch, false) // under way, or not, when it happens
	must.Do(t, err)
	port.Lose(d)
	for name, call := range map[string]func() error{
		"CreateBuffer":   func() error { return must.Err(d.CreateBuffer(16, storage)) },
		"CreatePipeline": func() error { return must.Err(d.CreatePipeline(doublerDesc)) },
		"Write":          func() error { return d.Write(bufs[0], 0, words(1)) },
		"Submit":         func() error { _, err := d.Submit(dispatch, false); return err },
		"Wait":           func() error { _, err := d.Wait(t.Context(), ticket+1, time.Time{}); return err },
		"Read":           func() error { return d.Read(bufs[3], 0, make([]byte, 8)) },
		"Lost":           d.Lost,
	} {
		must.Fail(t, fmt.Sprintf("%s of a lost device", name), call(), port.ErrLost)
	}
	bufs[0].Release()
	must.Do(t, d.Close())
	bufs[1].Release()
	if l := d.Live(); l != (port.Live{}) {
		t.Errorf("Close of a lost device left %+v", l)
	}
	must.Pass(t, "the next device", roundTrip(open(t, nil)))
}

// TestSubmissionsElsewhere submits after a program's own submissions to the same queue. A
// device that was idle for long is not lost.
func TestSubmissionsElsewhere(t *testing.T) {
	d := open(t, nil)
	for range 20 {
		must.Do(t, port.Elsewhere(d, time.Hour))
		must.Do(t, roundTrip(d))
	}
}

// TestFeatures: shaders may enable what the device lists. Subgroups have as many lanes as it says, and products of
// matrices of ones have K in M·N elements, for each shape that it lists.
func TestFeatures(t *testing.T) {
	d := open(t, nil)
	f := d.Features()
	if !f.F16 && f.SubgroupMax == 0 {
		t.Skip("needs a device with 16-bit floats or subgroups")
	}
	one, staged := buffer(t, d, 16, storage), buffer(t, d, 4096, staging)
	must.Do(t, d.Write(one, 0, words(1)))
	// run returns the words of out after a kernel, in a workgroup of the longest subgroup that WebGPU has.
	run := func(enable, element, body string) (got []uint32) {
		t.Helper()
		p, err := d.CreatePipeline(port.PipelineDesc{Label: enable, Entry: "main", Bindings: []gputypes.BufferBindingType{port.ReadOnly, port.ReadWrite}, WGSL: enable + `
@group(0) @binding(0) var<storage, read> one: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<` + element + `>;
@compute @workgroup_size(128) fn main() {` + body + `}`})
		must.Do(t, err)
		defer p.Release()
		out := buffer(t, d, 4096, storage)
		defer out.Release()
		submit(t, d, port.Command{
			Pipeline: p, Groups: [3]uint32{1, 1, 1}, Bindings: []port.Binding{{Buffer: one, Size: 16}, {Buffer: out, Size: 4096}},
		}, port.Command{Src: out, Dst: staged, Size: 4096})
		for b := range slices.Chunk(read(t, d, staged), 4) {
			got = append(got, binary.LittleEndian.Uint32(b))
		}
		return got
	}
	if f.F16 {
		if got := run("enable f16;", "vec2<f16>", "out[0] = vec2<f16>(f16(one[0]), 2h);")[0]; got != 0x40003c00 {
			t.Errorf("1 and 2 in f16 are %#x", got)
		}
	}
	if f.SubgroupMax > 0 {
		if got := run("enable subgroups;", "u32", "out[0] = subgroupAdd(one[0]);")[0]; got < f.SubgroupMin || got > f.SubgroupMax {
			t.Errorf("a subgroup has %d lanes, want %d to %d", got, f.SubgroupMin, f.SubgroupMax)
		}
	}
	for _, m := range f.Matrices {
		scalar := cmp.Or(map[port.Component]port.Component{"u8": "u32", "i8": "i32"}[m.Component], m.Component)
		got := run("enable f16; enable chromium_experimental_subgroup_matrix;", string(m.Result), fmt.Sprintf(`
	let x = %[5]s(one[0]);
	let sum = subgroupMatrixMultiply<%[2]s>(subgroup_matrix_left<%[1]s, %[6]d, %[3]d>(x), subgroup_matrix_right<%[1]s, %[4]d, %[6]d>(x));
	subgroupMatrixStore<row_major>(&out, 0u, sum, %[4]du);`, m.Component, m.Result, m.M, m.N, scalar, m.K))
		want, n := m.K, int(m.M*m.N)
		switch m.Result {
		case port.F32:
			want = math.Float32bits(float32(m.K))
		case port.F16: // two of a power of two
			want, n = 0x10001*uint32(bits.Len32(m.K)+14)<<10, n/2
		}
		if !slices.Equal(got[:n], slices.Repeat([]uint32{want}, n)) || got[n] != 0 {
			t.Errorf("%v: the products of ones are %#x, want %d of %#x", m, got[:n+1], n, want)
		}
	}
}
