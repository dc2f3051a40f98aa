//go:build !js

package pure

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/wgsl"
)

// library is a device of gogpu.
type library struct {
	dev   *wgpu.Device
	queue *wgpu.Queue
	// shared means that the program owns the device and its queue.
	shared bool
	spirv  bool // shaders are compiled by package wgsl

	// unwritten holds the buffers with a write that waits for the next submission. The
	// library copies to them then, even if they are released.
	unwritten map[*Buffer]bool
	// released holds the last submissions at the release of buffers, which are freed when
	// those have ended. The library keeps the buffers that a submission copies, but not
	// those that it binds.
	released map[*Buffer]uint64
	last     uint64 // submission
	ended    uint64 // the last submission that poll found ended
	probed   time.Time

	// The submission that is being recorded: finished command buffers, the current
	// encoder and pass, and the sources and destinations of its copies.
	done           []*wgpu.CommandBuffer
	encoder        *wgpu.CommandEncoder
	pass           *wgpu.ComputePassEncoder
	copied, filled map[*Buffer]bool

	pending *wgpu.MapPending
}

// Traits implements port.Library. The library accepts no other step, whatever the device's limit.
func (l *library) Traits() port.Traits { return port.Traits{DynamicStep: 256} }

// Clock returns none: wgpu 0.34 has no timestamps in compute passes, and writes none in render
// passes on Vulkan.
func (l *library) Clock() *port.Clock { return nil }

// Pause implements port.Library.
func (l *library) Pause(_ context.Context, start, due time.Time) { port.Pause(start, due) }

// Read implements port.Library.
func (l *library) Read(b port.Object, offset uint64, dst []byte) error {
	return port.ReadMapped(l, b, offset, dst)
}

// Lost reports a device that the program has released. The library reports other losses as
// errors only.
func (l *library) Lost() error {
	if l.shared && l.dev.HalDevice() == nil {
		return fmt.Errorf("the program has released its device: %w", port.ErrLost)
	}
	return nil
}

// growStack makes room on the goroutine's stack for a call of the library. wgpu 0.34 passes
// addresses of variables on its stack to Vulkan as integers; if the stack grows, and so
// moves, before Vulkan writes there, the result is lost: a first write on a fresh goroutine
// failed with "vkMapMemory returned null pointer".
//
//go:noinline
func growStack() {
	var room [16 << 10]byte
	runtime.KeepAlive(&room)
}

// CreateBuffer implements port.Library.
func (l *library) CreateBuffer(size uint64, usage gputypes.BufferUsage) (port.Object, error) {
	growStack()
	l.free()
	b, err := l.dev.CreateBuffer(&wgpu.BufferDescriptor{Size: size, Usage: usage})
	if err != nil {
		return nil, translate(err, port.ErrMemory)
	}
	return b, nil
}

// ReleaseBuffer implements port.Library.
func (l *library) ReleaseBuffer(x port.Object) {
	b := x.(*Buffer)
	if l.unwritten[b] {
		l.flush()
	}
	l.released[b] = l.last
	l.free()
}

// flush starts the writes that wait.
func (l *library) flush() {
	growStack()
	if l.Lost() == nil {
		if index, err := l.queue.Submit(); err == nil {
			l.last = index
		}
	}
	clear(l.unwritten)
}

// free frees the released buffers that no submission uses any more.
func (l *library) free() {
	if len(l.released) == 0 {
		return
	}
	ended := l.last
	if l.Lost() == nil {
		ended = l.queue.Poll()
	}
	for b, after := range l.released {
		if after <= ended {
			b.Release()
			delete(l.released, b)
		}
	}
}

// Write implements port.Library.
func (l *library) Write(x port.Object, offset uint64, data []byte) error {
	b := x.(*Buffer)
	growStack()
	if l.unwritten[b] { // the library does not order the copies of one submission
		l.flush()
	}
	l.unwritten[b] = true
	return translate(l.queue.WriteBuffer(b, offset, data), port.ErrInvalid)
}

type pipeline struct {
	p      *wgpu.ComputePipeline
	layout *wgpu.BindGroupLayout
	made   []interface{ Release() } // its objects, in the order of creation
}

