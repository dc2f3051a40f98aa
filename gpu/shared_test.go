//go:build !js

package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var check = gpu.Check

func init() {
	gpu.OpenProgram = func() (*gpu.Shared, error) {
		adapter, device, _, err := openDevice()
		return &gpu.Shared{Adapter: adapter, Device: device}, err
	}
}

// needAdapter skips a test without an adapter, or fails it where CI promises one.
func needAdapter(t *testing.T) {
	t.Helper()
	_, err := gpu.Driver{}.Devices()
	if errors.Is(err, backend.ErrNoDevice) && os.Getenv("CI") != "true" {
		t.Skipf("needs a WebGPU adapter (CI=true makes that a failure): %v", err)
	}
	check(t, err)
}

// program is a program with a device of its own.
type program struct {
	adapter *gpu.SharedAdapter
	device  *gpu.SharedDevice
	release func() // releases the device, once
}

func openProgram(t *testing.T, timestamps, few bool) *program {
	t.Helper()
	needAdapter(t)
	adapter, device := openNative(t, timestamps, few)
	p := &program{adapter, device, sync.OnceFunc(device.Release)}
	t.Cleanup(p.release)
	return p
}

// share opens a backend on the program's device.
func (p *program) share(t *testing.T, opt gpu.Options) *gpu.Backend {
	t.Helper()
	opt.Shared, opt.Tune = &gpu.Shared{Adapter: p.adapter, Device: p.device}, gpu.TuneOff
	b := must.Get(gpu.Open("", opt))(t)
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// buffer returns a buffer of the program and the function that releases it, once.
func (p *program) buffer(t *testing.T, size uint64, usage gputypes.BufferUsage) (*gpu.SharedBuffer, func()) {
	t.Helper()
	b := must.Get(newBuffer(p.device, size, usage))(t)
	release := sync.OnceFunc(b.Release)
	t.Cleanup(release)
	return b, release
}

// operands returns an input and an output of 64 rows of 32 columns in buffers of the program.
func (p *program) operands(t *testing.T, b *gpu.Backend) (xb, ob *gpu.SharedBuffer, x, o backend.Tensor) {
	t.Helper()
	shape := backend.Shape{1, 1, 64, 32}
	xb, _ = p.buffer(t, 4*64*32, port.ImportUsage)
	ob, _ = p.buffer(t, 4*64*32, port.ImportUsage)
	return xb, ob, wrap(t, b, xb, shape), wrap(t, b, ob, shape)
}

// waves returns the numbers of the statement wave.
func waves(n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(i*37%101)/64 - 0.75
	}
	return x
}

func wrap(t *testing.T, b *gpu.Backend, buffer *gpu.SharedBuffer, shape backend.Shape) backend.Tensor {
	t.Helper()
	return must.Get(b.Wrap(buffer, backend.F32, shape))(t)
}

// fill sets the elements of a program's buffer by a shader of the program. Its size is a multiple of 128 bytes.
func (p *program) fill(t *testing.T, buffer *gpu.SharedBuffer, statement string) {
	t.Helper()
	check(t, compute(p.device, buffer, statement))
}

// attend computes o = attention(x, x, x) by the heads and rows of the views.
func attend(ctx context.Context, b *gpu.Backend, x, o backend.Tensor) error {
	call, err := kernels.NewDevice(b).Prepare(x, x, x, kernels.Options{Causal: true})
	if err != nil {
		return err
	}
	return call.RunInto(ctx, kernels.Result{O: o})
}

const wave = `x[i] = f32(i * 37u % 101u) / 64.0 - 0.75;`

