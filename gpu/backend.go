package gpu

import (
	"context"
	"fmt"
	"sync"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Backend is an open WebGPU device; it implements backend.Backend,
// backend.Projector, backend.Merger and backend.PeakMeter. Its methods are safe
// for concurrent use: calls take turns on the device, one submission at a time.
type Backend struct {
	dev     port.Device
	info    backend.Info
	limits  gputypes.Limits
	maxWork float64
	pool    *pool

	// life is held for reading by every call, so that Close waits for them.
	life   sync.RWMutex
	closed bool

	pipes struct {
		sync.Mutex
		byKey map[string]port.Pipeline
	}
	// blank stands in for operands that a call does not have, one for each
	// binding, as no buffer may be bound twice when one of the two is written.
	blank [maxBindings]port.Buffer
}

var (
	_ backend.Backend   = (*Backend)(nil)
	_ backend.Projector = (*Backend)(nil)
	_ backend.Merger    = (*Backend)(nil)
	_ backend.PeakMeter = (*Backend)(nil)
)

// maxBindings is the most that a kernel has (attention).
const maxBindings = 9

// blankBytes is enough for what a kernel may look at where an operand is missing.
const blankBytes = 256

const defaultPoolBytes = 64 << 20

func newBackend(dev port.Device, info backend.Info, opt Options) (*Backend, error) {
	b := &Backend{dev: dev, info: info, limits: dev.Limits(), maxWork: opt.MaxWork}
	if b.maxWork <= 0 {
		b.maxWork = map[backend.DeviceType]float64{
			backend.Discrete: workDiscrete, backend.Integrated: workIntegrated, backend.Virtual: workIntegrated,
		}[info.Type]
	}
	if b.maxWork <= 0 {
		b.maxWork = workCPU
	}
	keep := opt.PoolBytes
	if keep == 0 {
		keep = defaultPoolBytes
	}
	b.pool = newPool(dev, keep)
	b.pipes.byKey = map[string]port.Pipeline{}
	for i := range b.blank {
		var err error
		if b.blank[i], err = dev.CreateBuffer(blankBytes, storageUsage); err != nil {
			return nil, translate(info.Name, err)
		}
	}
	return b, nil
}

// Info describes the adapter; the limits are those in force.
func (b *Backend) Info() backend.Info { return b.info }

// Close waits for running calls, then releases everything on the device.
func (b *Backend) Close() error {
	b.life.Lock()
	defer b.life.Unlock()
	if !b.closed {
		b.closed = true
		b.dev.Close()
	}
	return nil
}

// enter starts a call; leave ends it.
func (b *Backend) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.life.RLock()
	if b.closed {
		b.life.RUnlock()
		return fmt.Errorf("%s: %w", b.info.Name, backend.ErrClosed)
	}
	return nil
}

func (b *Backend) leave() { b.life.RUnlock() }

// call runs f between enter and leave with the operands pinned.
func (b *Backend) call(ctx context.Context, name string, outputs, inputs []backend.Operand, f func(r *runner) error) (err error) {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	var pins backend.Pinned
	if err := pins.Pin(b, b.info.Name, outputs, inputs); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer pins.Unpin()
	r := &runner{b: b, ctx: ctx}
	defer func() { r.done(err) }()
	if err := f(r); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := r.flush(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
