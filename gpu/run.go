package gpu

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// variant is a kernel with values for its constants.
type variant struct {
	kernel shaders.Kernel
	consts map[string]uint32
}

// key names a variant: attention ACC=8 DVB=2 ...
func (v variant) key() string {
	var s strings.Builder
	s.WriteString(v.kernel.Name)
	for _, name := range slices.Sorted(maps.Keys(v.consts)) {
		fmt.Fprintf(&s, " %s=%d", name, v.consts[name])
	}
	return s.String()
}

// pipeline compiles a variant, once.
func (b *Backend) pipeline(v variant) (port.Pipeline, error) {
	key := v.key()
	b.pipes.Lock()
	defer b.pipes.Unlock()
	if p := b.pipes.byKey[key]; p != nil {
		return p, nil
	}
	k := v.kernel
	if k.WorkgroupMemory > int(b.limits.MaxComputeWorkgroupStorageSize) || k.Threads > int(b.limits.MaxComputeInvocationsPerWorkgroup) {
		return nil, fmt.Errorf("kernel %s takes %d bytes of workgroup memory and %d threads, %s has %d and %d: %w",
			k.Name, k.WorkgroupMemory, k.Threads, b.info.Name, b.limits.MaxComputeWorkgroupStorageSize,
			b.limits.MaxComputeInvocationsPerWorkgroup, backend.ErrUnsupported)
	}
	src, err := k.Specialise(v.consts)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, backend.ErrUnsupported)
	}
	kinds := make([]port.BindingKind, len(k.Bindings))
	for i, c := range k.Bindings {
		switch c {
		case 'r':
			kinds[i] = port.ReadOnly
		case 'w':
			kinds[i] = port.ReadWrite
		case 'u':
			kinds[i] = port.Uniform
		}
	}
	p, err := b.dev.CreatePipeline(port.PipelineDesc{Label: key, WGSL: src, Entry: "main", Bindings: kinds})
	if err != nil {
		return nil, translate(b.info.Name, err)
	}
	b.pipes.byKey[key] = p
	return p, nil
}

// step is one dispatch: windows for all bindings but the last, which is the
// uniform made of params.
type step struct {
	variant variant
	windows []window
	params  params
	groups  [3]uint32
	work    float64 // floating point operations, for the size of submissions
}

// window is a span of a buffer that is bound. A nil buffer is an operand that
// the call does not have.
type window struct {
	buf    port.Buffer
	offset uint64
	size   uint64
}

// params collects a uniform in the order of the shader's struct.
type params []uint32

func (p *params) u32(v ...int) {
	for _, x := range v {
		*p = append(*p, uint32(x))
	}
}

func (p *params) f32(v float32) { *p = append(*p, math.Float32bits(v)) }

func (p *params) pad() {
	for len(*p)%4 != 0 {
		*p = append(*p, 0)
	}
}

// strides appends the shader's Strides: base, four strides, padding.
func (p *params) strides(base int, s backend.Strides) {
	p.pad()
	p.u32(base, s[0], s[1], s[2], s[3])
	p.pad()
}

// maxSteps bounds the dispatches of one submission, and so its uniforms.
const maxSteps = 128

// runner collects steps into submissions of bounded work and runs them. Commands
// of a call run in order.
type runner struct {
	b     *Backend
	ctx   context.Context
	steps []step
	work  float64

	state   port.Buffer
	scratch []port.Buffer // to give back at the end
}

// add queues a step and runs what is queued when that is enough.
func (r *runner) add(s step) error {
	if len(r.steps) > 0 && (r.work+s.work > r.b.maxWork || len(r.steps) == maxSteps) {
		if err := r.flush(); err != nil {
			return err
		}
	}
	r.steps = append(r.steps, s)
	r.work += s.work
	return nil
}

// stateFor returns a buffer of at least size bytes for what pieces of a call
// leave to one another. Boxes of a call follow one another in the queue, so they
// can share it.
func (r *runner) stateFor(size uint64) (port.Buffer, error) {
	if r.state != nil && r.state.Size() >= size {
		return r.state, nil
	}
	buf, err := r.b.pool.get(size, storageUsage)
	if err != nil {
		return nil, translate(fmt.Sprintf("%s: scratch of %d bytes", r.b.info.Name, size), err)
	}
	r.state = buf
	r.scratch = append(r.scratch, buf)
	return buf, nil
}

// done gives scratch back, after the call that ended with err.
func (r *runner) done(err error) {
	for _, buf := range r.scratch {
		r.give(buf, storageUsage, err)
	}
	r.scratch, r.state = nil, nil
}

