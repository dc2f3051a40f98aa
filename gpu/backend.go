package gpu

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/meter"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
)

// Backend is an open WebGPU device. It implements backend.Backend and the optional interfaces listed below it. Its
// methods are safe for concurrent use: their submissions take turns on the device.
type Backend struct {
	dev  *queue.Device
	info backend.Info

	tuner    *tune.Tuner
	choose   chooser // of the variant of the register-tiled kernel: the tuner's, except in tests
	matrices tune.Matrices
	// decodeRows is the most query rows a key head that the decode path takes.
	decodeRows int
	// exponentials describes for plans which exp2 the kernels use.
	exponentials string

	life    sync.Mutex
	closed  bool
	calling sync.WaitGroup // Close waits for it; calls begin while closed is not set
	close   func() error
}

var (
	_ backend.Backend        = (*Backend)(nil)
	_ backend.Convolver      = (*Backend)(nil)
	_ backend.Copier         = (*Backend)(nil)
	_ backend.Differentiator = (*Backend)(nil)
	_ backend.Indexer        = (*Backend)(nil)
	_ backend.LinearAttender = (*Backend)(nil)
	_ backend.QueueMeter     = (*Backend)(nil)
	_ backend.Merger         = (*Backend)(nil)
	_ backend.Normaliser     = (*Backend)(nil)
	_ backend.Gater          = (*Backend)(nil)
	_ backend.Meter          = (*Backend)(nil)
	_ backend.Projector      = (*Backend)(nil)
	_ backend.Rotator        = (*Backend)(nil)
	_ backend.Scorer         = (*Backend)(nil)
	_ backend.Warmer         = (*Backend)(nil)
)

// newBackend returns a Backend on an open device, which it closes when that fails.
func newBackend(dev port.Device, info backend.Info, opt Options) (_ *Backend, err error) {
	defer func() {
		if err != nil {
			_ = dev.Close() // err matters more
		}
	}()
	b := &Backend{info: info, matrices: tune.MatricesOf(dev.Features()), decodeRows: cmp.Or(opt.decodeRows, decodeRows)}
	b.close = sync.OnceValue(b.shut)
	b.dev, err = queue.New(dev, info.Name, info.Type, queue.Config{
		Budget: opt.Budget, MaxWork: opt.MaxWork, PoolBytes: opt.PoolBytes, MemoryBytes: opt.MemoryBytes,
	})
	if err != nil {
		return nil, err
	}
	if opt.exp2 == nil {
		opt.exp2 = meter.Exp2
	}
	b.dev.Pipelines.OwnExp2, b.exponentials = chooseExp2(dev, opt.exp2)
	if opt.Tune, err = opt.Tune.Or(info.Type); err != nil {
		return nil, err
	}
	if opt.TuneFile == "" {
		opt.TuneFile, _ = tuningPath() // "" if there is none; then plans mention it
	}
	b.tuner = tune.New(tune.Options{Mode: opt.Tune, Budget: opt.TuneBudget, Path: opt.TuneFile, Info: info})
	b.choose = b.tuner.Choose
	return b, nil
}

// tuningPath is TuneFile, except in tests.
var tuningPath = TuneFile

// exp2Time bounds the measurement of exp2, which takes milliseconds, on a device that hangs.
const exp2Time = 10 * time.Second

// chooseExp2 reports whether kernels use the device's exp2, and describes the choice. measure
// is meter.Exp2, except in tests.
func chooseExp2(dev port.Device, measure func(context.Context, port.Device) (ulp float64, err error)) (own bool, about string) {
	ctx, cancel := context.WithTimeout(context.Background(), exp2Time)
	defer cancel()
	ulp, err := measure(ctx, dev)
	switch {
	case err != nil:
		return false, fmt.Sprintf("exponentials in software (the device's: %v)", err)
	case ulp > meter.MaxExp2Error:
		return false, fmt.Sprintf("exponentials in software (the device's are off by up to %.3g ulp)", ulp)
	}
	return true, fmt.Sprintf("exponentials of the device (off by up to %.3g ulp)", ulp)
}

// Info describes the adapter. The limits are those in force.
func (b *Backend) Info() backend.Info { return b.info }

// Close waits for the submissions of all calls and releases everything on the device. When the device hangs, calls that
// wait for it return backend.ErrClosed, its memory is left to the driver, and Close returns backend.ErrDeviceLost.
func (b *Backend) Close() error { return b.close() }

func (b *Backend) shut() error {
	b.life.Lock()
	b.closed = true // later calls do not begin
	b.life.Unlock()
	idle := make(chan struct{})
	go func() {
		b.calling.Wait()
		close(idle)
	}()
	for running := true; running && !b.dev.Port.Hung(); {
		select {
		case <-idle:
			running = false
		case <-time.After(hangPoll):
		}
	}
	if err := b.dev.Port.Close(); err != nil {
		return queue.Translate(b.info.Name, err)
	}
	<-idle
	return nil
}

// hangPoll is the time between two looks at whether the device hangs. Close does not wait for it when calls end.
const hangPoll = 100 * time.Millisecond

