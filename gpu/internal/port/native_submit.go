//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/rajveermalviya/go-webgpu/wgpu"
)

type nativePipeline struct {
	d      *nativeDevice
	p      *wgpu.ComputePipeline
	layout *wgpu.BindGroupLayout

	id             uint64 // in groupKey
	ref, layoutRef unsafe.Pointer
	dynamic        int // the binding whose offset is given by the dispatch, or -1
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
	d.groups.dropPipeline(p.id)
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
	dynamic := -1
	entries := make([]wgpu.BindGroupLayoutEntry, len(desc.Bindings))
	for i, k := range desc.Bindings {
		entries[i] = wgpu.BindGroupLayoutEntry{Binding: uint32(i), Visibility: wgpu.ShaderStage_Compute}
		switch k {
		case Uniform:
			entries[i].Buffer.Type = wgpu.BufferBindingType_Uniform
			if dynamic < 0 {
				dynamic = i
				entries[i].Buffer.HasDynamicOffset = true
			}
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
	d.lastID++
	return &nativePipeline{d: d, p: p, layout: layout, id: d.lastID, ref: handleOf(p), layoutRef: handleOf(layout), dynamic: dynamic}, nil
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
	err := d.run(commands, slot)
	d.groups.trim()
	if err := d.outcome(err, ErrInvalid); err != nil {
		return 0, err
	}
	d.submitted++
	d.notify()
	return Ticket(d.submitted), nil
}

// Wait looks at the queue again and again instead of blocking in the library:
// its own wait gives up after 5 s and then reports work as done that is not.
func (d *nativeDevice) Wait(t Ticket) error {
	for start := time.Now(); ; {
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
		pause(start)
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
