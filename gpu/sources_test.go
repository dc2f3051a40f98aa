package gpu

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// recorded is a dispatch that a device got.
type recorded struct {
	wgsl    string
	kinds   []gputypes.BufferBindingType
	sizes   []uint64
	uniform []uint32
	grid    [3]uint32
}

// recorder keeps the dispatches of a device.
type recorder struct {
	port.Device
	written map[port.Buffer][]byte
	list    []recorded
}

type recordedPipeline struct {
	port.Pipeline
	desc port.PipelineDesc
}

func (d *recorder) CreatePipeline(desc port.PipelineDesc) (port.Pipeline, error) {
	p, err := d.Device.CreatePipeline(desc)
	return recordedPipeline{p, desc}, err
}

func (d *recorder) Write(b port.Buffer, at uint64, data []byte) error {
	if at == 0 {
		d.written[b] = slices.Clone(data)
	}
	return d.Device.Write(b, at, data)
}

func (d *recorder) Submit(commands []port.Command, timed bool) (port.Ticket, error) {
	for _, c := range commands {
		p, ok := c.Pipeline.(recordedPipeline)
		if !ok {
			continue // a copy
		}
		r := recorded{wgsl: p.desc.WGSL, kinds: p.desc.Bindings, grid: c.Groups}
		for i, b := range c.Bindings {
			r.sizes = append(r.sizes, b.Size)
			if p.desc.Bindings[i] == port.Uniform {
				for data := d.written[b.Buffer][b.Offset:][:b.Size]; len(data) > 0; data = data[4:] {
					r.uniform = append(r.uniform, binary.LittleEndian.Uint32(data))
				}
			}
		}
		d.list = append(d.list, r)
	}
	return d.Device.Submit(commands, timed)
}

// sourceCalls are calls that differ in the kernels that they run.
var sourceCalls = []struct {
	name    string
	q, k    backend.Shape
	in, kv  backend.DType
	staged  bool
	options func(p *backend.Problem, alloc func(backend.DType, backend.Shape) backend.Tensor)
	kernels []string // that a device runs, and KernelSources therefore returns
}{
	{name: "prefill", q: backend.Shape{1, 16, 2048, 64}, k: backend.Shape{1, 4, 2048, 64}, kernels: []string{"flash"}},
	{name: "bf16, causal", q: backend.Shape{2, 3, 1024, 128}, k: backend.Shape{2, 3, 1024, 128}, in: backend.BF16, kv: backend.BF16,
		options: func(p *backend.Problem, _ func(backend.DType, backend.Shape) backend.Tensor) { p.Visible.Right = 0 }, kernels: []string{"flash"}},
	{name: "mask", q: backend.Shape{1, 2, 512, 80}, k: backend.Shape{1, 2, 512, 80},
		options: func(p *backend.Problem, alloc func(backend.DType, backend.Shape) backend.Tensor) {
			p.Mask = alloc(backend.Bool, backend.Shape{1, 1, 512, 512})
		}, kernels: []string{"flash"}},
	{name: "decode", q: backend.Shape{1, 32, 1, 128}, k: backend.Shape{1, 8, 16384, 128}, kernels: []string{"decode", "splitmerge"}},
	{name: "decode q8", q: backend.Shape{1, 8, 1, 64}, k: backend.Shape{1, 8, 4096, 64}, kv: backend.Q8, kernels: []string{"decode", "splitmerge"}},
	{name: "decode f8", q: backend.Shape{1, 8, 1, 64}, k: backend.Shape{1, 8, 4096, 64}, kv: backend.F8, kernels: []string{"decode", "splitmerge"}},
	{name: "q4", q: backend.Shape{1, 8, 40, 96}, k: backend.Shape{1, 8, 300, 96}, kv: backend.Q4, kernels: []string{"flash"}},
	{name: "stages", q: backend.Shape{1, 2, 256, 64}, k: backend.Shape{1, 2, 512, 64}, staged: true, kernels: []string{"matmul", "softmax", "matmul"}},
}

// The dispatches of KernelSources are those that a device with the same limits gets: the same
// source, bindings, uniform and grid.
func TestKernelSources(t *testing.T) {
	for _, c := range sourceCalls {
		t.Run(c.name, func(t *testing.T) {
			b, d := simulate(t, Options{Budget: emitBudget, exp2: precise}, func() time.Duration { return 0 }, func(l *gputypes.Limits) { *l = Options{Limits: emitLimits}.lower(*l) })
			defer b.Close()
			r := &recorder{Device: d, written: map[port.Buffer][]byte{}}
			b.dev.Port, b.dev.Pipelines.Dev = r, r
			device := func(dtype backend.DType, shape backend.Shape) backend.Tensor { return alloc(t, b, dtype, shape) }
			meta := func(dtype backend.DType, shape backend.Shape) backend.Tensor { return metaOf(t, dtype, shape) }
			call := func(alloc func(backend.DType, backend.Shape) backend.Tensor) *backend.Call {
				x := &backend.Call{Q: alloc(c.in, c.q), K: alloc(c.kv, c.k), V: alloc(c.kv, c.k), O: alloc(c.in, c.q),
					Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}
				if c.options != nil {
					c.options(&x.Problem, alloc)
				}
				return x
			}
			sources := must.Get(KernelSources(call(meta), c.staged))(t)
			x := call(device)
			if c.staged {
				s := device(backend.F32, backend.Shape{c.q[0], c.q[1], c.q[2], c.k[2]})
				check(t, b.QK(t.Context(), s, x.Q, x.K))
				check(t, b.Softmax(t.Context(), s, backend.Tensor{}, &x.Problem))
				check(t, b.PV(t.Context(), x.O, s, x.V))
			} else {
				check(t, b.Attention(t.Context(), x))
			}
			if len(r.list) != len(c.kernels) {
				t.Fatalf("the device ran %d dispatches, want %v", len(r.list), c.kernels)
			}
			for i, got := range r.list {
				j := slices.IndexFunc(sources, func(k KernelSource) bool { return k.WGSL == got.wgsl && slices.Equal(k.Uniform, got.uniform) })
				if j < 0 {
					t.Errorf("dispatch %d, a %s: no source has its WGSL and uniform", i, c.kernels[i])
					continue
				}
				k := sources[j]
				var sizes []uint64
				for n, x := range k.Bindings {
					sizes = append(sizes, x.Bytes)
					if want := [...]string{port.Uniform: "uniform", port.ReadOnly: "read", port.ReadWrite: "read_write"}[got.kinds[n]]; x.Kind != want {
						t.Errorf("%s: binding %s is %s, want %s", k.Kernel, x.Name, x.Kind, want)
					}
				}
				if k.Kernel != c.kernels[i] || k.Grid != got.grid || !slices.Equal(sizes, got.sizes) || k.Groups > int(k.Grid[0]*k.Grid[1]) {
					t.Errorf("%s: grid %v for %d workgroups and bindings of %v bytes, the device got %s, %v and %v", k.Kernel, k.Grid, k.Groups, sizes, c.kernels[i], got.grid, got.sizes)
				}
			}
			for _, k := range sources {
				if len(k.SPIRV) < 1000 || k.SPIRV[0] != 0x07230203 || k.Threads == 0 {
					t.Errorf("%s %s: %d threads, %d words of SPIR-V", k.Kernel, k.Variant, k.Threads, len(k.SPIRV))
				}
			}
		})
	}
}