// CreatePipeline implements port.Library.
func (l *library) CreatePipeline(desc port.PipelineDesc, dynamic int) (_ port.Object, err error) {
	growStack()
	p := new(pipeline)
	defer func() {
		if err != nil {
			l.ReleasePipeline(p)
			err = translate(err, port.ErrShader)
		}
	}()
	source := &wgpu.ShaderModuleDescriptor{Label: desc.Label, WGSL: wgsl.Mended(desc.WGSL)}
	if l.spirv {
		if source.SPIRV, err = wgsl.SPIRV(desc.WGSL); err != nil {
			return nil, err
		}
		source.WGSL = ""
	}
	module, err := l.dev.CreateShaderModule(source)
	if err != nil {
		return nil, err
	}
	p.made = append(p.made, module)
	types := map[port.BindingKind]gputypes.BufferBindingType{
		port.Uniform: gputypes.BufferBindingTypeUniform, port.ReadOnly: gputypes.BufferBindingTypeReadOnlyStorage, port.ReadWrite: gputypes.BufferBindingTypeStorage,
	}
	entries := make([]gputypes.BindGroupLayoutEntry, len(desc.Bindings))
	for i, k := range desc.Bindings {
		entries[i] = gputypes.BindGroupLayoutEntry{
			Binding: uint32(i), Visibility: wgpu.ShaderStageCompute,
			Buffer: &gputypes.BufferBindingLayout{Type: types[k], HasDynamicOffset: i == dynamic},
		}
	}
	if p.layout, err = l.dev.CreateBindGroupLayout(&wgpu.BindGroupLayoutDescriptor{Label: desc.Label, Entries: entries}); err != nil {
		return nil, err
	}
	p.made = append(p.made, p.layout)
	layout, err := l.dev.CreatePipelineLayout(&wgpu.PipelineLayoutDescriptor{Label: desc.Label, BindGroupLayouts: []*wgpu.BindGroupLayout{p.layout}})
	if err != nil {
		return nil, err
	}
	p.made = append(p.made, layout)
	if p.p, err = l.dev.CreateComputePipeline(&wgpu.ComputePipelineDescriptor{Label: desc.Label, Layout: layout, Module: module, EntryPoint: desc.Entry}); err != nil {
		return nil, err
	}
	p.made = append(p.made, p.p)
	return p, nil
}

// ReleasePipeline implements port.Library.
func (l *library) ReleasePipeline(p port.Object) {
	for _, x := range slices.Backward(p.(*pipeline).made) {
		x.Release()
	}
}

// CreateGroup implements port.Library.
func (l *library) CreateGroup(p port.Object, spans []port.Span) (port.Object, error) {
	growStack()
	entries := make([]wgpu.BindGroupEntry, len(spans))
	for i, s := range spans {
		entries[i] = wgpu.BindGroupEntry{Binding: uint32(i), Buffer: s.Buffer.(*Buffer), Offset: s.Offset, Size: s.Size}
	}
	g, err := l.dev.CreateBindGroup(&wgpu.BindGroupDescriptor{Layout: p.(*pipeline).layout, Entries: entries})
	return g, translate(err, port.ErrInvalid)
}

// ReleaseGroup implements port.Library.
func (l *library) ReleaseGroup(g port.Object) { g.(*wgpu.BindGroup).Release() }

// begin makes sure that there is an encoder, and outside of a pass.
func (l *library) begin() (err error) {
	growStack()
	if l.encoder == nil {
		l.encoder, err = l.dev.CreateCommandEncoder(nil)
	}
	if p := l.pass; p != nil {
		l.pass = nil
		err = p.End()
	}
	return translate(err, port.ErrInvalid)
}

// end finishes the current command buffer.
func (l *library) end() error {
	if err := l.begin(); err != nil {
		return err
	}
	e := l.encoder
	l.encoder = nil // Finish releases it even when it fails
	clear(l.copied)
	clear(l.filled)
	buf, err := e.Finish()
	if err == nil {
		l.done = append(l.done, buf)
	}
	return translate(err, port.ErrInvalid)
}

