package loaded

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// device is a device of a library.
type device struct {
	*library
	handle, queue uintptr
	state         *state
	timed         bool
	submitted     port.Ticket

	// calls is held around calls that report errors by the state, events too: a compilation runs next to others.
	calls sync.Mutex

	released uintptr     // bytes of buffers since the last submission
	scratch  port.Object // of flush
}

type (
	buffer   struct{ handle, size uintptr }
	pipeline struct{ handle, layout uintptr }
)

// keptBytes is the most memory of released buffers that waits for a submission: the library frees
// it when one has ended, and a program may make none.
const keptBytes = 64 << 20

// state is what callbacks have reported, of a device or of one request. C has its number, and
// reports that come when it is forgotten are dropped.
type state struct {
	id uintptr
	mu sync.Mutex
	reports
}

type reports struct {
	lost   error
	failed error       // the first error since the last try
	object *reply      // of a request
	mapped uint32      // the status of the last map, 0 while it is pending
	done   port.Ticket // submissions that have ended
}

// The kinds of callbacks, which C passes along.
const (
	gotObject = iota
	gotMap
	gotEnd
	gotLoss
	gotError
)

var (
	states    sync.Map // by number
	lastState atomic.Uintptr
)

func newState() *state {
	s := &state{id: lastState.Add(1)}
	states.Store(s.id, s)
	return s
}

func (s *state) forget() { states.Delete(s.id) }

// callbackFunctions are functions of C with two words of the program at the end: with a status, an object
// and a message; with a status and a message; and with a device, a type and a message.
type callbackFunctions struct{ object, status, device uintptr }

var callbacks = sync.OnceValue(newCallbacks)

// reply is what a callback was called with.
type reply struct {
	status  uint32 // or a type
	object  uintptr
	message string
}

// answer is called by all callbacks, on any thread.
func answer(user [2]uintptr, a reply) {
	x, ok := states.Load(user[0])
	if !ok {
		return
	}
	s := x.(*state)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch user[1] {
	case gotObject:
		s.object = &a
	case gotMap:
		if s.mapped = a.status; a.status != success && s.failed == nil {
			s.failed = port.Fault(a.message, port.ErrInvalid)
		}
	case gotEnd:
		s.done++
	case gotLoss:
		if a.status == lostUnknown && s.lost == nil {
			s.lost = port.Fault(a.message, port.ErrLost)
			if !errors.Is(s.lost, port.ErrLost) { // Dawn gives up a device that lacks memory for a submission
				s.lost = fmt.Errorf("%w: %w", s.lost, port.ErrLost)
			}
		}
	case gotError:
		if s.failed == nil { // later ones follow from the first
			kind := port.ErrInvalid
			if a.status == errorOutOfMemory {
				kind = port.ErrMemory
			}
			s.failed = port.Fault(a.message, kind)
		}
	}
}

// read returns the reports.
func (s *state) read() reports {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reports
}

// try makes calls and returns their error, which callbacks have reported.
func (d *device) try(calls func()) error {
	d.calls.Lock()
	defer d.calls.Unlock()
	calls()
	d.state.mu.Lock()
	defer d.state.mu.Unlock()
	failed := d.state.failed
	d.state.failed = nil
	if d.state.lost != nil {
		return d.state.lost
	}
	return failed
}

// make calls a function that creates an object, which release releases after an error.
func (d *device) make(f, release uintptr, desc uintptr) (object uintptr, err error) {
	err = d.try(func() { object = call(f, d.handle, desc) })
	if err == nil && object == 0 {
		err = fmt.Errorf("the library returns no object: %w", port.ErrMemory)
	}
	if err != nil {
		d.release(release, object)
		return 0, err
	}
	return object, nil
}

func (d *device) release(f, object uintptr) {
	if object != 0 {
		call(f, object)
	}
}

func (d *device) Traits() port.Traits {
	return port.Traits{DynamicStep: 256, CompilesTogether: d.dawn, Timed: d.timed, Tick: 1}
}

func (d *device) Lost() error { return d.state.read().lost }

func (d *device) Poll() (port.Ticket, error) {
	err := d.try(func() { call(d.InstanceProcessEvents, d.instance) })
	return d.state.read().done, err
}

func (d *device) CreateBuffer(size uint64, usage gputypes.BufferUsage) (port.Object, error) {
	mem := newArena()
	defer mem.free()
	b, err := d.make(d.DeviceCreateBuffer, d.BufferRelease, put(mem, bufferDescriptor{usage: uint64(usage), size: size}))
	if err != nil {
		return nil, err
	}
	return &buffer{b, uintptr(size)}, nil
}

// ReleaseBuffer processes events, because the library frees released memory only then.
func (d *device) ReleaseBuffer(x port.Object) {
	b := x.(*buffer)
	call(d.BufferDestroy, b.handle)
	call(d.BufferRelease, b.handle)
	d.released += b.size
	call(d.InstanceProcessEvents, d.instance)
	if d.released > keptBytes && d.state.read().done == d.submitted {
		d.flush()
	}
}

