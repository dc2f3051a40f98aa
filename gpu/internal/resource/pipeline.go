package resource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
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

// Acquire returns p compiled. It stays so until Release. Acquire returns
// backend.ErrUnsupported when the device does not support or accept the kernel, and the
// error of ctx when that ends first. A compilation cannot be interrupted: it goes on for
// the next call.
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
		kind := map[rune]port.BindingKind{'r': port.ReadOnly, 'w': port.ReadWrite, 'u': port.Uniform}[c]
		d.Bindings = append(d.Bindings, kind)
	}
	return d, nil
}

// Pace is the speed of a pipeline in operations a second: an assumption at first, then
// what its submissions show.
type Pace struct{ bits atomic.Uint64 }

// Bounds of a speed. No clock that stops or jumps can make submissions endless or single
// workgroups.
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

// Measured corrects the speed after a submission that took ratio times its expected
// time. The new speed is the geometric mean of the old and the measured one: three or
// four submissions correct a factor of 16 to within a fifth, and each halves the effect
// of a disturbance. Of concurrent corrections one may be lost.
func (p *Pace) Measured(ratio float64) {
	if ratio <= 0 || math.IsNaN(ratio) {
		return
	}
	ratio = min(max(ratio, 1./maxStep), maxStep)
	p.Set(min(max(p.Speed()/math.Sqrt(ratio), minSpeed), maxSpeed))
}