// TestShared compares, bit for bit, a call in the middle of a program's buffers with the call
// on a device of the backend's own: with the limits of the device, with bindings smaller than
// the buffers, and with a largest buffer smaller than those.
func TestShared(t *testing.T) {
	p := openProgram(t, false, false)
	const heads, rows, dim, first = 2, 300, 40, 36 // the first element of the views
	shape, strides := backend.Shape{1, heads, rows, dim}, backend.Strides{0, dim, heads * dim, 1}
	const n = 25600 // elements, more than first + heads·rows·dim
	x := waves(n)
	view := func(whole backend.Tensor) backend.Tensor {
		t.Helper()
		return must.Get(whole.View(shape, strides, first))(t)
	}
	run := func(b *gpu.Backend, in, out backend.Tensor) []float32 {
		t.Helper()
		check(t, attend(t.Context(), b, view(in), view(out)))
		return must.Get(kernels.NewDevice(b).ToFloat32(t.Context(), view(out)))(t)
	}
	own := must.Get(gpu.Open("", gpu.Options{Tune: gpu.TuneOff}))(t)
	defer own.Close()
	in := must.Get(kernels.NewDevice(own).FromFloat32(t.Context(), backend.F32, x, backend.Shape{1, 1, 1, n}))(t)
	out := must.Get(own.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, 1, n}))(t)
	want := run(own, in, out)
	for _, limits := range []gputypes.Limits{{}, {MaxStorageBufferBindingSize: 36 << 10}, {MaxStorageBufferBindingSize: 36 << 10, MaxBufferSize: 64 << 10}} {
		b := p.share(t, gpu.Options{Limits: limits})
		xb, _ := p.buffer(t, 4*n, port.ImportUsage)
		ob, _ := p.buffer(t, 4*n, port.ImportUsage)
		p.fill(t, xb, wave)
		if got := run(b, wrap(t, b, xb, backend.Shape{1, 1, 1, n}), wrap(t, b, ob, backend.Shape{1, 1, 1, n})); !slices.Equal(got, want) {
			t.Errorf("other bits with limits %+v", limits)
		}
		if name := b.Info().Name; name != "gpu:shared" {
			t.Errorf("the name is %q", name)
		}
		if b.Info().Device != own.Info().Device || b.Info().Driver != own.Info().Driver {
			t.Errorf("described as %+v, an own device of the same adapter as %+v", b.Info(), own.Info())
		}
	}
}

// TestSharedTypes compares calls with keys and values of each type in a program's buffers,
// which are as small as they can be, with those in tensors of the backend.
func TestSharedTypes(t *testing.T) {
	p := openProgram(t, false, false)
	b := p.share(t, gpu.Options{})
	dev := kernels.NewDevice(b)
	for _, typ := range []backend.DType{backend.F32, backend.F16, backend.BF16, backend.Q8, backend.Q4, backend.F8} {
		shape := backend.Shape{1, 1, 5, 12} // 120, 240 or 80 bytes
		if typ == backend.Q4 {
			shape[backend.Dim] = 32 // 90 bytes
		}
		x := waves(shape.Elements())
		run := func(kv backend.Tensor) []float32 {
			t.Helper()
			q := must.Get(dev.FromFloat32(t.Context(), backend.F32, x, shape))(t)
			check(t, dev.Copy(t.Context(), []backend.Tensor{kv}, []backend.Tensor{q}))
			r := must.Get(dev.Attention(t.Context(), q, kv, kv, kernels.Options{Causal: true}))(t)
			return must.Get(dev.ToFloat32(t.Context(), r.O))(t)
		}
		own := must.Get(dev.Alloc(t.Context(), typ, shape))(t)
		buffer, _ := p.buffer(t, uint64(typ.Bytes(shape)+15)&^15, port.ImportUsage)
		wrapped := must.Get(b.Wrap(buffer, typ, shape))(t)
		if !slices.Equal(run(wrapped), run(own)) {
			t.Errorf("%v: other bits", typ)
		}
	}
}

// TestSharedOrder computes inputs, attention and what follows from it for many rounds, in two
// goroutines with a device between them and without a wait of the program's.
func TestSharedOrder(t *testing.T) {
	p := openProgram(t, false, false)
	b := p.share(t, gpu.Options{})
	var goroutines sync.WaitGroup
	for range 2 {
		xb, ob, x, o := p.operands(t, b)
		goroutines.Go(func() {
			for i := range 20 {
				err := errors.Join(
					compute(p.device, xb, fmt.Sprintf("x[i] = %d.0;", i)), // attention averages equal values
					attend(context.Background(), b, x, o),
					compute(p.device, ob, "x[i] = 2.0 * x[i];"),
					compute(p.device, xb, "x[i] = -1.0;"))
				got, failed := kernels.NewDevice(b).ToFloat32(context.Background(), o)
				if err := errors.Join(err, failed); err != nil {
					t.Error(err)
					return
				}
				for _, g := range got {
					if !(math.Abs(float64(g)-2*float64(i)) <= 1e-4) {
						t.Errorf("round %d: %v, want %d", i, g, 2*i)
						return
					}
				}
			}
		})
	}
	goroutines.Wait()
}

