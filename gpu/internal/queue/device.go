// Package queue brings the steps of an operation to a device:
//
//	Op          an operation: its operands, how they are cut (package cut), and its steps
//	Chunk       a span of the keys of a box, which a Step computes
//	dispatch    as many workgroups of a Step as fit the time of a submission
//	batch       the dispatches of the next submission
//	submission  a submission that may still run
//
// Op.walk visits the chunks of an operation. Three callers take the step of each:
//
//	Runner.Queue   submits it with others     (Device.Do)
//	Device.Count   counts it, for a plan
//	a rehearsal    adds up its work and finds the pipelines that it needs (Device.Warmup)
//
// A [Runner] collects steps into submissions of bounded time, streams windows of host memory, and keeps what an
// interrupted call finished. A [Device] owns what all calls share: buffers, pipelines, uniform buffers and pacing.
package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/shaders"
)

// Device is an open device. Its methods are safe for concurrent use: the submissions of concurrent calls take turns.
type Device struct {
	Port   port.Device
	Limits gputypes.Limits
	Pool   *resource.Pool
	// Pipelines of the kernels that calls asked for.
	Pipelines *resource.Pipelines

	name    string
	pacing  pacing
	sent    *sent
	runners sync.Pool

	bound     atomic.Int64  // on the memory of tensors and calls; 0 is none
	tensors   atomic.Int64  // bytes of tensors in device memory
	streaming chan struct{} // holds one element while a call streams
	written   atomic.Int64  // bytes of writes that may not have ended

	// blank replaces operands that a call does not have. Each binding has its own
	// buffer, because none may be bound twice in a dispatch that writes one of them.
	blank [port.MaxBindings]port.Buffer
}

// Config configures a Device. Zero values mean the defaults.
type Config struct {
	Budget      time.Duration // how long a cancelled call may keep the device busy
	MaxWork     float64       // operations of a submission; 0 is no bound
	PoolBytes   int64         // device memory kept for reuse; negative keeps none
	MemoryBytes int64         // bound on device memory; 0 is none
}

// The default of Config.PoolBytes. A discrete GPU keeps the largest state of a call, 128 MiB, and more: to allocate
// 40 MiB for each call takes an H200 about 1.4 ms.
const (
	poolBytes         = 64 << 20
	poolBytesDiscrete = 256 << 20
)

// New returns a Device on an open port device. name identifies it in errors. It returns
// backend.ErrUnsupported for limits with which no kernel runs.
func New(dev port.Device, name string, kind backend.DeviceType, c Config) (*Device, error) {
	l := dev.Limits()
	for _, x := range []struct {
		name       string
		has, least uint64
	}{
		{"MaxBufferSize", l.MaxBufferSize, resource.MinBytes},
		{"MaxStorageBufferBindingSize", l.MaxStorageBufferBindingSize, cut.GranuleBytes},
		{"MaxComputeWorkgroupsPerDimension", uint64(l.MaxComputeWorkgroupsPerDimension), 1},
		{"MaxBindGroups", uint64(l.MaxBindGroups), 1},
		{"MaxBindingsPerBindGroup", uint64(l.MaxBindingsPerBindGroup), port.MaxBindings},
		{"MaxDynamicUniformBuffersPerPipelineLayout", uint64(l.MaxDynamicUniformBuffersPerPipelineLayout), 1},
		{"MaxUniformBuffersPerShaderStage", uint64(l.MaxUniformBuffersPerShaderStage), 1},
		{"MaxUniformBufferBindingSize", l.MaxUniformBufferBindingSize, uint64((&shaders.AttentionParams{}).Size())},
	} {
		if x.has < x.least {
			return nil, fmt.Errorf("%s: limit %s is %d, kernels need %d or more: open the device with the adapter's limits: %w", name, x.name, x.has, x.least, backend.ErrUnsupported)
		}
	}
	d := NewPlanner(l, name, kind, c)
	d.Port, d.Pipelines.Dev = dev, dev
	keep := int64(poolBytes)
	if kind == backend.Discrete {
		keep = poolBytesDiscrete
	}
	keep = cmp.Or(c.PoolBytes, keep)
	if c.MemoryBytes > 0 {
		keep = min(keep, d.Memory().Pool())
	}
	d.Pool = resource.NewPool(dev, keep, d.reclaim)
	var err error
	if d.sent.ring, err = newRing(dev); err != nil {
		return nil, d.wrap(err)
	}
	for i := range d.blank {
		if d.blank[i], err = dev.CreateBuffer(resource.MinBytes, resource.StorageUsage); err != nil {
			return nil, d.wrap(err)
		}
	}
	return d, nil
}

