package gpu

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/tune"
)

// Backend is an open WebGPU device; it implements backend.Backend, backend.Projector,
// backend.Rotator, backend.Merger, backend.Batcher, backend.Scorer, backend.Copier,
// backend.BatchCopier, backend.Warmer and the meters of package backend. Its methods are
// safe for concurrent use: their submissions take turns on the device.
type Backend struct {
	dev    port.Device
	info   backend.Info
	limits gputypes.Limits
	pool   *pool

	// What submissions are sized by, see pace.go.
	budget     time.Duration
	maxWork    float64 // operations; 0 is no bound
	firstSpeed float64
	lanes      int

	slots        slots
	uniformAlign int
	runners      sync.Pool
	pipes        pipes

	// choose picks the variant of the register-tiled kernel: tuner's, unless a test
	// says otherwise.
	choose chooser
	tuner  *tune.Tuner
	// decodeRows is up to how many query rows a key head the decode path takes.
	decodeRows int

	memory    int64         // Options.MemoryBytes
	tensors   atomic.Int64  // bytes of tensors in device memory
	streaming chan struct{} // held by the call that streams

	// life is held for reading by every call, so that Close waits for them.
	life   sync.RWMutex
	closed bool

	// blank stands in for operands that a call does not have, one for each
	// binding, as no buffer may be bound twice when one of the two is written.
	blank [maxBindings]port.Buffer
}

var (
	_ backend.Backend   = (*Backend)(nil)
	_ backend.Projector = (*Backend)(nil)
	_ backend.Merger    = (*Backend)(nil)
	_ backend.PeakMeter = (*Backend)(nil)
	_ backend.Warmer    = (*Backend)(nil)
)

// maxBindings is the most that a kernel has (attention with pages, both masks and both
// biases).
const maxBindings = 12

// blankBytes is enough for what a kernel may look at where an operand is missing.
const blankBytes = 256

const defaultPoolBytes = 64 << 20

func newBackend(dev port.Device, info backend.Info, opt Options) (*Backend, error) {
	b := &Backend{
		dev: dev, info: info, limits: dev.Limits(),
		budget: opt.Budget, maxWork: max(opt.MaxWork, 0),
		pipes: pipes{byHash: map[uint64][]*pipe{}},
	}
	if b.budget <= 0 {
		b.budget = defaultBudget
	}
	b.firstSpeed, b.lanes = firstSpeed(info.Type)
	b.uniformAlign = max(int(b.limits.MinUniformBufferOffsetAlignment), 16)
	var err error
	if opt.Tune, err = opt.Tune.Or(info.Type); err != nil {
		return nil, err
	}
	b.tuner = newTuner(opt, info)
	b.choose = b.tuner.Choose
	b.runners.New = func() any { return new(runner) }
	b.decodeRows = cmp.Or(opt.decodeRows, decodeRows)
	keep := opt.PoolBytes
	if keep == 0 {
		keep = defaultPoolBytes
	}
	b.memory, b.streaming = opt.MemoryBytes, make(chan struct{}, 1)
	if b.memory > 0 {
		keep = min(keep, (cut.Memory{Bound: b.memory}).Pool())
	}
	b.pool = newPool(dev, keep)
	if err := b.newSlots(); err != nil {
		return nil, err
	}
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
	if err := b.dev.Lost(); err != nil {
		b.life.RUnlock()
		return translate(b.info.Name, err)
	}
	return nil
}

func (b *Backend) leave() { b.life.RUnlock() }

// call runs f between enter and leave with the operands pinned. When the caller
// traces progress, f runs in a rehearsal first: then it must not reach the device
// but through the runner.
func (b *Backend) call(ctx context.Context, name string, outputs, inputs []backend.Operand, f func(r *runner) error) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	var pins backend.Pinned
	if err := pins.Pin(b, b.info.Name, outputs, inputs); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer pins.Unpin()
	return b.pinned(ctx, name, f)
}

// pinned is call after the operands are pinned.
func (b *Backend) pinned(ctx context.Context, name string, f func(r *runner) error) (err error) {
	r := b.newRunner(ctx)
	defer func() { r.finish(err) }()
	if r.trace.Progress != nil { // which wants to know how much there is in all
		r.rehearse = true
		if err := f(r); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		r.rehearse = false
	}
	err = f(r)
	if err == nil {
		err = r.flush()
	}
	if err == nil {
		err = r.takeAllBack(r.brought)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, r.interrupted(err))
	}
	return nil
}
