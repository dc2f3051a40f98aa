// Package resource holds what the calls of a device share: a [Pool] of released buffers, and
// the compiled [Pipelines] with their speed.
package resource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// Pipeline is a kernel on a device, compiled or not, and its speed.
type Pipeline struct {
	Kernel  shaders.Variant
	Kinds   string // of its bindings except the uniform
	Uniform int    // the binding of the uniform
	Pace    Pace
	// Measured is set when a submission with it has ended.
	Measured atomic.Bool

	// Guarded by the lock of Pipelines.
	compiled  port.Pipeline
	compiling *compilation // while it is compiled
	users     int          // steps that are recorded or run with it
	used      uint64       // when it was acquired last, in acquisitions of the device
}

// compilation is one compilation of a pipeline, for all calls that wait for it.
type compilation struct {
	done chan struct{} // closed at its end
	took time.Duration
	err  error
	told atomic.Bool // the trace of a call
}

// maxPipelines bounds the compiled pipelines of a device. A model needs some 20; software
// drivers keep some MiB of machine code for each, hardware drivers less. The least
// recently used ones beyond it are released, and compiled again if a call needs them.
const maxPipelines = 128

// PipelineConfig configures Pipelines.
type PipelineConfig struct {
	Name    string // of the device in errors
	Limits  gputypes.Limits
	OwnExp2 bool                  // kernels use the device's exp2, see package meter
	Speed   float64               // of a pipeline before its first run, in operations a second
	Wrap    func(err error) error // of the port
}

// Pipelines holds the kernels that calls asked for. Entries stay, with their speed: a
// few hundred bytes for each of a finite number of kernels.
type Pipelines struct {
	PipelineConfig
	Dev  port.Device
	Most int // compiled pipelines to keep

	mu    sync.Mutex
	all   map[shaders.Variant]*Pipeline
	live  []*Pipeline // compiled
	clock uint64
}

// NewPipelines returns the pipelines of a device, which is nil if none is compiled.
func NewPipelines(dev port.Device, c PipelineConfig) *Pipelines {
	return &Pipelines{PipelineConfig: c, Dev: dev, Most: maxPipelines, all: map[shaders.Variant]*Pipeline{}}
}

// All returns the pipelines of all kernels that calls asked for.
func (c *Pipelines) All() []*Pipeline {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.all))
}

// Compiled reports whether p is compiled now.
func (c *Pipelines) Compiled(p *Pipeline) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return p.compiled != nil
}

// Of returns the pipeline of k, which need not be compiled.
func (c *Pipelines) Of(k shaders.Variant) *Pipeline {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p, ok := c.all[k]; ok {
		return p
	}
	before, after, _ := strings.Cut(shaders.Describe(k).Bindings, "u")
	p := &Pipeline{Kernel: k, Kinds: before + after, Uniform: len(before)}
	p.Pace.Set(c.Speed)
	c.all[k] = p
	return p
}

// Start begins to compile p unless it is compiled. Where the library can, several compile side by side.
func (c *Pipelines) Start(p *Pipeline) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.start(p)
}

// start returns the compilation of p, which it begins if there is none; nil when p is compiled. The
// caller holds the lock.
func (c *Pipelines) start(p *Pipeline) *compilation {
	if p.compiled == nil && p.compiling == nil {
		p.compiling = &compilation{done: make(chan struct{})}
		go c.compile(p, p.compiling)
	}
	return p.compiling
}