// NewPlanner returns a Device with limits and no device behind it. It plans operations (Count, Dispatches) and must run none.
func NewPlanner(l gputypes.Limits, name string, kind backend.DeviceType, c Config) *Device {
	d := &Device{Limits: l, name: name, pacing: newPacing(kind, c), streaming: make(chan struct{}, 1)}
	d.sent = &sent{submitting: make(chan struct{}, 1), writers: map[*cut.Store]*inFlight{}}
	d.Pipelines = resource.NewPipelines(nil, resource.PipelineConfig{Name: name, Limits: l, Speed: d.pacing.speed, Wrap: d.wrap})
	d.bound.Store(c.MemoryBytes)
	d.runners.New = func() any { return new(Runner) }
	return d
}

// Blank returns a buffer of resource.MinBytes for a missing operand.
func (d *Device) Blank() port.Buffer { return d.blank[0] }

// Lanes returns the number of workgroups that a busy device runs at the same time.
func (d *Device) Lanes() int { return d.pacing.lanes }

// maxWindowBytes keeps indices into a window within 32 bits.
const maxWindowBytes = 1 << 31

// MaxWindow returns the largest span that can be bound.
func MaxWindow(l gputypes.Limits) uint64 {
	return min(l.MaxStorageBufferBindingSize, maxWindowBytes) &^ 3
}

// cutLimits returns the limits that cuts respect.
func (d *Device) cutLimits() cut.Limits {
	return cut.Limits{Binding: MaxWindow(d.Limits), Buffer: d.Limits.MaxBufferSize, Align: uint64(d.Limits.MinStorageBufferOffsetAlignment)}
}

// Memory returns the bound on device memory and what tensors use.
func (d *Device) Memory() cut.Memory {
	return cut.Memory{Bound: d.bound.Load(), Used: d.tensors.Load()}
}

// ErrFull reports that device memory has no room for a tensor, which then stays in host memory.
var ErrFull = errors.New("device memory is full")

// Reserve counts bytes of device memory as used by a tensor. It returns ErrFull when that exceeds the bound.
func (d *Device) Reserve(bytes int64) error {
	for {
		m := d.Memory()
		if !m.Fits(bytes) {
			return ErrFull
		}
		if d.tensors.CompareAndSwap(m.Used, m.Used+bytes) {
			return nil
		}
	}
}

// Forget drops what is known of the memory of a tensor that is freed.
func (d *Device) Forget(x *cut.Store) {
	d.sent.mu.Lock()
	delete(d.sent.writers, x)
	d.sent.mu.Unlock()
}

// Alloc returns device memory for a tensor and the function that frees it, or ErrFull.
func (d *Device) Alloc(ctx context.Context, bytes uint64) (_ *cut.Store, free func(), err error) {
	if err := d.Reserve(int64(bytes)); err != nil {
		return nil, nil, err
	}
	s := &cut.Store{Part: d.cutLimits().Part()}
	free = func() {
		d.Forget(s)
		for _, buf := range s.Parts {
			d.Pool.Put(buf, resource.StorageUsage, true)
		}
		d.tensors.Add(-int64(bytes))
	}
	for at := uint64(0); at < bytes || at == 0; at += s.Part {
		buf, err := d.Pool.Get(ctx, min(s.Part, bytes-at), resource.StorageUsage)
		if err != nil {
			free()
			if errors.Is(err, port.ErrMemory) {
				d.learnBound()
				return nil, nil, fmt.Errorf("%w: %w", err, ErrFull)
			}
			return nil, nil, d.wrap(err)
		}
		s.Parts = append(s.Parts, buf)
	}
	return s, free, nil
}

// learnBound sets a limit on the memory of a device after its first refusal, which reserves a
// share for streaming. It finds how much is free by smaller and smaller requests.
func (d *Device) learnBound() {
	room := uint64(maxLearned)
	for ; room > minLearned; room /= 2 {
		buf, err := d.Port.CreateBuffer(min(room, d.Limits.MaxBufferSize), resource.StorageUsage)
		if err == nil {
			buf.Release()
			break
		}
	}
	d.bound.CompareAndSwap(0, cut.BoundOf(d.tensors.Load(), int64(room)))
}

// The range of the memory that is left for streaming when a device refuses more.
const (
	minLearned = 1 << 20
	maxLearned = cut.MostRoom
)

// wrap wraps an error of the port for the device.
func (d *Device) wrap(err error) error { return Translate(d.name, err) }

// Translate wraps an error of the port in sentinels of package backend: in two where a device is lost for want of memory.
func Translate(what string, err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s: %w", what, err)
	for _, t := range []struct{ port, backend error }{
		{port.ErrNoAdapter, backend.ErrNoDevice},
		{port.ErrLost, backend.ErrDeviceLost},
		{port.ErrMemory, backend.ErrMemory},
		{port.ErrClosed, backend.ErrClosed},
		{port.ErrShader, backend.ErrUnsupported}, {port.ErrInvalid, backend.ErrUnsupported},
		{port.ErrForeign, backend.ErrDevice},
		{port.ErrReleased, backend.ErrReleased},
	} {
		if errors.Is(err, t.port) {
			err = fmt.Errorf("%w: %w", err, t.backend)
		}
	}
	return err
}