// TestSharedRefused opens backends and wraps buffers that cannot be used: each error names
// what is wrong and what would be right.
func TestSharedRefused(t *testing.T) {
	p := openProgram(t, false, false)
	few := openProgram(t, false, true)
	b := p.share(t, gpu.Options{})
	for what, c := range map[string]struct {
		selector string
		opt      gpu.Options
		kind     error
		text     string
	}{
		"no adapter":      {"", gpu.Options{Shared: &gpu.Shared{Device: p.device}}, backend.ErrOption, "Options.Shared has no Adapter or no Device, set both"},
		"no device":       {"", gpu.Options{Shared: &gpu.Shared{Adapter: p.adapter}}, backend.ErrOption, "Options.Shared has no Adapter or no Device, set both"},
		"a selector":      {"1", gpu.Options{Shared: &gpu.Shared{Adapter: p.adapter, Device: p.device}}, backend.ErrOption, "gpu:1: Options.Shared is the device to open, the selector must be empty"},
		"too few":         {"", gpu.Options{Shared: &gpu.Shared{Adapter: few.adapter, Device: few.device}}, backend.ErrUnsupported, "limit MaxBindingsPerBindGroup is 4, kernels need 12 or more"},
		"more than it is": {"", gpu.Options{Shared: &gpu.Shared{Adapter: p.adapter, Device: p.device}, Limits: gputypes.Limits{MaxBufferSize: math.MaxUint64}}, backend.ErrUnsupported, "MaxBufferSize of 18446744073709551615 is over the limit of "},
	} {
		must.Fail(t, what, must.Err(gpu.Open(c.selector, c.opt)), c.kind, c.text)
	}

	shape := backend.Shape{1, 1, 4, 8}
	other := openProgram(t, false, false)
	good, _ := p.buffer(t, 128, port.ImportUsage)
	theirs, _ := other.buffer(t, 128, port.ImportUsage)
	storage, _ := p.buffer(t, 128, gputypes.BufferUsageStorage)
	odd, _ := p.buffer(t, 132, port.ImportUsage)
	for what, c := range map[string]struct {
		buffer *gpu.SharedBuffer
		dtype  backend.DType
		shape  backend.Shape
		kind   error
		text   string
	}{
		"no buffer":      {nil, backend.F32, shape, backend.ErrOption, "wrap: the buffer is nil"},
		"usage":          {storage, backend.F32, shape, backend.ErrUnsupported, "the buffer lacks a usage, create it with Storage, CopySrc and CopyDst"},
		"size":           {odd, backend.F32, shape, backend.ErrUnsupported, "the buffer has 132 bytes, kernels read 16 at a time: create it with 144"},
		"shape":          {good, backend.F32, backend.Shape{1, 1, 5, 8}, backend.ErrShape, "shape [1 1 5 8] of f32 needs 160 bytes, the memory has 128"},
		"negative shape": {good, backend.F32, backend.Shape{1, 1, -1, 8}, backend.ErrShape, "negative"},
		"dtype":          {good, 99, backend.Shape{1, 1, 1, 8}, backend.ErrDType, "the buffer is dtype?, it must be one of [f32 f16 bf16 bool q8 q4 f8 i32]"},
		"other device":   {theirs, backend.F32, shape, backend.ErrDevice, "buffer is on another WebGPU device"},
	} {
		must.Fail(t, what, must.Err(b.Wrap(c.buffer, c.dtype, c.shape)), c.kind, c.text)
	}

	// Nothing of that is left, and the same buffer can be wrapped once at a time.
	x := wrap(t, b, good, shape)
	must.Fail(t, "twice", must.Err(b.Wrap(good, backend.F32, shape)), backend.ErrUnsupported, "in use already, make views of that tensor or release it first")
	own := must.Get(gpu.Open("", gpu.Options{}))(t)
	defer own.Close()
	o := must.Get(own.Alloc(t.Context(), backend.F32, shape))(t)
	must.Fail(t, "tensors of two devices", attend(t.Context(), own, x, o), backend.ErrDevice, "is in gpu:shared, the call runs on gpu:0")
	must.Fail(t, "a device of the backend's own", must.Err(own.Wrap(theirs, backend.F32, shape)), backend.ErrDevice, "buffer is on another WebGPU device")
	x.Release()
	wrap(t, b, good, shape).Release()
	check(t, b.Close())
	must.Fail(t, "closed", must.Err(b.Wrap(good, backend.F32, shape)), backend.ErrClosed, "gpu:shared")
}

