//go:build !js

package pure

import (
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

// library is a port.Library and a port.Sharer, a device of gogpu.
type library struct {
	dev   *wgpu.Device
	queue *wgpu.Queue
	// shared means that the program owns the device and its queue.
	shared bool
	spirv  bool // shaders are compiled by package wgsl

	// unwritten holds the buffers with a write that waits for the next submission. The
	// library copies to them then, even if they are released.
	unwritten map[*Buffer]bool
	// released holds the last submissions at the release of buffers, which are freed when those have ended. The library
	// keeps the buffers that a submission copies, but not those that it binds.
	released map[*Buffer]uint64
	last     uint64 // submission
	ended    uint64 // the last submission that poll found ended
	probed   time.Time

	copied, filled map[port.Object]bool // sources and destinations of the copies of a command buffer

	pending *wgpu.MapPending
}

// Traits implements port.Library. The library accepts no other step, whatever the device's limit.
// wgpu 0.34 has no timestamps in compute passes, and writes none in render passes on Vulkan.
func (l *library) Traits() port.Traits { return port.Traits{DynamicStep: 256} }

// Lost reports a device that the program has released. The library reports other losses as errors only.
func (l *library) Lost() error {
	if l.shared && l.dev.HalDevice() == nil {
		return fmt.Errorf("the program has released its device: %w", port.ErrLost)
	}
	return nil
}

// growStack makes room on the goroutine's stack for a call of the library. wgpu 0.34 passes addresses of variables on
// its stack to Vulkan as integers; if the stack grows, and so moves, before Vulkan writes there, the result is lost: a
// first write on a fresh goroutine failed with "vkMapMemory returned null pointer".
//
//go:noinline
func growStack() {
	var room [16 << 10]byte
	runtime.KeepAlive(&room)
}

func (l *library) CreateBuffer(size uint64, usage gputypes.BufferUsage) (port.Object, error) {
	growStack()
	l.free()
	b, err := l.dev.CreateBuffer(&wgpu.BufferDescriptor{Size: size, Usage: usage})
	if err != nil {
		return nil, translate(err, port.ErrMemory)
	}
	return b, nil
}

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
	entries := make([]gputypes.BindGroupLayoutEntry, len(desc.Bindings))
	for i, k := range desc.Bindings {
		entries[i] = gputypes.BindGroupLayoutEntry{
			Binding: uint32(i), Visibility: wgpu.ShaderStageCompute,
			Buffer: &gputypes.BufferBindingLayout{Type: k, HasDynamicOffset: i == dynamic},
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

func (l *library) ReleasePipeline(p port.Object) {
	for _, x := range slices.Backward(p.(*pipeline).made) {
		x.Release()
	}
}

func (l *library) CreateGroup(p port.Object, spans []port.Span) (port.Object, error) {
	growStack()
	entries := make([]wgpu.BindGroupEntry, len(spans))
	for i, s := range spans {
		entries[i] = wgpu.BindGroupEntry{Binding: uint32(i), Buffer: s.Buffer.(*Buffer), Offset: s.Offset, Size: s.Size}
	}
	g, err := l.dev.CreateBindGroup(&wgpu.BindGroupDescriptor{Layout: p.(*pipeline).layout, Entries: entries})
	return g, translate(err, port.ErrInvalid)
}

func (l *library) ReleaseGroup(g port.Object) { g.(*wgpu.BindGroup).Release() }

// record records steps in one command buffer.
func (l *library) record(steps []port.Step) (*wgpu.CommandBuffer, error) {
	growStack()
	encoder, err := l.dev.CreateCommandEncoder(nil)
	if err != nil {
		return nil, err
	}
	var pass *wgpu.ComputePassEncoder
	end := func() {
		if p := pass; p != nil {
			pass, err = nil, p.End()
		}
	}
	for i := 0; i < len(steps) && err == nil; i++ {
		growStack()
		s := &steps[i]
		if s.Pipeline == nil {
			if end(); err == nil {
				encoder.CopyBufferToBuffer(s.Src.(*Buffer), s.SrcOffset, s.Dst.(*Buffer), s.DstOffset, s.Size)
			}
			continue
		}
		if pass == nil {
			if pass, err = encoder.BeginComputePass(nil); err != nil {
				break
			}
		}
		pass.SetPipeline(s.Pipeline.(*pipeline).p)
		pass.SetBindGroup(0, s.Group.(*wgpu.BindGroup), s.Offset[:s.Dynamic])
		pass.Dispatch(s.Groups[0], s.Groups[1], s.Groups[2])
	}
	if err == nil {
		end()
	}
	if err != nil {
		encoder.DiscardEncoding()
		return nil, err
	}
	growStack()
	return encoder.Finish() // releases the encoder even when it fails
}

// together returns the number of steps for one command buffer: the library refuses one that copies
// both from a buffer and to it.
func (l *library) together(steps []port.Step) int {
	clear(l.copied)
	clear(l.filled)
	for i := range steps {
		if s := &steps[i]; s.Pipeline == nil {
			if l.filled[s.Src] || l.copied[s.Dst] {
				return i
			}
			l.copied[s.Src], l.filled[s.Dst] = true, true
		}
	}
	return len(steps)
}

// Submit starts steps, at least an empty command buffer.
func (l *library) Submit(steps []port.Step, _ *port.Stamps) (port.Ticket, error) {
	var all []*wgpu.CommandBuffer
	for first := true; first || len(steps) > 0; first = false {
		n := l.together(steps)
		buf, err := l.record(steps[:n])
		if err != nil {
			return 0, l.discard(all, err)
		}
		all, steps = append(all, buf), steps[n:]
	}
	index, err := l.queue.Submit(all...)
	if err != nil {
		return 0, l.discard(all, err)
	}
	clear(l.unwritten)
	l.last, l.probed = index, time.Now()
	return port.Ticket(index), nil
}

// discard drops command buffers that were not submitted.
func (l *library) discard(all []*wgpu.CommandBuffer, err error) error {
	for _, buf := range all {
		buf.Release()
	}
	return translate(err, port.ErrInvalid)
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
	_, err := l.Submit(nil, nil)
	return port.Ticket(ended), err
}

func (l *library) StartMap(b port.Object, offset, size uint64) (err error) {
	growStack()
	l.pending, err = b.(*Buffer).MapAsync(wgpu.MapModeRead, offset, size)
	return translate(err, port.ErrInvalid)
}

func (l *library) Mapped() (bool, error) {
	l.dev.Poll(wgpu.PollPoll)
	ready, err := l.pending.Status()
	if ready || err != nil {
		l.pending.Release()
		l.pending = nil
	}
	return ready, translate(err, port.ErrInvalid)
}

func (l *library) EndMap(b port.Object) {
	_ = b.(*Buffer).Unmap() // fails when the map has ended
	l.pending.Release()
}

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
