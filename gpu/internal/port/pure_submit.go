//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"fmt"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
)

type purePipeline struct {
	d              *pureDevice
	id             uint64 // in groupKey
	p              *wgpu.ComputePipeline
	module         *wgpu.ShaderModule
	layout         *wgpu.BindGroupLayout
	pipelineLayout *wgpu.PipelineLayout
}

func (p *purePipeline) Release() {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.d.pipelines[p] {
		p.d.dropPipeline(p)
	}
}

func (d *pureDevice) dropPipeline(p *purePipeline) {
	delete(d.pipelines, p)
	d.live.Pipelines--
	d.groups.dropPipeline(p.id)
	p.free()
}

func (p *purePipeline) free() {
	if p.p != nil {
		p.p.Release()
	}
	if p.pipelineLayout != nil {
		p.pipelineLayout.Release()
	}
	if p.layout != nil {
		p.layout.Release()
	}
	if p.module != nil {
		p.module.Release()
	}
}

func (d *pureDevice) CreatePipeline(desc PipelineDesc) (Pipeline, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	d.lastID++
	p := &purePipeline{d: d, id: d.lastID}
	if err := d.createPipeline(p, desc); err != nil {
		p.free()
		return nil, fmt.Errorf("pipeline %s: %w", desc.Label, d.outcome(err, ErrShader))
	}
	d.pipelines[p] = true
	d.live.Pipelines++
	return p, nil
}

func (d *pureDevice) createPipeline(p *purePipeline, desc PipelineDesc) (err error) {
	source := &wgpu.ShaderModuleDescriptor{Label: desc.Label, WGSL: letsToVars(desc.WGSL)}
	if d.spirv {
		if source.SPIRV, err = compile(desc.WGSL); err != nil {
			return err
		}
		source.WGSL = ""
	}
	if p.module, err = d.dev.CreateShaderModule(source); err != nil {
		return err
	}
	entries := make([]wgpu.BindGroupLayoutEntry, len(desc.Bindings))
	for i, k := range desc.Bindings {
		kind := gputypes.BufferBindingTypeStorage
		switch k {
		case Uniform:
			kind = gputypes.BufferBindingTypeUniform
		case ReadOnly:
			kind = gputypes.BufferBindingTypeReadOnlyStorage
		}
		entries[i] = wgpu.BindGroupLayoutEntry{
			Binding: uint32(i), Visibility: wgpu.ShaderStageCompute,
			Buffer: &gputypes.BufferBindingLayout{Type: kind},
		}
	}
	if p.layout, err = d.dev.CreateBindGroupLayout(&wgpu.BindGroupLayoutDescriptor{Label: desc.Label, Entries: entries}); err != nil {
		return err
	}
	if p.pipelineLayout, err = d.dev.CreatePipelineLayout(&wgpu.PipelineLayoutDescriptor{
		Label: desc.Label, BindGroupLayouts: []*wgpu.BindGroupLayout{p.layout},
	}); err != nil {
		return err
	}
	p.p, err = d.dev.CreateComputePipeline(&wgpu.ComputePipelineDescriptor{
		Label: desc.Label, Layout: p.pipelineLayout, Module: p.module, EntryPoint: desc.Entry,
	})
	return err
}

func (d *pureDevice) Submit(commands []Command) (Ticket, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return 0, err
	}
	defer d.groups.trim()
	var list []*wgpu.CommandBuffer
	index, err := uint64(0), error(nil)
	for rest := commands; err == nil && (len(rest) > 0 || len(list) == 0); {
		n := d.oneWay(rest)
		var buf *wgpu.CommandBuffer
		if buf, err = d.encode(rest[:n]); err == nil {
			list = append(list, buf)
		}
		rest = rest[n:]
	}
	if err == nil {
		index, err = d.queue.Submit(list...)
	}
	if err != nil {
		for _, buf := range list {
			buf.Release()
		}
		return 0, d.outcome(err, ErrInvalid)
	}
	clear(d.written)
	d.last = index
	return Ticket(index), nil
}

// oneWay returns how many of commands one command buffer takes: the library counts
// what a buffer is copied from and to for the whole of it, and refuses both.
func (d *pureDevice) oneWay(commands []Command) int {
	var from, to map[Buffer]bool
	for i, c := range commands {
		if c.Pipeline != nil {
			continue
		}
		if to[c.Src] || from[c.Dst] {
			return i
		}
		if from == nil {
			from, to = map[Buffer]bool{}, map[Buffer]bool{}
		}
		from[c.Src], to[c.Dst] = true, true
	}
	return len(commands)
}

// SubmitTimed is Submit: the library has no query sets above its drivers.
func (d *pureDevice) SubmitTimed(commands []Command) (Ticket, error) { return d.Submit(commands) }