// flush makes Dawn submit something and waits for it, after all other submissions have ended.
func (d *device) flush() {
	d.released = 0
	if d.scratch == nil {
		var err error
		if d.scratch, err = d.CreateBuffer(4, gputypes.BufferUsageCopyDst); err != nil {
			return
		}
	}
	if d.Write(d.scratch, 0, make([]byte, 4)) != nil {
		return
	}
	call(d.QueueSubmit, d.queue, 0, 0) // with the write
	d.submitted++
	d.ended()
	for start := time.Now(); time.Since(start) < port.HangLimit; port.Pause(start, time.Time{}) {
		if r, err := d.Poll(); err != nil || r == d.submitted {
			break
		}
	}
}

// ended asks for a callback when all submissions have ended.
func (d *device) ended() {
	async(d.QueueOnSubmittedWorkDone, callbacks().status, d.state, gotEnd, d.queue)
	d.released = 0
}

func (d *device) Write(b port.Object, offset uint64, data []byte) error {
	err := d.try(func() {
		call(d.QueueWriteBuffer, d.queue, b.(*buffer).handle, uintptr(offset), address(&data[0]), uintptr(len(data)))
	})
	runtime.KeepAlive(data)
	return err
}

func (d *device) StartMap(b port.Object, offset, size uint64) error {
	d.state.mu.Lock()
	d.state.mapped = 0
	d.state.mu.Unlock()
	async(d.BufferMapAsync, callbacks().status, d.state, gotMap, b.(*buffer).handle, mapRead, uintptr(offset), uintptr(size))
	return nil
}

func (d *device) Mapped() (bool, error) {
	_, err := d.Poll()
	return d.state.read().mapped == success, err
}

func (d *device) CopyMapped(b port.Object, offset uint64, dst []byte) error {
	return d.try(func() {
		from := call(d.BufferGetConstMappedRange, b.(*buffer).handle, uintptr(offset), uintptr(len(dst)))
		if from != 0 {
			copy(dst, unsafe.Slice((*byte)(pointer(from)), len(dst)))
		}
		call(d.BufferUnmap, b.(*buffer).handle)
	})
}

func (d *device) EndMap(b port.Object) {
	if d.state.read().mapped == 0 {
		call(d.BufferUnmap, b.(*buffer).handle)
	}
}

// CreatePipeline holds up other calls while it parses the shader, and with wgpu-native, which cannot
// compile on other threads, until the end.
func (d *device) CreatePipeline(desc port.PipelineDesc, dynamic int) (_ port.Object, err error) {
	mem := newArena()
	defer mem.free()
	defer runtime.KeepAlive(desc)
	p := new(pipeline)
	defer func() {
		if err != nil {
			d.ReleasePipeline(p)
		}
		if errors.Is(err, port.ErrInvalid) { // a violated rule
			err = fmt.Errorf("%w: %w", port.ErrShader, err)
		}
	}()
	label := descriptor{label: view(desc.Label)}
	source := shaderSource{chained: chained{sType: typeWGSL}, code: view(desc.WGSL)}
	module, err := d.make(d.DeviceCreateShaderModule, d.ShaderModuleRelease, put(mem, descriptor{next: put(mem, source), label: label.label}))
	if err != nil {
		return nil, err
	}
	defer call(d.ShaderModuleRelease, module)
	var entries []uintptr // next, binding, visibility; then a buffer's next, type and dynamic, size
	for i, k := range desc.Bindings {
		entries = append(entries, 0, uintptr(i), computeStage)
		if d.dawn {
			entries = append(entries, 0) // the length of an array of bindings
		}
		kind := uintptr(k) + 1 // 1 means a binding that is not used
		if i == dynamic {
			kind |= 1 << 32
		}
		entries = append(entries, 0, kind, 0, 0, 0, 0, 0, 0, 0, 0, 0) // no sampler, texture, storage texture
	}
	layoutDesc := listDescriptor{descriptor: label}
	if len(entries) > 0 {
		layoutDesc.items = list{uintptr(len(desc.Bindings)), put(mem, entries...)}
	}
	if p.layout, err = d.make(d.DeviceCreateBindGroupLayout, d.BindGroupLayoutRelease, put(mem, layoutDesc)); err != nil {
		return nil, err
	}
	layout, err := d.make(d.DeviceCreatePipelineLayout, d.PipelineLayoutRelease, put(mem, listDescriptor{descriptor: label, items: listOf(mem, p.layout)}))
	if err != nil {
		return nil, err
	}
	defer call(d.PipelineLayoutRelease, layout)
	want := pipelineDescriptor{descriptor: label, layout: layout}
	want.compute.module, want.compute.entry = module, view(desc.Entry)
	if !d.dawn {
		p.handle, err = d.make(d.DeviceCreateComputePipeline, d.ComputePipelineRelease, put(mem, want))
		return p, err
	}
	r, err := d.request(math.MaxInt64, d.DeviceCreateComputePipelineAsync, d.handle, put(mem, want))
	p.handle = r.object
	if err == nil && (r.status != success || r.object == 0) {
		if err = d.Lost(); err == nil {
			err = port.Fault(r.message, port.ErrShader)
		}
	}
	return p, err
}