// TestSharedLeavesNothing opens, uses and closes backends on one device: their objects are
// gone, and the program's device and buffers work on.
func TestSharedLeavesNothing(t *testing.T) {
	p := openProgram(t, false, false)
	xb, _ := p.buffer(t, 4*64*32, port.ImportUsage)
	ob, _ := p.buffer(t, 4*64*32, port.ImportUsage)
	p.fill(t, xb, wave)
	var want []float32
	for i := range 5 {
		b := p.share(t, gpu.Options{})
		blank := gpu.Port(b).Live()
		shape := backend.Shape{1, 1, 64, 32}
		first := wrap(t, b, xb, shape)
		first.Release()
		x, o := wrap(t, b, xb, shape), wrap(t, b, ob, shape)
		if live := gpu.Port(b).Live(); live.Buffers != blank.Buffers+2 || live.Bytes != blank.Bytes+2*4*64*32 {
			t.Errorf("%+v with two wrapped buffers, %+v without", live, blank)
		}
		check(t, attend(t.Context(), b, x, o))
		got := must.Get(kernels.NewDevice(b).ToFloat32(t.Context(), o))(t)
		if i == 0 {
			want = got
		} else if !slices.Equal(got, want) {
			t.Errorf("round %d: other bits", i)
		}
		o.Release()
		if i%2 == 0 {
			x.Release()
		} // else Close ends its use
		check(t, b.Close())
		if live := gpu.Port(b).Live(); live != (port.Live{}) {
			t.Errorf("round %d left %+v", i, live)
		}
		p.fill(t, ob, "x[i] = 7.0;")
	}
}

// TestSharedReleasedFirst releases what the program owns before the backend is done with it:
// go-webgpu keeps it as long, and gogpu/wgpu makes it an error of later calls.
func TestSharedReleasedFirst(t *testing.T) {
	p := openProgram(t, false, false)
	b := p.share(t, gpu.Options{})
	shape := backend.Shape{1, 1, 64, 32}
	xb, release := p.buffer(t, 4*64*32, port.ImportUsage)
	ob, _ := p.buffer(t, 4*64*32, port.ImportUsage)
	p.fill(t, xb, wave)
	x, o := wrap(t, b, xb, shape), wrap(t, b, ob, shape)
	check(t, attend(t.Context(), b, x, o))
	expect := func(what string, err, want error) {
		t.Helper()
		if native {
			want = nil
		}
		must.Fail(t, what, err, want)
	}
	release()
	expect("a call after the release of the buffer", attend(t.Context(), b, x, o), backend.ErrReleased)
	x.Release()
	if !native {
		expect("Wrap after the release", must.Err(b.Wrap(xb, backend.F32, shape)), backend.ErrReleased)
	}
	yb, _ := p.buffer(t, 4*64*32, port.ImportUsage)
	y := wrap(t, b, yb, shape)
	must.Pass(t, "with another buffer", attend(t.Context(), b, y, o))
	p.release()
	expect("a call after the release of the device", attend(t.Context(), b, y, o), backend.ErrDeviceLost)
	must.Pass(t, "Close after the release of the device", b.Close())
	if !native {
		opt := gpu.Options{Shared: &gpu.Shared{Adapter: p.adapter, Device: p.device}}
		expect("Open on a released device", must.Err(gpu.Open("", opt)), backend.ErrDeviceLost)
	}
}

// TestSharedTimestamps traces calls: kernels have times only on a device that the program has
// opened with timestamp queries, and not with gogpu.
func TestSharedTimestamps(t *testing.T) {
	for _, timestamps := range []bool{false, true} {
		p := openProgram(t, timestamps, false)
		b := p.share(t, gpu.Options{})
		_, _, x, o := p.operands(t, b)
		var times atomic.Int32
		ctx := backend.WithTrace(t.Context(), &backend.Trace{Kernel: func(time.Duration) { times.Add(1) }})
		check(t, attend(ctx, b, x, o))
		want := timestamps && !strings.HasPrefix(b.Info().Provider, "gogpu")
		if got := times.Load() > 0; got != want {
			t.Errorf("with the feature: %v, kernels have times: %v", timestamps, got)
		}
	}
}