// Took never knows, see SubmitTimed.
func (d *pureDevice) Took(Ticket) (time.Duration, bool, error) { return 0, false, nil }

func (d *pureDevice) encode(commands []Command) (_ *wgpu.CommandBuffer, err error) {
	enc, err := d.dev.CreateCommandEncoder(nil)
	if err != nil {
		return nil, err
	}
	finished := false
	var pass *wgpu.ComputePassEncoder
	endPass := func() error {
		if pass == nil {
			return nil
		}
		p := pass
		pass = nil
		return p.End()
	}
	defer func() {
		if !finished {
			_ = endPass()
			enc.DiscardEncoding()
		}
	}()
	for i := range commands {
		c := &commands[i]
		if c.Pipeline == nil {
			if err := endPass(); err != nil {
				return nil, err
			}
			src, _ := c.Src.(*pureBuffer)
			dst, _ := c.Dst.(*pureBuffer)
			if !d.buffers[src] || !d.buffers[dst] || c.SrcOffset+c.Size > src.size || c.DstOffset+c.Size > dst.size {
				return nil, fmt.Errorf("copy of %d bytes from %d to %d outside its buffers", c.Size, c.SrcOffset, c.DstOffset)
			}
			enc.CopyBufferToBuffer(src.b, c.SrcOffset, dst.b, c.DstOffset, c.Size)
			continue
		}
		group, p, err := d.bind(c)
		if err != nil {
			return nil, err
		}
		if pass == nil {
			if pass, err = enc.BeginComputePass(nil); err != nil {
				return nil, err
			}
		}
		pass.SetPipeline(p.p)
		pass.SetBindGroup(0, group, nil)
		pass.Dispatch(c.Groups[0], c.Groups[1], c.Groups[2])
	}
	if err := endPass(); err != nil {
		return nil, err
	}
	finished = true // Finish gives the encoder back even when it fails
	return enc.Finish()
}

// bind checks what the library does not: spans against buffers and limits.
// Shaders run without index clamps here, so a wrong span would reach beyond. The
// library's Vulkan side knows no dynamic offsets: where the uniform starts is part
// of the group.
func (d *pureDevice) bind(c *Command) (*wgpu.BindGroup, *purePipeline, error) {
	p, _ := c.Pipeline.(*purePipeline)
	if !d.pipelines[p] {
		return nil, nil, fmt.Errorf("dispatch of a pipeline that is not there")
	}
	for _, n := range c.Groups {
		if n > d.limits.MaxComputeWorkgroupsPerDimension {
			return nil, nil, fmt.Errorf("dispatch of %v workgroups, the limit is %d a dimension", c.Groups, d.limits.MaxComputeWorkgroupsPerDimension)
		}
	}
	if len(c.Bindings) > maxKeyBindings {
		return nil, nil, fmt.Errorf("dispatch with %d bindings, at most %d are taken", len(c.Bindings), maxKeyBindings)
	}
	d.key = groupKey{pipeline: p.id}
	for i, b := range c.Bindings {
		pb, _ := b.Buffer.(*pureBuffer)
		if !d.buffers[pb] {
			return nil, nil, fmt.Errorf("binding %d is a buffer that is not there", i)
		}
		if b.Offset+b.Size > pb.size || b.Size > d.limits.MaxStorageBufferBindingSize {
			return nil, nil, fmt.Errorf("binding %d has %d bytes at %d of a buffer of %d, at most %d can be bound",
				i, b.Size, b.Offset, pb.size, d.limits.MaxStorageBufferBindingSize)
		}
		d.key.add(pb.id, b.Offset, b.Size)
	}
	if g, ok := d.groups.get(&d.key); ok {
		return g, p, nil
	}
	entries := make([]wgpu.BindGroupEntry, len(c.Bindings))
	for i, b := range c.Bindings {
		entries[i] = wgpu.BindGroupEntry{Binding: uint32(i), Buffer: b.Buffer.(*pureBuffer).b, Offset: b.Offset, Size: b.Size}
	}
	g, err := d.dev.CreateBindGroup(&wgpu.BindGroupDescriptor{Layout: p.layout, Entries: entries})
	if err == nil {
		d.groups.put(&d.key, g)
	}
	return g, p, err
}

// Wait looks at the queue's count of ended submissions until it has come to t.
func (d *pureDevice) Wait(t Ticket) error {
	for start := time.Now(); ; {
		d.mu.Lock()
		err := d.usable()
		done := err == nil && d.queue.Poll() >= uint64(t)
		d.reap()
		d.mu.Unlock()
		if done || err != nil {
			return err
		}
		if time.Since(start) > stallLimit {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.lost = fmt.Errorf("submission %d did not end within %v: %w", t, stallLimit, ErrLost)
			return d.lost
		}
		pause(start)
	}
}
