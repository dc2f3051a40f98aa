package bench

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
)

// fake is a plain backend in host memory, F32 only, that misbehaves on demand.
type fake struct {
	name string
	// delay is how long a call takes for each million visible pairs in addition to
	// callTime; it ends early with its context.
	delay time.Duration
	// wrongFrom adds 1 to the first element of every row from that call on,
	// counted from 1; 0 never.
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
	return backend.Info{Name: f.name, Device: "pretended", Type: backend.CPU, Provider: "fake v1", Threads: f.threads}
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

func (f *fake) Alloc(_ context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	return backend.AllocHost(dtype, shape)
}

func (f *fake) Upload(_ context.Context, host backend.Tensor) (backend.Tensor, error) {
	return host.Alias()
}

func (f *fake) Download(_ context.Context, host, src backend.Tensor) error {
	to, err := host.Float32s()
	if err != nil {
		return err
	}
	from, err := src.Float32s()
	if err != nil {
		return err
	}
	each(host.Shape(), func(at [4]int) {
		to[index(host, at)] = from[index(src, at)]
	})
	return nil
}

func (f *fake) QK(ctx context.Context, s, q, k backend.Tensor) error {
	if err := f.take(ctx, 0); err != nil {
		return err
	}
	return f.qk(s, q, k)
}

func (f *fake) qk(s, q, k backend.Tensor) error { return products(s, q, k, backend.Dim) }

func (f *fake) PV(ctx context.Context, o, w, v backend.Tensor) error {
	if err := f.take(ctx, 0); err != nil {
		return err
	}
	return f.pv(o, w, v)
}

func (f *fake) pv(o, w, v backend.Tensor) error { return products(o, w, v, backend.Seq) }

func (f *fake) Softmax(ctx context.Context, s, _ backend.Tensor, p *backend.Problem) error {
	if err := f.take(ctx, 0); err != nil {
		return err
	}
	return f.softmax(s, p)
}

func (f *fake) softmax(s backend.Tensor, p *backend.Problem) error {
	x, err := s.Float32s()
	if err != nil {
		return err
	}
	var bias []float32
	if !p.Bias.IsZero() {
		if bias, err = p.Bias.Float32s(); err != nil {
			return err
		}
	}
	sh := s.Shape()
	each(backend.Shape{sh[0], sh[1], sh[2], 1}, func(at [4]int) {
		lo, hi := p.Visible.Range(at[0], at[2], sh[3])
		row := x[index(s, at):][:sh[3]]
		for j := range row {
			y := p.Scale * row[j]
			if p.Softcap > 0 {
				y = p.Softcap * float32(math.Tanh(float64(y/p.Softcap)))
			}
			if !p.Bias.IsZero() {
				y += bias[index(p.Bias, [4]int{at[0], at[1], at[2], j})]
			}
			row[j] = y
		}
		sum, top := 0.0, math.Inf(-1)
		for _, y := range row[lo:hi] {
			top = max(top, float64(y))
		}
		for j, y := range row {
			row[j] = 0
			if lo <= j && j < hi {
				e := math.Exp(float64(y) - top)
				row[j], sum = float32(e), sum+e
			}
		}
		for j := range row {
			row[j] /= float32(sum)
		}
	})
	return nil
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
	w, err := backend.AllocHost(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
	if err != nil {
		return err
	}
	if err := f.qk(w, c.Q, c.K); err != nil {
		return err
	}
	if err := f.softmax(w, &c.Problem); err != nil {
		return err
	}
	if err := f.pv(c.O, w, c.V); err != nil {
		return err
	}
	if f.wrongFrom > 0 && call >= f.wrongFrom {
		o, err := c.O.Float32s()
		if err != nil {
			return err
		}
		sh := c.O.Shape()
		each(backend.Shape{sh[0], sh[1], sh[2], 1}, func(at [4]int) {
			if o[index(c.O, at)]++; f.nan {
				o[index(c.O, at)] = float32(math.NaN())
			}
		})
	}
	return nil
}

// kept keeps the allocations of a fake call on the heap.
var kept *[64]byte

func (f *fake) Plan(_ context.Context, c *backend.Call) (backend.Plan, error) {
	p := backend.NewPlan(c)
	p.Backend, p.Path = f.name, "pretended"
	return p, nil
}

func (f *fake) Wait(ctx context.Context) error { return ctx.Err() }

func (f *fake) Close() error { return nil }

// metered is a fake with a peak rate.
type metered struct {
	fake
	peak float64 // operations a second
	// metered, unless nil, is called when the rate is measured: once a turn.
	metered func()
}

func (m *metered) PeakFLOPS(context.Context) (float64, error) {
	if m.metered != nil {
		m.metered()
	}
	return m.peak, nil
}

// roofed is a fake with a peak rate and a read rate.
type roofed struct {
	metered
	read float64 // bytes a second
	// asked is how many bytes were to be read, in the last measurement.
	asked int64
}

func (m *roofed) ReadBandwidth(_ context.Context, operands ...backend.Tensor) (float64, error) {
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
	rounds float64
	// part is the fraction of a call that its clock counts as computing; 0: no clock.
	part float64
	// compiled is set by the first call.
	compiled bool
}

func (m *device) Info() backend.Info {
	info := m.roofed.Info()
	info.Threads, info.Type = 0, backend.Discrete
	return info
}

// PeakMemory pretends that every call holds 12,345 bytes.
func (m *device) PeakMemory() int64 { return 12345 }

func (m *device) LaunchTime(context.Context) (time.Duration, error) { return m.launch, nil }

func (m *device) Ceilings(context.Context) ([]backend.Ceiling, error) {
	m.rounds++
	return []backend.Ceiling{{Name: "copy", BytesPerSecond: m.rounds * 1e9}, {Name: "upload", BytesPerSecond: 7e9}}, nil
}

func (m *device) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
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

// products writes the sums of products of the elements of a along its last axis and those
// of b along another.
func products(out, a, b backend.Tensor, along int) error {
	group := out.Shape()[backend.Heads] / b.Shape()[backend.Heads]
	o, err := out.Float32s()
	if err != nil {
		return err
	}
	x, err := a.Float32s()
	if err != nil {
		return err
	}
	y, err := b.Float32s()
	if err != nil {
		return err
	}
	n, stepA, stepB := a.Shape()[backend.Dim], a.Strides()[backend.Dim], b.Strides()[along]
	each(out.Shape(), func(i [4]int) {
		first := [4]int{i[0], i[1] / group, i[3], 0}
		if along == backend.Seq {
			first = [4]int{i[0], i[1] / group, 0, i[3]}
		}
		sum, atA, atB := 0.0, index(a, [4]int{i[0], i[1], i[2], 0}), index(b, first)
		for k := range n {
			sum += float64(x[atA+k*stepA]) * float64(y[atB+k*stepB])
		}
		o[index(out, i)] = float32(sum)
	})
	return nil
}

func index(t backend.Tensor, at [4]int) int {
	n := 0
	for i, s := range t.Strides() {
		n += at[i] * s
	}
	return n
}

func each(s backend.Shape, visit func(at [4]int)) {
	for b := range s[0] {
		for h := range s[1] {
			for i := range s[2] {
				for d := range s[3] {
					visit([4]int{b, h, i, d})
				}
			}
		}
	}
}

// wrongStage is a fake with one stage, for Stages the last, that writes a wrong result.
type wrongStage struct {
	fake
	stage string
}

func (f *wrongStage) spoil(stage string, t backend.Tensor) error {
	if f.stage != stage && (f.stage != report.Stages || stage != report.PV) {
		return nil
	}
	x, err := t.Float32s()
	if err != nil {
		return err
	}
	for i := range x {
		x[i] += float32(i%3) / 2
	}
	return nil
}

func (f *wrongStage) QK(ctx context.Context, s, q, k backend.Tensor) error {
	if err := f.fake.QK(ctx, s, q, k); err != nil {
		return err
	}
	return f.spoil(report.QK, s)
}

func (f *wrongStage) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	if err := f.fake.Softmax(ctx, s, lse, p); err != nil {
		return err
	}
	return f.spoil(report.Softmax, s)
}

func (f *wrongStage) PV(ctx context.Context, o, w, v backend.Tensor) error {
	if err := f.fake.PV(ctx, o, w, v); err != nil {
		return err
	}
	return f.spoil(report.PV, o)
}

// differentiator is a fake whose results the CPU backend computes. Gradients take three times as
// long as a call. One of the results may be wrong.
type differentiator struct {
	fake
	cpu   *cpu.Backend
	wrong string
}

func newDifferentiator(wrong string) *differentiator {
	return &differentiator{fake: fake{name: "cpu"}, cpu: cpu.New(cpu.Options{Threads: 1}), wrong: wrong}
}

func (f *differentiator) Attention(ctx context.Context, calls ...*backend.Call) error {
	f.calls.Add(1)
	if err := f.take(ctx, 0); err != nil {
		return err
	}
	if err := f.cpu.Attention(ctx, calls...); err != nil {
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
	if err := f.cpu.Backward(ctx, g); err != nil {
		return err
	}
	outputs, _ := g.Operands()
	return f.spoil(outputs[:])
}

// spoil makes the result that is to be wrong wrong.
func (f *differentiator) spoil(results []backend.Operand) error {
	for _, o := range results {
		if o.Name != f.wrong {
			continue
		}
		x, err := o.Tensor.Float32s()
		if err != nil {
			return err
		}
		for i := range x {
			x[i] *= 1.001
		}
	}
	return nil
}

func (f *differentiator) PlanBackward(_ context.Context, g *backend.Gradients) (backend.Plan, error) {
	p := backend.NewGradientsPlan(g)
	p.Backend, p.Path = f.name, "pretended"
	return p, nil
}