func (d *device) ReleasePipeline(x port.Object) {
	p := x.(*pipeline)
	d.release(d.ComputePipelineRelease, p.handle)
	d.release(d.BindGroupLayoutRelease, p.layout)
}

func (d *device) CreateGroup(p port.Object, spans []port.Span) (port.Object, error) {
	mem := newArena()
	defer mem.free()
	entries := make([]bindGroupEntry, len(spans))
	for i, s := range spans {
		entries[i] = bindGroupEntry{binding: uintptr(i), buffer: s.Buffer.(*buffer).handle, offset: s.Offset, size: s.Size}
	}
	desc := bindGroupDescriptor{layout: p.(*pipeline).layout, items: listOf(mem, entries...)}
	return d.make(d.DeviceCreateBindGroup, d.BindGroupRelease, put(mem, desc))
}

func (d *device) ReleaseGroup(g port.Object) { call(d.BindGroupRelease, g.(uintptr)) }

// Submit implements port.Library. The first pass of a timed submission writes its first timestamp,
// each one its second: the last remains.
func (d *device) Submit(steps []port.Step, stamps *port.Stamps) (port.Ticket, error) {
	mem := newArena()
	defer mem.free()
	desc := place(mem, passDescriptor{})
	var writes *timestampWrites
	if stamps != nil {
		writes = place(mem, timestampWrites{set: stamps.Queries.(uintptr), begin: stamps.First, end: stamps.First + 1})
		desc.writes = address(writes)
	}
	err := d.try(func() {
		encoder, pass := call(d.DeviceCreateCommandEncoder, d.handle, 0), uintptr(0)
		begin := func() {
			if pass == 0 {
				pass = call(d.CommandEncoderBeginComputePass, encoder, address(desc))
				if writes != nil {
					writes.begin = noIndex
				}
			}
		}
		end := func() {
			if pass != 0 {
				call(d.ComputePassEncoderEnd, pass)
				call(d.ComputePassEncoderRelease, pass)
				pass = 0
			}
		}
		for i := range steps {
			s := &steps[i]
			if s.Pipeline == nil {
				end()
				call(d.CommandEncoderCopyBufferToBuffer, encoder, s.Src.(*buffer).handle, uintptr(s.SrcOffset), s.Dst.(*buffer).handle, uintptr(s.DstOffset), uintptr(s.Size))
				continue
			}
			begin()
			call(d.ComputePassEncoderSetPipeline, pass, s.Pipeline.(*pipeline).handle)
			call(d.ComputePassEncoderSetBindGroup, pass, 0, s.Group.(uintptr), uintptr(s.Dynamic), address(&s.Offset))
			call(d.ComputePassEncoderDispatchWorkgroups, pass, uintptr(s.Groups[0]), uintptr(s.Groups[1]), uintptr(s.Groups[2]))
		}
		if writes != nil && writes.begin != noIndex {
			begin() // a submission of copies has no pass
		}
		end()
		if stamps != nil {
			resolved := stamps.Resolved.(*buffer).handle
			call(d.CommandEncoderResolveQuerySet, encoder, stamps.Queries.(uintptr), uintptr(stamps.First), 2, resolved, 0)
			call(d.CommandEncoderCopyBufferToBuffer, encoder, resolved, 0, stamps.Staging.(*buffer).handle, 0, port.StampBytes)
		}
		commands := call(d.CommandEncoderFinish, encoder, 0)
		call(d.QueueSubmit, d.queue, 1, put(mem, commands))
		d.release(d.CommandBufferRelease, commands)
		d.release(d.CommandEncoderRelease, encoder)
	})
	runtime.KeepAlive(steps)
	if err != nil {
		return 0, err
	}
	d.ended()
	d.submitted++
	return d.submitted, nil
}

func (d *device) CreateQueries(count int) (port.Object, error) {
	mem := newArena()
	defer mem.free()
	return d.make(d.DeviceCreateQuerySet, d.QuerySetRelease, put(mem, querySetDescriptor{kind: queryTimes, count: uint32(count)}))
}

func (d *device) ReleaseQueries(q port.Object) { call(d.QuerySetRelease, q.(uintptr)) }

func (d *device) Close() {
	if d.scratch != nil {
		d.ReleaseBuffer(d.scratch)
	}
	call(d.QueueRelease, d.queue)
	call(d.DeviceRelease, d.handle)
	call(d.InstanceProcessEvents, d.instance)
	d.state.forget()
}
