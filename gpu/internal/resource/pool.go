// Package resource holds what the calls of a device share: a [Pool] of released buffers, and
// the compiled [Pipelines] with their speed.
package resource

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"sync"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Usages of buffers.
const (
	StorageUsage = gputypes.BufferUsageStorage | gputypes.BufferUsageCopySrc | gputypes.BufferUsageCopyDst
	UniformUsage = gputypes.BufferUsageUniform | gputypes.BufferUsageCopyDst
	StagingUsage = gputypes.BufferUsageMapRead | gputypes.BufferUsageCopyDst
)

// Pool keeps released buffers for later calls, the last ones up to a bound in bytes. Submissions may still
// use a buffer of the pool: later submissions and writes follow them on the device. Buffers
// that are mapped are put back when nothing uses them.
type Pool struct {
	dev     port.Device
	keep    int64                       // bytes
	reclaim func(context.Context) error // waits for the submissions that use retired memory

	mu   sync.Mutex
	free []freeBuffer // in the order in which they were released
	idle int64        // bytes in free
	// used is the bytes in use, peak the most since TakePeak.
	used, peak int64
	// retired is the bytes that were released while submissions may have used them.
	retired int64
}

type freeBuffer struct {
	port.Buffer
	usage gputypes.BufferUsage
}

// NewPool returns a pool on dev that keeps up to so many bytes. reclaim waits for the submissions
// that use released memory.
func NewPool(dev port.Device, keep int64, reclaim func(context.Context) error) *Pool {
	return &Pool{dev: dev, keep: keep, reclaim: reclaim}
}

// MinBytes is the size of the smallest buffer: more than a kernel reads of a missing operand.
const MinBytes = 1024

// maxRetired bounds the memory of released buffers that submissions still use and that the
// pool does not keep.
const maxRetired = 64 << 20

// SizeClass rounds a size up to the next eighth of a power of two, at most 12.5% more, so
// that nearly equal sizes share buffers.
func SizeClass(size, most uint64) uint64 {
	size = max(size, MinBytes)
	step := uint64(1) << max(bits.Len64(size-1)-3, 8) >> 1
	class := (size + step - 1) / step * step
	if class > most {
		// Still a multiple of what a kernel loads at once, if possible.
		if class = (size + 15) &^ 15; class > most {
			class = (size + 3) &^ 3
		}
	}
	return class
}

// Get returns a buffer of at least size bytes with unspecified contents. When the device
// has no room, it waits for retired memory, releases the pool's buffers and tries again.
// It returns the context's error if that ends first.
func (p *Pool) Get(ctx context.Context, size uint64, usage gputypes.BufferUsage) (port.Buffer, error) {
	size = SizeClass(size, p.dev.Limits().MaxBufferSize)
	b, retired := p.take(size, usage)
	if b != nil {
		return b, nil
	}
	if retired > maxRetired {
		if err := p.reclaim(ctx); err != nil {
			return nil, err
		}
	}
	b, err := p.dev.CreateBuffer(size, usage)
	if errors.Is(err, port.ErrMemory) {
		p.mu.Lock()
		retired = p.retired // others may have released more since
		p.mu.Unlock()
		if retired > 0 {
			if err := p.reclaim(ctx); err != nil {
				return nil, err
			}
		}
		if p.Drain() || retired > 0 {
			b, err = p.dev.CreateBuffer(size, usage)
		}
	}
	if err == nil {
		p.count(int64(b.Size()))
	}
	return b, err
}

// Drop releases a buffer that must not be used again.
func (p *Pool) Drop(b port.Buffer) {
	p.count(-int64(b.Size()))
	b.Release()
}

// take returns the last buffer of that size that the pool keeps, if there is one, and the bytes that are retired.
func (p *Pool) take(size uint64, usage gputypes.BufferUsage) (b port.Buffer, retired int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, f := range slices.Backward(p.free) {
		if f.usage == usage && f.Size() == size {
			p.free = slices.Delete(p.free, i, i+1)
			p.idle -= int64(size)
			p.used += int64(size)
			p.peak = max(p.peak, p.used)
			return f.Buffer, p.retired
		}
	}
	return nil, p.retired
}

// count adds bytes to what is in use.
func (p *Pool) count(bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used += bytes
	p.peak = max(p.peak, p.used)
}

// TakePeak returns the most bytes in use at once since the last call of it.
func (p *Pool) TakePeak() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	peak := p.peak
	p.peak = p.used
	return peak
}

// Put keeps a buffer instead of those that the pool has kept for longest, or releases it when it exceeds the bound.
// running means that submissions may still use what is released.
func (p *Pool) Put(b port.Buffer, usage gputypes.BufferUsage, running bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	size := int64(b.Size())
	p.used -= size
	release := func(b port.Buffer) {
		if running {
			p.retired += int64(b.Size())
		}
		b.Release()
	}
	if size > p.keep {
		release(b)
		return
	}
	n := 0
	for ; p.idle+size > p.keep; n++ {
		p.idle -= int64(p.free[n].Size())
		release(p.free[n])
	}
	p.free = append(slices.Delete(p.free, 0, n), freeBuffer{b, usage})
	p.idle += size
}

// Settled notes that no submission runs.
func (p *Pool) Settled() {
	p.mu.Lock()
	p.retired = 0
	p.mu.Unlock()
}

// Drain releases the buffers that the pool keeps and reports whether there were any.
func (p *Pool) Drain() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	drained := p.idle > 0
	for _, b := range p.free {
		b.Release()
	}
	p.free, p.idle = nil, 0
	return drained
}
