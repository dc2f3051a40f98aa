package port

import (
	"context"
	"fmt"
	"syscall/js"
	"time"

	"github.com/gogpu/gputypes"
)

// library is a GPUDevice. Its calls return at once; their errors and ends arrive later, as events.
type library struct {
	dev, queue js.Value
	closed     bool
	isLost     error
	failed     error  // the first error of a call since the last poll
	last       Ticket // submission
	ended      Ticket
	event      chan struct{} // closed at the next event

	// The submission that is being recorded. Encoder and pass are undefined outside of one.
	encoder, pass js.Value
	begun         bool // a pass has written a timestamp

	offset, staged js.Value // a Uint32Array for the offset of a dispatch, a Uint8Array for writes
	ends           js.Func
	clock          clock
}

type (
	rawBuffer   = *js.Value
	rawGroup    = js.Value
	rawPipeline = struct{ p, layout js.Value }
)

// dynamicStep is the largest that a device may require.
const dynamicStep = 256

const compilesTogether = true

// stagedBytes is the most bytes that a write copies at a time.
const stagedBytes = 1 << 20

func newLibrary(dev js.Value) *library {
	l := &library{
		dev: dev, queue: dev.Get("queue"), event: make(chan struct{}),
		offset: js.Global().Get("Uint32Array").New(1), staged: js.Global().Get("Uint8Array").New(stagedBytes),
	}
	on := func(f func(js.Value)) js.Func {
		return js.FuncOf(func(_ js.Value, args []js.Value) any {
			f(append(args, js.Undefined())[0])
			close(l.event)
			l.event = make(chan struct{})
			return nil
		})
	}
	l.ends = on(func(js.Value) { l.ended++ })
	fails := on(func(v js.Value) {
		if l.failed == nil {
			l.failed = fault(text(v.Get("error")), ErrInvalid)
		}
	})
	dev.Call("addEventListener", "uncapturederror", fails)
	var loses js.Func
	loses = on(func(v js.Value) { // once, also after destroy
		if !l.closed {
			l.isLost = fmt.Errorf("%s: %s: %w", v.Get("reason").String(), text(v), ErrLost)
			return
		}
		for _, f := range []js.Func{l.ends, fails, loses} {
			f.Release()
		}
	})
	dev.Get("lost").Call("then", loses)
	return l
}

func (l *library) lost() error { return l.isLost }

// scope runs f in two error scopes, and returns what f throws or they take: a lack of memory, or an
// error of a kind. Nothing waits between the opening of a scope and its end, so that scopes nest.
func (l *library) scope(kind error, f func()) error {
	l.dev.Call("pushErrorScope", "validation")
	l.dev.Call("pushErrorScope", "out-of-memory")
	err := try(kind, f)
	var taken [2]js.Value
	for i := range taken {
		taken[i] = l.dev.Call("popErrorScope")
	}
	for i, kind := range []error{ErrMemory, kind} {
		v, failed := await(taken[i])
		switch {
		case err != nil: // the other scope is awaited
		case failed != nil:
			err = fault(failed.Error(), ErrLost)
		case v.Truthy():
			err = fault(text(v), kind)
		}
	}
	return err
}

func (l *library) createBuffer(size uint64, usage gputypes.BufferUsage) (b rawBuffer, err error) {
	err = l.scope(ErrInvalid, func() {
		made := l.dev.Call("createBuffer", map[string]any{"size": float64(size), "usage": int(usage)})
		b = &made
	})
	return b, err
}

// releaseBuffer frees the memory when the submissions that use it have ended.
func (l *library) releaseBuffer(b rawBuffer) { b.Call("destroy") }

func (l *library) write(b rawBuffer, offset uint64, data []byte) error {
	for len(data) > 0 {
		n := js.CopyBytesToJS(l.staged, data)
		if err := try(ErrInvalid, func() { l.queue.Call("writeBuffer", *b, float64(offset), l.staged, 0, n) }); err != nil {
			return err
		}
		data, offset = data[n:], offset+uint64(n)
	}
	return nil
}

func (l *library) createPipeline(desc PipelineDesc, dynamic int) (p rawPipeline, err error) {
	types := map[BindingKind]string{Uniform: "uniform", ReadOnly: "read-only-storage", ReadWrite: "storage"}
	entries := make([]any, len(desc.Bindings))
	for i, k := range desc.Bindings {
		entries[i] = map[string]any{
			"binding": i, "visibility": 4, // GPUShaderStage.COMPUTE
			"buffer": map[string]any{"type": types[k], "hasDynamicOffset": i == dynamic},
		}
	}
	var made js.Value
	err = l.scope(ErrShader, func() {
		module := l.dev.Call("createShaderModule", map[string]any{"label": desc.Label, "code": desc.WGSL})
		p.layout = l.dev.Call("createBindGroupLayout", map[string]any{"label": desc.Label, "entries": entries})
		layout := l.dev.Call("createPipelineLayout", map[string]any{"label": desc.Label, "bindGroupLayouts": []any{p.layout}})
		made = l.dev.Call("createComputePipelineAsync", map[string]any{
			"label": desc.Label, "layout": layout, "compute": map[string]any{"module": module, "entryPoint": desc.Entry},
		})
	})
	if !made.Truthy() {
		return p, err
	}
	var failed error
	if p.p, failed = await(made); err == nil && failed != nil {
		err = fault(failed.Error(), ErrShader)
	}
	return p, err
}