// flush runs what is queued and waits for it.
func (r *runner) flush() (err error) {
	if err := r.ctx.Err(); err != nil {
		return err
	}
	if len(r.steps) == 0 {
		return nil
	}
	steps := r.steps
	r.steps, r.work = r.steps[:0], 0

	align := max(int(r.b.limits.MinUniformBufferOffsetAlignment), 16)
	var data []byte
	offsets := make([]uint64, len(steps))
	for i, s := range steps {
		for len(data)%align != 0 {
			data = append(data, 0)
		}
		offsets[i] = uint64(len(data))
		for _, w := range s.params {
			data = binary.LittleEndian.AppendUint32(data, w)
		}
		for len(data)%16 != 0 {
			data = append(data, 0)
		}
	}
	uniform, err := r.b.pool.get(uint64(len(data)), uniformUsage)
	if err != nil {
		return translate(r.b.info.Name, err)
	}
	var copies []port.Buffer
	defer func() {
		for _, c := range copies {
			r.give(c, storageUsage, err)
		}
		r.give(uniform, uniformUsage, err)
	}()
	if err := r.b.dev.Write(uniform, 0, data); err != nil {
		return translate(r.b.info.Name, err)
	}
	commands := make([]port.Command, 0, len(steps))
	for i, s := range steps {
		p, err := r.b.pipeline(s.variant)
		if err != nil {
			return err
		}
		bindings := make([]port.Binding, 0, maxBindings)
		for j, w := range s.windows {
			if w.buf == nil {
				w = window{r.b.blank[j], 0, blankBytes}
			} else if s.variant.kernel.Bindings[j] == 'r' && s.writes(w.buf) {
				// WebGPU does not let a dispatch read and write one buffer, even
				// in different parts of it: read from a copy of the part.
				c, err := r.b.pool.get(w.size, storageUsage)
				if err != nil {
					return translate(r.b.info.Name, err)
				}
				copies = append(copies, c)
				commands = append(commands, port.Command{Src: w.buf, SrcOffset: w.offset, Dst: c, Size: w.size})
				w = window{c, 0, w.size}
			}
			bindings = append(bindings, port.Binding{Buffer: w.buf, Offset: w.offset, Size: w.size})
		}
		bindings = append(bindings, port.Binding{Buffer: uniform, Offset: offsets[i], Size: uint64(4*len(s.params)+15) &^ 15})
		commands = append(commands, port.Command{Pipeline: p, Bindings: bindings, Groups: s.groups})
	}
	t, err := r.start(commands)
	if err != nil {
		return err
	}
	return r.finish(t)
}

// start submits commands, between two looks at the device's clock when somebody
// wants to know.
func (r *runner) start(commands []port.Command) (port.Ticket, error) {
	submit := r.b.dev.Submit
	if backend.TraceOf(r.ctx).Kernel != nil {
		submit = r.b.dev.SubmitTimed
	}
	t, err := submit(commands)
	return t, translate(r.b.info.Name, err)
}

// finish waits for what start submitted.
func (r *runner) finish(t port.Ticket) error {
	err := r.b.dev.Wait(t)
	if kernel := backend.TraceOf(r.ctx).Kernel; err == nil && kernel != nil {
		took, ok, readErr := r.b.dev.Took(t)
		if err = readErr; ok && err == nil {
			kernel(took)
		}
	}
	return translate(r.b.info.Name, err)
}

// give puts a buffer into the pool, or lets it go after an error, when a
// submission may still use it.
func (r *runner) give(buf port.Buffer, usage gputypes.BufferUsage, err error) {
	if err == nil {
		r.b.pool.put(buf, usage)
	} else {
		buf.Release()
	}
}

// writes reports whether the step writes to buf.
func (s *step) writes(buf port.Buffer) bool {
	for j, w := range s.windows {
		if w.buf == buf && s.variant.kernel.Bindings[j] == 'w' {
			return true
		}
	}
	return false
}

// dispatch queues total workgroups of a step, in as many dispatches as the work
// of one submission and the limit of workgroups a dimension ask for. first and
// last are the places in params of the range's bounds.
func (r *runner) dispatch(s step, total int, each float64) error {
	return split(total, each, r.b.maxWork, int(r.b.limits.MaxComputeWorkgroupsPerDimension), func(first, n, x, y int) error {
		part := s
		part.params = slices.Clone(s.params)
		part.params[paramFirst], part.params[paramTotal] = uint32(first), uint32(first+n)
		part.groups = [3]uint32{uint32(x), uint32(y), 1}
		part.work = float64(n) * each
		return r.add(part)
	})
}

// The first two words of every kernel's parameters.
const (
	paramFirst = 0
	paramTotal = 1
)

// split cuts total workgroups of each operations into ranges and grids: f gets
// the first, how many, and the grid that holds them.
func split(total int, each, maxWork float64, maxDim int, f func(first, n, x, y int) error) error {
	most := total
	if each > 0 {
		most = int(min(float64(total), max(1, maxWork/each)))
	}
	maxDim = min(maxDim, math.MaxInt32)
	most = min(most, maxDim*maxDim)
	for first := 0; first < total; first += most {
		n := min(most, total-first)
		x := min(n, maxDim)
		if err := f(first, n, x, (n+x-1)/x); err != nil {
			return err
		}
	}
	return nil
}
