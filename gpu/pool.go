package gpu

import (
	"errors"
	"math/bits"
	"sync"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

const (
	storageUsage = gputypes.BufferUsageStorage | gputypes.BufferUsageCopySrc | gputypes.BufferUsageCopyDst
	uniformUsage = gputypes.BufferUsageUniform | gputypes.BufferUsageCopyDst
	stagingUsage = gputypes.BufferUsageMapRead | gputypes.BufferUsageCopyDst
)

// pool keeps released buffers for the next call, up to a bound in bytes. No
// submission uses a buffer that is in the pool: calls wait for theirs.
type pool struct {
	dev  port.Device
	keep int64 // bytes

	mu   sync.Mutex
	free map[poolKey][]port.Buffer
	idle int64 // bytes
	// used is how many bytes are handed out, peak the most since peak was asked for.
	used, peak int64
}

type poolKey struct {
	usage gputypes.BufferUsage
	size  uint64
}

func newPool(dev port.Device, keep int64) *pool {
	return &pool{dev: dev, keep: keep, free: map[poolKey][]port.Buffer{}}
}

// sizeClass rounds up so that sizes that are nearly equal share buffers: to the
// next eighth of a power of two, at most 12.5% more than asked for.
func sizeClass(size, most uint64) uint64 {
	size = max(size, blankBytes)
	step := uint64(1) << max(bits.Len64(size-1)-3, 8) >> 1
	class := (size + step - 1) / step * step
	if class > most {
		// Still in multiples of what a kernel loads at once, if possible.
		if class = (size + 15) &^ 15; class > most {
			class = (size + 3) &^ 3
		}
	}
	return class
}

// get returns a buffer of at least size bytes with unspecified contents. When
// the device has no room, what the pool keeps goes first.
func (p *pool) get(size uint64, usage gputypes.BufferUsage) (port.Buffer, error) {
	key := poolKey{usage, sizeClass(size, p.dev.Limits().MaxBufferSize)}
	p.mu.Lock()
	if l := p.free[key]; len(l) > 0 {
		b := l[len(l)-1]
		p.free[key] = l[:len(l)-1]
		p.idle -= int64(b.Size())
		p.count(int64(b.Size()))
		p.mu.Unlock()
		return b, nil
	}
	p.mu.Unlock()
	b, err := p.dev.CreateBuffer(key.size, usage)
	if errors.Is(err, port.ErrMemory) && p.drain() {
		b, err = p.dev.CreateBuffer(key.size, usage)
	}
	if err == nil {
		p.mu.Lock()
		p.count(int64(b.Size()))
		p.mu.Unlock()
	}
	return b, err
}

// count adds bytes to what is handed out. The caller holds the lock.
func (p *pool) count(bytes int64) {
	p.used += bytes
	p.peak = max(p.peak, p.used)
}

// takePeak returns the most bytes that were handed out at once since the last time.
func (p *pool) takePeak() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	peak := p.peak
	p.peak = p.used
	return peak
}

// drop releases a buffer that must not be used again.
func (p *pool) drop(b port.Buffer) {
	p.mu.Lock()
	p.count(-int64(b.Size()))
	p.mu.Unlock()
	b.Release()
}

// put takes a buffer back.
func (p *pool) put(b port.Buffer, usage gputypes.BufferUsage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count(-int64(b.Size()))
	if p.idle+int64(b.Size()) > p.keep {
		b.Release()
		return
	}
	p.idle += int64(b.Size())
	key := poolKey{usage, b.Size()}
	p.free[key] = append(p.free[key], b)
}

// drain releases what is kept and reports whether that was anything.
func (p *pool) drain() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	any := p.idle > 0
	for key, l := range p.free {
		for _, b := range l {
			b.Release()
		}
		delete(p.free, key)
	}
	p.idle = 0
	return any
}