// Acquire returns p compiled. It stays so until Release. Acquire returns backend.ErrUnsupported when the device does
// not support or accept the kernel, and the error of ctx when that ends first. A compilation cannot be interrupted: it
// goes on for the next call.
func (c *Pipelines) Acquire(ctx context.Context, p *Pipeline) (port.Pipeline, error) {
	c.mu.Lock()
	for p.compiled == nil {
		x := c.start(p)
		c.mu.Unlock()
		select {
		case <-x.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if x.err != nil {
			c.mu.Lock()
			if p.compiling == x {
				p.compiling = nil // the next call tries again
			}
			c.mu.Unlock()
			return nil, x.err
		}
		if f := backend.TraceOf(ctx).Compile; f != nil && x.told.CompareAndSwap(false, true) {
			f(shaders.Key(p.Kernel), x.took)
		}
		c.mu.Lock()
	}
	c.clock++
	p.users, p.used = p.users+1, c.clock
	compiled := p.compiled
	var unused []port.Pipeline
	if len(c.live) > c.Most {
		unused = c.trim()
	}
	c.mu.Unlock()
	for _, u := range unused {
		u.Release()
	}
	return compiled, nil
}

// Release ends the use of a pipeline that Acquire returned.
func (c *Pipelines) Release(p *Pipeline) {
	c.mu.Lock()
	p.users--
	c.mu.Unlock()
}

// trim removes the compiled pipelines beyond the bound that were unused for longest and
// returns them. The caller holds the lock and releases them after it.
func (c *Pipelines) trim() (unused []port.Pipeline) {
	slices.SortFunc(c.live, func(a, b *Pipeline) int { return cmp.Compare(a.used, b.used) })
	c.live = slices.DeleteFunc(c.live, func(p *Pipeline) bool {
		old := p.users == 0 && len(c.live)-len(unused) > c.Most
		if old {
			unused = append(unused, p.compiled)
			p.compiled = nil
		}
		return old
	})
	return unused
}

// compile compiles p and ends x.
func (c *Pipelines) compile(p *Pipeline, x *compilation) {
	start := time.Now()
	compiled, err := c.create(p)
	x.took, x.err = time.Since(start), err
	c.mu.Lock()
	if err == nil {
		p.compiling = nil
		c.clock++
		p.compiled, p.used = compiled, c.clock
		c.live = append(c.live, p)
	}
	c.mu.Unlock()
	close(x.done)
}

// create compiles p by the driver.
func (c *Pipelines) create(p *Pipeline) (_ port.Pipeline, err error) {
	x := c.Own(p.Kernel)
	k, l := shaders.Describe(x), &c.Limits
	if k.WorkgroupMemory > int(l.MaxComputeWorkgroupStorageSize) || k.Threads > int(l.MaxComputeInvocationsPerWorkgroup) {
		return nil, fmt.Errorf("kernel %s needs %d bytes of workgroup memory and %d threads, %s has %d and %d: %w", x.Name(), k.WorkgroupMemory, k.Threads,
			c.Name, l.MaxComputeWorkgroupStorageSize, l.MaxComputeInvocationsPerWorkgroup, backend.ErrUnsupported)
	}
	if _, modded := p.Kernel.(shaders.Modded); modded {
		defer func() { // compilers that fold constants may panic
			if r := recover(); r != nil {
				err = fmt.Errorf("score mod: the compiler failed: %v: %w", r, backend.ErrOption)
			} else if err != nil && !errors.Is(err, backend.ErrDeviceLost) && !errors.Is(err, backend.ErrMemory) {
				err = fmt.Errorf("score mod: %w: %w", err, backend.ErrOption)
			}
		}()
	}
	desc, err := Desc(x)
	if err != nil {
		return nil, err
	}
	compiled, err := c.Dev.CreatePipeline(desc)
	if err != nil {
		return nil, c.Wrap(err)
	}
	return compiled, nil
}

// Own returns k as it runs on the device.
func (c *Pipelines) Own(k shaders.Variant) shaders.Variant {
	if c.OwnExp2 {
		return shaders.OwnExp2{Variant: k}
	}
	return k
}

// Desc returns what compiles k.
func Desc(k shaders.Variant) (port.PipelineDesc, error) {
	src, err := shaders.Render(k)
	if err != nil {
		return port.PipelineDesc{}, fmt.Errorf("%w: %w", err, backend.ErrUnsupported)
	}
	d := port.PipelineDesc{Label: shaders.Key(k), WGSL: src, Entry: "main"}
	for _, c := range shaders.Describe(k).Bindings {
		kind := map[rune]gputypes.BufferBindingType{'r': port.ReadOnly, 'w': port.ReadWrite, 'u': port.Uniform}[c]
		d.Bindings = append(d.Bindings, kind)
	}
	return d, nil
}

// Pace is the speed of a pipeline in operations a second: an assumption at first, then what its submissions show.
type Pace struct{ bits atomic.Uint64 }

// Bounds of a speed. No clock that stops or jumps can make submissions endless or single workgroups.
const (
	minSpeed = 1e7
	maxSpeed = 1e15
)

// Set sets the speed from which it is corrected.
func (p *Pace) Set(speed float64) { p.bits.Store(math.Float64bits(speed)) }

// Speed returns the speed.
func (p *Pace) Speed() float64 { return math.Float64frombits(p.bits.Load()) }

// maxStep bounds the factor by which one measurement may correct the speed.
const maxStep = 16

// Measured corrects the speed after a submission that took ratio times its expected time. The new speed is the
// geometric mean of the old and the measured one: three or four submissions correct a factor of 16 to within a fifth,
// and each halves the effect of a disturbance. Of concurrent corrections one may be lost.
func (p *Pace) Measured(ratio float64) {
	if ratio <= 0 || math.IsNaN(ratio) {
		return
	}
	ratio = min(max(ratio, 1./maxStep), maxStep)
	p.Set(min(max(p.Speed()/math.Sqrt(ratio), minSpeed), maxSpeed))
}

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

// maxRetired bounds the memory of released buffers that submissions still use and that the pool does not keep.
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

// Get returns a buffer of at least size bytes with unspecified contents. When the device has no room, it waits for
// retired memory, releases the pool's buffers and tries again. It returns the context's error if that ends first.
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
