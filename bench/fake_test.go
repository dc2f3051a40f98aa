package bench

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// computer computes the results of all fakes.
var computer = cpu.New(cpu.Options{Threads: 1})

// fake is a backend in host memory, F32 only, that misbehaves on demand.
type fake struct {
	name string
	// wrongStage is the stage, or report.Stages for the last, that writes a wrong result.
	wrongStage string
	// delay is how long a call takes for each million visible pairs in addition to
	// callTime; it ends early with its context.
	delay time.Duration
	// wrongFrom adds 1 to the output from that call on, counted from 1; 0 never.
	wrongFrom int64
	// nan writes NaN instead.
	nan bool
	// idleFrom leaves outputs as they are from that call on; 0 never.
	idleFrom int64
	// before is called at the start of each fused call with its number.
	before func(call int64) error
	// allocs is how many heap allocations a fused call makes.
	allocs int
	// threads is what Info reports. With 0, Run does not measure arithmetic between the
	// calls, which takes no time in a bubble.
	threads int

	calls atomic.Int64
}

// callTime is how long every call of a fake takes at least, warmUp how many of such calls
// a warm-up has: as many as take warmSeconds. Tests run in a bubble of package synctest,
// where sleeping takes exactly that long and computing takes no time.
const (
	callTime = 4 * time.Millisecond
	warmUp   = 8
)

func (f *fake) Info() backend.Info {
	return backend.Info{Name: f.name, Device: "pretended", Type: kernels.CPU, Provider: "fake v1", Threads: f.threads}
}

// take lets the time of a call pass.
func (f *fake) take(ctx context.Context, pairs int64) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(callTime + f.delay*time.Duration(pairs)/1e6):
		return nil
	}
}

func (f *fake) Alloc(_ context.Context, dtype kernels.DType, shape kernels.Shape) (kernels.Tensor, error) {
	return kernels.AllocHost(dtype, shape)
}

func (f *fake) Upload(_ context.Context, host kernels.Tensor) (kernels.Tensor, error) {
	return host.Alias()
}

func (f *fake) Download(ctx context.Context, host, src kernels.Tensor) error {
	return computer.Download(ctx, host, src)
}

func (f *fake) QK(ctx context.Context, s, q, k kernels.Tensor) error {
	return f.stage(ctx, report.QK, s, func() error { return computer.QK(ctx, s, q, k) })
}

func (f *fake) PV(ctx context.Context, o, w, v kernels.Tensor) error {
	return f.stage(ctx, report.PV, o, func() error { return computer.PV(ctx, o, w, v) })
}

func (f *fake) Softmax(ctx context.Context, s, lse kernels.Tensor, p *backend.Problem) error {
	return f.stage(ctx, report.Softmax, s, func() error { return computer.Softmax(ctx, s, lse, p) })
}

// stage computes a stage. Its result is wrong if it is the one that should be.
func (f *fake) stage(ctx context.Context, name string, out kernels.Tensor, compute func() error) error {
	if err := f.take(ctx, 0); err != nil {
		return err
	}
	if err := compute(); err != nil || f.wrongStage != name && (f.wrongStage != report.Stages || name != report.PV) {
		return err
	}
	return change(out, func(i int, x float32) float32 { return x + float32(i%3)/2 })
}

// change replaces the elements x of a tensor.
func change(t kernels.Tensor, to func(i int, x float32) float32) error {
	data, err := t.Float32s()
	for i, x := range data {
		data[i] = to(i, x)
	}
	return err
}

