//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

import (
	"fmt"
	"time"

	"github.com/rajveermalviya/go-webgpu/wgpu"
)

type nativePipeline struct {
	d      *nativeDevice
	p      *wgpu.ComputePipeline
	layout *wgpu.BindGroupLayout
}

func (p *nativePipeline) Release() {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.d.pipelines[p] {
		p.d.dropPipeline(p)
	}
}

func (d *nativeDevice) dropPipeline(p *nativePipeline) {
	delete(d.pipelines, p)
	d.live.Pipelines--
	p.p.Release()
	p.layout.Release()
}

func (d *nativeDevice) CreatePipeline(desc PipelineDesc) (Pipeline, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	p, err := d.createPipeline(desc)
	if err = d.outcome(err, ErrShader); err != nil {
		if p != nil {
			p.p.Release()
			p.layout.Release()
		}
		return nil, fmt.Errorf("pipeline %s: %w", desc.Label, err)
	}
	d.pipelines[p] = true
	d.live.Pipelines++
	return p, nil
}

func (d *nativeDevice) createPipeline(desc PipelineDesc) (_ *nativePipeline, err error) {
	module, err := d.dev.CreateShaderModule(&wgpu.ShaderModuleDescriptor{
		Label: desc.Label, WGSLDescriptor: &wgpu.ShaderModuleWGSLDescriptor{Code: desc.WGSL},
	})
	if err != nil {
		return nil, err
	}
	defer module.Release()
	entries := make([]wgpu.BindGroupLayoutEntry, len(desc.Bindings))
	for i, k := range desc.Bindings {
		entries[i] = wgpu.BindGroupLayoutEntry{Binding: uint32(i), Visibility: wgpu.ShaderStage_Compute}
		switch k {
		case Uniform:
			entries[i].Buffer.Type = wgpu.BufferBindingType_Uniform
		case ReadOnly:
			entries[i].Buffer.Type = wgpu.BufferBindingType_ReadOnlyStorage
		case ReadWrite:
			entries[i].Buffer.Type = wgpu.BufferBindingType_Storage
		}
	}
	layout, err := d.dev.CreateBindGroupLayout(&wgpu.BindGroupLayoutDescriptor{Label: desc.Label, Entries: entries})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			layout.Release()
		}
	}()
	pipelineLayout, err := d.dev.CreatePipelineLayout(&wgpu.PipelineLayoutDescriptor{
		Label: desc.Label, BindGroupLayouts: []*wgpu.BindGroupLayout{layout},
	})
	if err != nil {
		return nil, err
	}
	defer pipelineLayout.Release()
	p, err := d.dev.CreateComputePipeline(&wgpu.ComputePipelineDescriptor{
		Label: desc.Label, Layout: pipelineLayout,
		Compute: wgpu.ProgrammableStageDescriptor{Module: module, EntryPoint: desc.Entry},
	})
	if err != nil {
		return nil, err
	}
	return &nativePipeline{d: d, p: p, layout: layout}, nil
}

func (d *nativeDevice) Submit(commands []Command) (Ticket, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return 0, err
	}
	return d.submit(commands, nil)
}

// submit is Submit under the lock; the device's clock is read into slot before and
// after the commands unless it is nil.
func (d *nativeDevice) submit(commands []Command, slot *timedSlot) (Ticket, error) {
	buf, groups, err := d.encode(commands, slot)
	defer func() {
		for _, g := range groups {
			g.Release()
		}
	}()
	if err = d.outcome(err, ErrInvalid); err != nil {
		if buf != nil {
			buf.Release()
		}
		return 0, err
	}
	d.queue.Submit(buf)
	buf.Release()
	if err := d.outcome(nil, ErrInvalid); err != nil {
		return 0, err
	}
	d.submitted++
	d.notify()
	return Ticket(d.submitted), nil
}

func (d *nativeDevice) encode(commands []Command, slot *timedSlot) (_ *wgpu.CommandBuffer, groups []*wgpu.BindGroup, err error) {
	enc, err := d.dev.CreateCommandEncoder(nil)
	if err != nil {
		return nil, nil, err
	}
	defer enc.Release()
	if slot != nil {
		if err := d.clock.begin(enc, slot); err != nil {
			return nil, nil, err
		}
	}
	var pass *wgpu.ComputePassEncoder
	endPass := func() error {
		if pass == nil {
			return nil
		}
		err := pass.End()
		pass.Release()
		pass = nil
		return err
	}
	for i := range commands {
		c := &commands[i]
		if c.Pipeline == nil {
			if err := endPass(); err != nil {
				return nil, groups, err
			}
			src, _ := c.Src.(*nativeBuffer)
			dst, _ := c.Dst.(*nativeBuffer)
			if !d.buffers[src] || !d.buffers[dst] {
				return nil, groups, fmt.Errorf("copy with a buffer that is not there")
			}
			if err := enc.CopyBufferToBuffer(src.b, c.SrcOffset, dst.b, c.DstOffset, c.Size); err != nil {
				return nil, groups, err
			}
			continue
		}
		group, p, err := d.bind(c)
		if err != nil {
			_ = endPass()
			return nil, groups, err
		}
		groups = append(groups, group)
		if pass == nil {
			pass = enc.BeginComputePass(nil)
		}
		pass.SetPipeline(p.p)
		pass.SetBindGroup(0, group, nil)
		pass.DispatchWorkgroups(c.Groups[0], c.Groups[1], c.Groups[2])
	}
	if err := endPass(); err != nil {
		return nil, groups, err
	}
	if slot != nil {
		if err := d.clock.end(enc, slot); err != nil {
			return nil, groups, err
		}
	}
	buf, err := enc.Finish(nil)
	return buf, groups, err
}

func (d *nativeDevice) bind(c *Command) (*wgpu.BindGroup, *nativePipeline, error) {
	p, _ := c.Pipeline.(*nativePipeline)
	if !d.pipelines[p] {
		return nil, nil, fmt.Errorf("dispatch of a pipeline that is not there")
	}
	entries := make([]wgpu.BindGroupEntry, len(c.Bindings))
	for i, b := range c.Bindings {
		nb, _ := b.Buffer.(*nativeBuffer)
		if !d.buffers[nb] {
			return nil, nil, fmt.Errorf("binding %d is a buffer that is not there", i)
		}
		entries[i] = wgpu.BindGroupEntry{Binding: uint32(i), Buffer: nb.b, Offset: b.Offset, Size: b.Size}
	}
	group, err := d.dev.CreateBindGroup(&wgpu.BindGroupDescriptor{Layout: p.layout, Entries: entries})
	return group, p, err
}

// Wait looks at the queue again and again instead of blocking in the library:
// its own wait gives up after 5 s and then reports work as done that is not.
func (d *nativeDevice) Wait(t Ticket) error {
	for n, start := 0, time.Now(); ; n++ {
		done, err := d.look(t)
		if done || err != nil {
			return err
		}
		if time.Since(start) > stallLimit {
			d.mu.Lock()
			d.state.lost = 1
			d.mu.Unlock()
			return fmt.Errorf("submission %d did not end within %v: %w", t, stallLimit, ErrLost)
		}
		time.Sleep(backoff(n))
	}
}

func (d *nativeDevice) look(t Ticket) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended() >= uint64(t) {
		return true, nil
	}
	if err := d.usable(); err != nil {
		return false, err
	}
	d.dev.Poll(false, nil)
	if err := d.outcome(nil, ErrInvalid); err != nil {
		return false, err
	}
	return d.ended() >= uint64(t), nil
}