// releasePipeline and releaseGroup leave their objects to the browser's garbage collector.
func (l *library) releasePipeline(rawPipeline) {}
func (l *library) releaseGroup(rawGroup)       {}

func (l *library) createGroup(p rawPipeline, bindings []Binding, spans []groupSpan) (g rawGroup, err error) {
	entries := make([]any, len(bindings))
	for i, b := range bindings {
		entries[i] = map[string]any{"binding": i, "resource": map[string]any{
			"buffer": *b.Buffer.(*buffer).raw, "offset": float64(spans[i].offset), "size": float64(b.Size),
		}}
	}
	err = try(ErrInvalid, func() { g = l.dev.Call("createBindGroup", map[string]any{"layout": p.layout, "entries": entries}) })
	return g, err
}

// begin makes sure that there is an encoder, and outside of a pass.
func (l *library) begin() {
	if l.encoder.IsUndefined() {
		l.encoder = l.dev.Call("createCommandEncoder")
	}
	if !l.pass.IsUndefined() {
		l.pass.Call("end")
		l.pass = js.Undefined()
	}
}

// beginPass makes sure that there is a pass. The first one of a timed submission writes its first
// timestamp, each one its second: the last remains.
func (l *library) beginPass() {
	if !l.pass.IsUndefined() {
		return
	}
	l.begin()
	desc := map[string]any{}
	if s := l.clock.slot; s != nil {
		writes := map[string]any{"querySet": l.clock.queries, "endOfPassWriteIndex": s.first + 1}
		if !l.begun {
			writes["beginningOfPassWriteIndex"] = s.first
			l.begun = true
		}
		desc["timestampWrites"] = writes
	}
	l.pass = l.encoder.Call("beginComputePass", desc)
}

func (l *library) copy(src, dst rawBuffer, c *Command) error {
	return try(ErrInvalid, func() {
		l.begin()
		l.encoder.Call("copyBufferToBuffer", *src, float64(c.SrcOffset), *dst, float64(c.DstOffset), float64(c.Size))
	})
}

func (l *library) dispatch(p rawPipeline, g rawGroup, offsets []uint32, groups [3]uint32) error {
	return try(ErrInvalid, func() {
		l.beginPass()
		l.pass.Call("setPipeline", p.p)
		if len(offsets) > 0 {
			l.offset.SetIndex(0, float64(offsets[0]))
			l.pass.Call("setBindGroup", 0, g, l.offset, 0, 1)
		} else {
			l.pass.Call("setBindGroup", 0, g)
		}
		l.pass.Call("dispatchWorkgroups", groups[0], groups[1], groups[2])
	})
}

// discard forgets the submission that is being recorded.
func (l *library) discard() { l.encoder, l.pass, l.begun = js.Undefined(), js.Undefined(), false }

func (l *library) submit() (Ticket, error) {
	err := try(ErrInvalid, func() {
		if slot := l.clock.slot; slot != nil {
			l.beginPass() // a submission of copies has none
			l.begin()
			l.encoder.Call("resolveQuerySet", l.clock.queries, slot.first, 2, *l.clock.resolved, 0)
			l.encoder.Call("copyBufferToBuffer", *l.clock.resolved, 0, *slot.staging, 0, stampBytes)
		}
		l.begin()
		l.queue.Call("submit", []any{l.encoder.Call("finish")})
		l.queue.Call("onSubmittedWorkDone").Call("then", l.ends, l.ends)
	})
	if err != nil {
		return 0, err
	}
	l.last++
	return l.last, nil
}

// poll returns the last submission that has ended, and an error that the browser has reported.
func (l *library) poll() (Ticket, error) {
	err := l.failed
	l.failed = nil
	if l.isLost != nil {
		err = l.isLost
	}
	return l.ended, err
}

// pause waits for the next event. None is missed between a look at the device's state and pause,
// because callbacks run only while every goroutine waits. After a second the caller looks whether
// the device makes progress.
func (l *library) pause(ctx context.Context, _, _ time.Time) {
	late := time.NewTimer(time.Second)
	defer late.Stop()
	select {
	case <-l.event:
	case <-ctx.Done():
	case <-late.C:
	}
}

func (l *library) read(b rawBuffer, offset uint64, dst []byte) error {
	if _, err := await(b.Call("mapAsync", 1, float64(offset), len(dst))); err != nil { // GPUMapMode.READ
		return fault(err.Error(), ErrInvalid)
	}
	return try(ErrInvalid, func() {
		js.CopyBytesToGo(dst, js.Global().Get("Uint8Array").New(b.Call("getMappedRange", float64(offset), len(dst))))
		b.Call("unmap")
	})
}

func (l *library) close() {
	l.closed = true
	l.dev.Call("destroy")
}

type rawQueries = js.Value

func (l *library) createQueries(count int) (q rawQueries, err error) {
	err = l.scope(ErrInvalid, func() {
		q = l.dev.Call("createQuerySet", map[string]any{"type": "timestamp", "count": count})
	})
	return q, err
}

// releaseQueries leaves them to the browser.
func (l *library) releaseQueries(rawQueries) {}

// tickTime is a nanosecond in every browser.
func (l *library) tickTime() (float64, error) { return 1, nil }