func (f *fake) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		if err := f.attention(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

func (f *fake) attention(ctx context.Context, c *backend.Call) error {
	call := f.calls.Add(1)
	if f.before != nil {
		if err := f.before(call); err != nil {
			return err
		}
	}
	if f.idleFrom > 0 && call >= f.idleFrom {
		return nil
	}
	for range f.allocs {
		kept = new([64]byte)
	}
	d := c.Dims()
	if err := f.take(ctx, c.Visible.Pairs(d.Batch, d.SeqQ, d.SeqK)*int64(d.Heads)); err != nil {
		return err
	}
	if err := computer.Attention(ctx, c); err != nil || f.wrongFrom == 0 || call < f.wrongFrom {
		return err
	}
	return change(c.O, func(_ int, x float32) float32 {
		if f.nan {
			return float32(math.NaN())
		}
		return x + 1
	})
}

// kept keeps the allocations of a fake call on the heap.
var kept *[64]byte

func (f *fake) Plan(ctx context.Context, calls ...*backend.Call) (backend.Plan, error) {
	p := backend.NewPlan(calls[0])
	p.Backend, p.Path = f.name, "pretended"
	return p, ctx.Err()
}

func (f *fake) Wait(ctx context.Context) error { return ctx.Err() }

func (f *fake) Close() error { return nil }

// roofed is a fake with a peak rate and a read rate; 0 is not measured.
type roofed struct {
	fake
	peak float64 // operations a second
	read float64 // bytes a second
	// asked is how many bytes were to be read, in the last measurement.
	asked int64
}

func (m *roofed) PeakFLOPS(context.Context) (float64, error) { return m.peak, nil }

// Low precision takes three products of matrices for one.
func (m *roofed) Plan(ctx context.Context, calls ...*backend.Call) (backend.Plan, error) {
	p, err := m.fake.Plan(ctx, calls...)
	if calls[0].LowPrecision {
		p.Matrices = 3
	}
	return p, err
}

func (m *roofed) MatrixFLOPS(context.Context) (float64, error) { return 3 * m.peak, nil }

func (m *roofed) ReadBandwidth(_ context.Context, operands ...kernels.Tensor) (float64, error) {
	m.asked = 0
	for _, t := range operands {
		if !t.IsZero() {
			m.asked += t.Bytes()
		}
	}
	return m.read, nil
}

// device is a fake with a queue and a clock.
type device struct {
	roofed
	launch time.Duration
	// part is the fraction of a call that its clock counts as computing; 0: no clock.
	part float64
	// compiled is set by the first call.
	compiled bool
}

func (m *device) Info() backend.Info {
	info := m.roofed.Info()
	info.Threads, info.Type = 0, kernels.Discrete
	return info
}

// PeakMemory pretends that every call holds 12,345 bytes.
func (m *device) PeakMemory() int64 { return 12345 }

func (m *device) LaunchTime(context.Context) (time.Duration, error) { return m.launch, nil }

func (m *device) Upload(ctx context.Context, host kernels.Tensor) (kernels.Tensor, error) {
	if move := backend.TraceOf(ctx).Move; move != nil {
		move(host.Bytes(), time.Duration(host.Bytes())) // 1 GB/s
	}
	return m.roofed.Upload(ctx, host)
}

func (m *device) Attention(ctx context.Context, calls ...*backend.Call) error {
	trace := backend.TraceOf(ctx)
	if trace.Compile != nil && !m.compiled {
		trace.Compile("attention", 2*time.Second)
		trace.Compile("merge", time.Second)
	}
	m.compiled = true
	begin := time.Now()
	err := m.roofed.Attention(ctx, calls...)
	if trace.Kernel != nil && m.part > 0 {
		took := time.Duration(m.part * float64(time.Since(begin)) / 2)
		trace.Kernel(took)
		trace.Kernel(took)
	}
	return err
}

// differentiator is a fake with gradients, which take three times as long as a call. One of the results may be wrong.
type differentiator struct {
	fake
	wrong string
}

func newDifferentiator(wrong string) *differentiator {
	return &differentiator{fake{name: "cpu"}, wrong}
}

func (f *differentiator) Attention(ctx context.Context, calls ...*backend.Call) error {
	if err := f.fake.Attention(ctx, calls...); err != nil {
		return err
	}
	outputs, _ := calls[0].Operands()
	return f.spoil(outputs[:])
}

func (f *differentiator) Backward(ctx context.Context, g *backend.Gradients) error {
	for range 3 {
		if err := f.take(ctx, 0); err != nil {
			return err
		}
	}
	if err := computer.Backward(ctx, g); err != nil {
		return err
	}
	outputs, _ := g.Operands()
	return f.spoil(outputs[:])
}

// spoil makes the result that is to be wrong wrong.
func (f *differentiator) spoil(results []backend.Operand) error {
	for _, o := range results {
		if o.Name == f.wrong {
			return change(o.Tensor, func(_ int, x float32) float32 { return 1.001 * x })
		}
	}
	return nil
}

func (f *differentiator) PlanBackward(_ context.Context, g *backend.Gradients) (backend.Plan, error) {
	p := backend.NewGradientsPlan(g)
	p.Backend, p.Path = f.name, "pretended"
	return p, nil
}