// within runs f as a call of b: Close waits for it. Errors of f begin with name.
func (b *Backend) within(ctx context.Context, name string, f func() error) error {
	_, err := resultWithin(ctx, b, name, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

// resultWithin is within for calls with a result.
func resultWithin[T any](ctx context.Context, b *Backend, name string, f func() (T, error)) (result T, err error) {
	if err := ctx.Err(); err != nil {
		return result, err
	}
	b.life.Lock()
	closed := b.closed
	if !closed {
		b.calling.Add(1)
	}
	b.life.Unlock()
	if closed {
		return result, fmt.Errorf("%s: %w", b.info.Name, backend.ErrClosed)
	}
	defer b.calling.Done()
	if err = b.dev.Lost(); err == nil {
		result, err = f()
	}
	if err != nil {
		return result, fmt.Errorf("%s: %w", name, err)
	}
	return result, nil
}

// operands are the tensors of a call.
type operands struct {
	out, in []backend.Operand
	updated []backend.Operand // of out, those that are read too
}

func operandsOf(c *backend.Call) operands {
	out, in := c.Operands()
	return operands{out: out[:], in: in[:]}
}

// run runs the operation that build returns.
func (b *Backend) run(ctx context.Context, name string, build func() (*queue.Op, error)) error {
	return b.runAll(ctx, name, 1, func(int) (*queue.Op, error) { return build() })
}

// runAll runs the n operations that build returns as one call, with the operands of their cutters.
func (b *Backend) runAll(ctx context.Context, name string, n int, build func(i int) (*queue.Op, error)) error {
	return b.within(ctx, name, func() (err error) {
		ops := make([]*queue.Op, n)
		for i := range ops {
			if ops[i], err = build(i); err != nil {
				return err
			}
		}
		of := func(i int) (o operands) {
			for _, x := range ops[i].Cutter.Operands {
				t := backend.Operand{Name: x.Name, Tensor: x.T}
				switch x.Use {
				case cut.Read:
					o.in = append(o.in, t)
				case cut.Updated:
					o.updated = append(o.updated, t)
					fallthrough
				case cut.Written:
					o.out = append(o.out, t)
				}
			}
			return o
		}
		return b.do(ctx, queue.Work{Name: name}, n, of, n, func(i int) ([]*queue.Op, error) { return ops[i : i+1], nil })
	})
}

// do runs a call. It checks and pins the operands of its parts, which of returns, and then queues its operations in groups, which
// it asks for one after the other.
func (b *Backend) do(ctx context.Context, w queue.Work, parts int, of func(i int) operands, groups int, ops func(i int) ([]*queue.Op, error)) error {
	pins := make([]backend.Pinned, parts)
	defer func() {
		for i := range pins {
			pins[i].Unpin()
		}
	}()
	for i := range pins {
		o := of(i)
		err := tooLong(o)
		if err == nil {
			err = pins[i].Pin(b, b.info.Name, o.out, o.in)
		}
		if err != nil {
			return err
		}
		w.Written, w.Read = slices.Grow(w.Written, len(o.out)), slices.Grow(w.Read, len(o.in)+1)
		for _, x := range o.out {
			if s := cut.StoreOf(x.Tensor); s != nil {
				w.Written = append(w.Written, queue.Output{Store: s, Whole: x.Tensor.Memory().Bytes() <= x.Tensor.Bytes()})
			}
		}
		for _, x := range append(o.in, o.updated...) {
			if s := cut.StoreOf(x.Tensor); s != nil {
				w.Read = append(w.Read, s)
			}
		}
	}
	return b.dev.Do(ctx, w, groups, ops)
}

// Wait waits until the device has ended all calls. It returns the error of a call that
// had returned before the device had ended it, unless another call has returned that error.
func (b *Backend) Wait(ctx context.Context) error {
	return b.within(ctx, "wait", func() error { return b.dev.Wait(ctx) })
}

// maxLength bounds lengths, so that kernels' positions and their differences fit 32 bits.
const maxLength = 1<<30 - 1

// tooLong returns backend.ErrUnsupported when a tensor exceeds maxLength along an axis.
func tooLong(o operands) error {
	for _, list := range [][]backend.Operand{o.out, o.in} {
		for _, x := range list {
			for _, n := range x.Tensor.Shape() {
				if n > maxLength {
					return fmt.Errorf("%s has shape %v, lengths up to %d are supported: %w", x.Name, x.Tensor.Shape(), maxLength, backend.ErrUnsupported)
				}
			}
		}
	}
	return nil
}

// rowOp returns an operation on each row of [B, H, S, ·] tensors alone. step returns a
// step without windows: those are the operands', in their order.
func (b *Backend) rowOp(shape backend.Shape, ops []*cut.Operand, step func(x cut.Box, v []cut.View) queue.Step) *queue.Op {
	c := b.dev.NewCutter(cut.Sum, cut.Tile, ops...)
	return &queue.Op{
		Cutter: c, Space: cut.Space(shape[0], shape[1], shape[2], 1, 1),
		Step: func(p queue.Chunk) queue.Step {
			views, windows := make([]cut.View, len(ops)), make([]cut.Window, len(ops))
			for i, o := range ops {
				views[i] = o.View(p.Box, c.Align)
				windows[i] = views[i].Window
			}
			s := step(p.Box, views)
			s.Windows = windows
			return s
		},
	}
}

// rows returns the number of rows of a box.
func rows(x cut.Box) int { return x.Len(cut.Batch) * x.Len(cut.Head) * x.Len(cut.Row) }

// ceil returns n/by, rounded up.
func ceil(n, by int) int { return (n + by - 1) / by }