// Copy records a copy. The library refuses a command buffer that copies both from a
// buffer and to it, so such copies begin another command buffer.
func (l *library) Copy(from, to port.Object, c *port.Command) error {
	src, dst := from.(*Buffer), to.(*Buffer)
	if l.filled[src] || l.copied[dst] {
		if err := l.end(); err != nil {
			return err
		}
	}
	l.copied[src], l.filled[dst] = true, true
	if err := l.begin(); err != nil {
		return err
	}
	l.encoder.CopyBufferToBuffer(src, c.SrcOffset, dst, c.DstOffset, c.Size)
	return nil
}

// Dispatch implements port.Library.
func (l *library) Dispatch(p, g port.Object, offsets []uint32, groups [3]uint32) (err error) {
	growStack()
	if l.pass == nil {
		if err := l.begin(); err != nil {
			return err
		}
		if l.pass, err = l.encoder.BeginComputePass(nil); err != nil {
			return translate(err, port.ErrInvalid)
		}
	}
	l.pass.SetPipeline(p.(*pipeline).p)
	l.pass.SetBindGroup(0, g.(*wgpu.BindGroup), offsets)
	l.pass.Dispatch(groups[0], groups[1], groups[2])
	return nil
}

// Discard drops the commands that were not submitted.
func (l *library) Discard() {
	if l.encoder != nil {
		_ = l.begin() // ends the pass; the caller has an error
		l.encoder.DiscardEncoding()
		l.encoder = nil
	}
	for _, buf := range l.done {
		buf.Release()
	}
	l.done = nil
	clear(l.copied)
	clear(l.filled)
}

// Submit starts the commands.
func (l *library) Submit() (port.Ticket, error) {
	if err := l.end(); err != nil {
		return 0, err
	}
	index, err := l.queue.Submit(l.done...)
	if err != nil {
		return 0, translate(err, port.ErrInvalid)
	}
	l.done = nil
	clear(l.unwritten)
	l.last, l.probed = index, time.Now()
	return port.Ticket(index), nil
}

// probeTime is the time without progress after which poll looks for a loss.
const probeTime = 500 * time.Millisecond

// Poll returns the last submission that has ended. The library ignores losses when it
// looks for that, but not when it submits.
func (l *library) Poll() (port.Ticket, error) {
	growStack()
	ended := l.queue.Poll()
	l.free()
	if ended != l.ended || ended >= l.last {
		l.ended, l.probed = ended, time.Now()
	}
	if time.Since(l.probed) < probeTime {
		return port.Ticket(ended), nil
	}
	l.probed = time.Now()
	_, err := l.Submit()
	l.Discard()
	return port.Ticket(ended), err
}

// StartMap implements port.Mapper.
func (l *library) StartMap(b port.Object, offset, size uint64) (err error) {
	growStack()
	l.pending, err = b.(*Buffer).MapAsync(wgpu.MapModeRead, offset, size)
	return translate(err, port.ErrInvalid)
}

// Mapped implements port.Mapper.
func (l *library) Mapped() (bool, error) {
	l.dev.Poll(wgpu.PollPoll)
	ready, err := l.pending.Status()
	if ready || err != nil {
		l.pending.Release()
		l.pending = nil
	}
	return ready, translate(err, port.ErrInvalid)
}

// EndMap implements port.Mapper.
func (l *library) EndMap(b port.Object) {
	_ = b.(*Buffer).Unmap() // fails when the map has ended
	l.pending.Release()
}

// CopyMapped implements port.Mapper.
func (l *library) CopyMapped(x port.Object, offset uint64, dst []byte) error {
	b := x.(*Buffer)
	growStack()
	r, err := b.MappedRange(offset, uint64(len(dst)))
	if err == nil {
		copy(dst, r.Bytes())
		r.Release()
	}
	return translate(errors.Join(err, b.Unmap()), port.ErrInvalid)
}

// Close implements port.Library.
func (l *library) Close() {
	if len(l.unwritten) > 0 {
		l.flush()
	}
	_ = l.dev.WaitIdle() // fails for a lost device, which need not be waited for
	for b := range l.released {
		b.Release()
	}
	if !l.shared {
		l.dev.Release()
	}
}
