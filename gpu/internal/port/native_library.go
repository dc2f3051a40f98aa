//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

import (
	"fmt"
	"unsafe"

	"github.com/gogpu/gputypes"
	"github.com/rajveermalviya/go-webgpu/wgpu"
)

// library is a device of wgpu-native. ref and Ref fields are the C objects.
type library struct {
	dev              *wgpu.Device
	queue            *wgpu.Queue
	devRef, queueRef unsafe.Pointer
	state            *portState
	submitted        uint64
	encoder          nativeEncoder
	clock            clock
}

type rawBuffer struct {
	b   *wgpu.Buffer
	ref unsafe.Pointer
}

type rawPipeline struct {
	p              *wgpu.ComputePipeline
	layout         *wgpu.BindGroupLayout
	ref, layoutRef unsafe.Pointer
}

type rawGroup = unsafe.Pointer

// dynamicStep is the unit of the offset that a dispatch sets for a pipeline's first uniform.
// The rest of the offset is part of the bind group.
const dynamicStep = 1

func (l *library) lost() error {
	if l.state.lost == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", l.message(), ErrLost)
}

// Error types of webgpu.h.
const (
	errorOutOfMemory = 2
	errorDeviceLost  = 5
)

// outcome returns the error of a call of the library: err itself, or one that callbacks
// have noted since the last call. kind is the sentinel of all but lost devices and lack
// of memory.
func (l *library) outcome(err, kind error) error {
	noted := l.state.error
	l.state.error = 0
	switch {
	case l.state.lost != 0 || noted == errorDeviceLost:
		l.state.lost = 1
		return l.lost()
	case noted == errorOutOfMemory:
		kind = ErrMemory
	case noted == 0 && err == nil:
		return nil
	case noted == 0:
		return fault(err.Error(), kind)
	case err != nil:
		return fault(err.Error()+": "+l.message(), kind)
	}
	return fault(l.message(), kind)
}

func (l *library) createBuffer(size uint64, usage gputypes.BufferUsage) (rawBuffer, error) {
	b, err := l.dev.CreateBuffer(&wgpu.BufferDescriptor{Size: size, Usage: wgpu.BufferUsage(usage)})
	if err := l.outcome(err, ErrInvalid); err != nil {
		if b != nil {
			b.Release()
		}
		return rawBuffer{}, err
	}
	return rawBuffer{b, handleOf(b)}, nil
}

// releaseBuffer polls, because the library frees released memory only then.
func (l *library) releaseBuffer(b rawBuffer) {
	if !l.unsound() {
		b.b.Release()
		l.update()
	}
}

func (l *library) createPipeline(desc PipelineDesc, dynamic int) (rawPipeline, error) {
	var p rawPipeline
	err := l.compile(&p, desc, dynamic)
	if err = l.outcome(err, ErrShader); err != nil {
		l.releasePipeline(p)
		return p, err
	}
	p.ref, p.layoutRef = handleOf(p.p), handleOf(p.layout)
	return p, nil
}

// compile fills in p as far as it gets.
func (l *library) compile(p *rawPipeline, desc PipelineDesc, dynamic int) error {
	module, err := l.dev.CreateShaderModule(&wgpu.ShaderModuleDescriptor{
		Label: desc.Label, WGSLDescriptor: &wgpu.ShaderModuleWGSLDescriptor{Code: desc.WGSL},
	})
	if err != nil {
		return err
	}
	defer module.Release()
	types := map[BindingKind]wgpu.BufferBindingType{
		Uniform: wgpu.BufferBindingType_Uniform, ReadOnly: wgpu.BufferBindingType_ReadOnlyStorage, ReadWrite: wgpu.BufferBindingType_Storage,
	}
	entries := make([]wgpu.BindGroupLayoutEntry, len(desc.Bindings))
	for i, k := range desc.Bindings {
		entries[i] = wgpu.BindGroupLayoutEntry{Binding: uint32(i), Visibility: wgpu.ShaderStage_Compute}
		entries[i].Buffer.Type, entries[i].Buffer.HasDynamicOffset = types[k], i == dynamic
	}
	layout, err := l.dev.CreateBindGroupLayout(&wgpu.BindGroupLayoutDescriptor{Label: desc.Label, Entries: entries})
	if err != nil {
		return err
	}
	p.layout = layout
	pipelineLayout, err := l.dev.CreatePipelineLayout(&wgpu.PipelineLayoutDescriptor{
		Label: desc.Label, BindGroupLayouts: []*wgpu.BindGroupLayout{layout},
	})
	if err != nil {
		return err
	}
	defer pipelineLayout.Release()
	pipe, err := l.dev.CreateComputePipeline(&wgpu.ComputePipelineDescriptor{
		Label: desc.Label, Layout: pipelineLayout,
		Compute: wgpu.ProgrammableStageDescriptor{Module: module, EntryPoint: desc.Entry},
	})
	if err == nil {
		p.p = pipe
	}
	return err
}

func (l *library) releasePipeline(p rawPipeline) {
	if l.unsound() {
		return
	}
	if p.p != nil {
		p.p.Release()
	}
	if p.layout != nil {
		p.layout.Release()
	}
}

// poll runs the callbacks that are due and returns the last submission that has ended.
func (l *library) poll() (Ticket, error) {
	l.update()
	return Ticket(l.state.done), l.outcome(nil, ErrInvalid)
}

// mapped reports whether the map of startMap has ended.
func (l *library) mapped() (bool, error) {
	if l.state.mapped == 0 {
		l.update()
	}
	if err := l.outcome(nil, ErrInvalid); err != nil {
		return false, err
	}
	if s := l.state.mapped - 1; s > 0 {
		return false, fmt.Errorf("map ended with status %d: %w", s, ErrInvalid)
	}
	return l.state.mapped != 0, nil
}

func (l *library) copyMapped(b rawBuffer, offset uint64, dst []byte) error {
	copy(dst, b.b.GetMappedRange(uint(offset), uint(len(dst))))
	return l.outcome(b.b.Unmap(), ErrInvalid)
}
