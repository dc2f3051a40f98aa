package queue

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// Pipeline is a kernel on a device, compiled or not, and its speed.
type Pipeline struct {
	kernel  shaders.Variant
	kinds   string // of its bindings except the uniform
	uniform int    // the binding of the uniform
	pace    pace
	// measured is set when a submission with it has ended.
	measured atomic.Bool

	// Guarded by the lock of pipelines.
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
}

// SetSpeed sets the speed from which the pace of p is corrected, in operations a second.
func (p *Pipeline) SetSpeed(speed float64) { p.pace.set(speed) }

// maxPipelines bounds the compiled pipelines of a device. A model needs some 20; software
// drivers keep some MiB of machine code for each, hardware drivers less. The least
// recently used ones beyond it are released, and compiled again if a call needs them.
const maxPipelines = 128

// pipelines holds the kernels that calls asked for. Entries stay, with their speed: a
// few hundred bytes for each of a finite number of kernels.
type pipelines struct {
	most int

	mu    sync.Mutex
	all   map[shaders.Variant]*Pipeline
	live  []*Pipeline // compiled
	clock uint64
}

// Pipelines returns the pipelines of all kernels that calls asked for.
func (d *Device) Pipelines() (all []*Pipeline) {
	d.pipelines.mu.Lock()
	defer d.pipelines.mu.Unlock()
	return slices.Collect(maps.Values(d.pipelines.all))
}

// Compiled reports whether p is compiled now.
func (d *Device) Compiled(p *Pipeline) bool {
	d.pipelines.mu.Lock()
	defer d.pipelines.mu.Unlock()
	return p.compiled != nil
}

// Pipeline returns the pipeline of k, which need not be compiled.
func (d *Device) Pipeline(k shaders.Variant) *Pipeline {
	c := &d.pipelines
	c.mu.Lock()
	defer c.mu.Unlock()
	if p, ok := c.all[k]; ok {
		return p
	}
	before, after, _ := strings.Cut(shaders.Describe(k).Bindings, "u")
	p := &Pipeline{kernel: k, kinds: before + after, uniform: len(before)}
	p.pace.set(d.pacing.speed)
	c.all[k] = p
	return p
}

// Acquire returns p compiled. It stays so until Release. Acquire returns
// backend.ErrUnsupported when the device does not support or accept the kernel, and the
// error of ctx when that ends first. A compilation cannot be interrupted: it goes on for
// the next call.
func (d *Device) Acquire(ctx context.Context, p *Pipeline) (port.Pipeline, error) {
	c := &d.pipelines
	c.mu.Lock()
	for p.compiled == nil {
		x := p.compiling
		ours := x == nil
		if ours {
			x = &compilation{done: make(chan struct{})}
			p.compiling = x
			go d.compile(p, x)
		}
		c.mu.Unlock()
		select {
		case <-x.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if x.err != nil {
			return nil, x.err
		}
		if f := backend.TraceOf(ctx).Compile; ours && f != nil {
			f(shaders.Key(p.kernel), x.took)
		}
		c.mu.Lock()
	}
	c.clock++
	p.users, p.used = p.users+1, c.clock
	compiled, unused := p.compiled, c.trim()
	c.mu.Unlock()
	for _, u := range unused {
		u.Release()
	}
	return compiled, nil
}

// Release ends the use of a pipeline that Acquire returned.
func (d *Device) Release(p *Pipeline) {
	d.pipelines.mu.Lock()
	p.users--
	d.pipelines.mu.Unlock()
}

// trim removes the compiled pipelines beyond the bound that were unused for longest and
// returns them. The caller holds the lock and releases them after it.
func (c *pipelines) trim() (unused []port.Pipeline) {
	for len(c.live) > c.most {
		oldest := -1
		for i, p := range c.live {
			if p.users == 0 && (oldest < 0 || p.used < c.live[oldest].used) {
				oldest = i
			}
		}
		if oldest < 0 {
			break
		}
		unused = append(unused, c.live[oldest].compiled)
		c.live[oldest].compiled = nil
		c.live = slices.Delete(c.live, oldest, oldest+1)
	}
	return unused
}

// compile compiles p and ends x.
func (d *Device) compile(p *Pipeline, x *compilation) {
	start := time.Now()
	compiled, err := d.create(p)
	x.took, x.err = time.Since(start), err
	c := &d.pipelines
	c.mu.Lock()
	p.compiling = nil
	if err == nil {
		c.clock++
		p.compiled, p.used = compiled, c.clock
		c.live = append(c.live, p)
	}
	c.mu.Unlock()
	close(x.done)
}

// create compiles p by the driver.
func (d *Device) create(p *Pipeline) (port.Pipeline, error) {
	x := d.own(p.kernel)
	k, l := shaders.Describe(x), &d.Limits
	if k.WorkgroupMemory > int(l.MaxComputeWorkgroupStorageSize) || k.Threads > int(l.MaxComputeInvocationsPerWorkgroup) {
		return nil, fmt.Errorf("kernel %s needs %d bytes of workgroup memory and %d threads, %s has %d and %d: %w", x.Name(), k.WorkgroupMemory, k.Threads,
			d.name, l.MaxComputeWorkgroupStorageSize, l.MaxComputeInvocationsPerWorkgroup, backend.ErrUnsupported)
	}
	desc, err := Desc(x)
	if err != nil {
		return nil, err
	}
	compiled, err := d.Port.CreatePipeline(desc)
	if err != nil {
		return nil, d.wrap(err)
	}
	return compiled, nil
}

// own returns k as it runs on d.
func (d *Device) own(k shaders.Variant) shaders.Variant {
	if d.OwnExp2 {
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
	bindings := shaders.Describe(k).Bindings
	kinds := make([]port.BindingKind, len(bindings))
	for i, c := range bindings {
		switch c {
		case 'r':
			kinds[i] = port.ReadOnly
		case 'w':
			kinds[i] = port.ReadWrite
		case 'u':
			kinds[i] = port.Uniform
		}
	}
	return port.PipelineDesc{Label: shaders.Key(k), WGSL: src, Entry: "main", Bindings: kinds}, nil
}

// PieceWork returns the number of operations that one workgroup of k may do in a
// dispatch: what it does in the time of a submission with all lanes busy.
func (d *Device) PieceWork(k shaders.Variant) float64 {
	p := &d.pacing
	work := d.Pipeline(k).pace.speed() * p.share(time.Time{}) / float64(p.lanes)
	if p.maxWork > 0 {
		work = min(work, p.maxWork)
	}
	return work
}

// Pacing describes for plans how submissions of k are sized.
func (d *Device) Pacing(k shaders.Variant) string {
	p := &d.pacing
	s := fmt.Sprintf("a submission takes up to %v at %.3g operations a second", p.budget/MaxFlight, d.Pipeline(k).pace.speed())
	if p.maxWork > 0 {
		s += fmt.Sprintf(" and %.3g operations", p.maxWork)
	}
	return s
}
