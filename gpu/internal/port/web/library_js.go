package web

import (
	"context"
	"fmt"
	"syscall/js"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// library is a GPUDevice. Its calls return at once; their errors and ends arrive later, as events.
type library struct {
	dev, queue js.Value
	closed     bool
	isLost     error
	failed     error       // the first error of a call since the last poll
	last       port.Ticket // submission
	ended      port.Ticket
	event      chan struct{} // closed at the next event

	offset, staged js.Value // a Uint32Array for the offset of a dispatch, a Uint8Array for writes
	ends           js.Func
	timed          bool
}

type pipeline struct{ p, layout js.Value }

// Traits implements port.Library. The step is the largest that a device may require.
func (l *library) Traits() port.Traits {
	return port.Traits{DynamicStep: 256, CompilesTogether: true, Timed: l.timed, Tick: 1}
}

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
			l.failed = port.Fault(text(v.Get("error")), port.ErrInvalid)
		}
	})
	dev.Call("addEventListener", "uncapturederror", fails)
	var loses js.Func
	loses = on(func(v js.Value) { // once, also after destroy
		if !l.closed {
			l.isLost = fmt.Errorf("%s: %s: %w", v.Get("reason").String(), text(v), port.ErrLost)
			return
		}
		for _, f := range []js.Func{l.ends, fails, loses} {
			f.Release()
		}
	})
	dev.Get("lost").Call("then", loses)
	return l
}

func (l *library) Lost() error { return l.isLost }

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
	for i, kind := range []error{port.ErrMemory, kind} {
		v, failed := await(taken[i])
		switch {
		case err != nil: // the other scope is awaited
		case failed != nil:
			err = port.Fault(failed.Error(), port.ErrLost)
		case v.Truthy():
			err = port.Fault(text(v), kind)
		}
	}
	return err
}

func (l *library) CreateBuffer(size uint64, usage gputypes.BufferUsage) (port.Object, error) {
	var made js.Value
	err := l.scope(port.ErrInvalid, func() {
		made = l.dev.Call("createBuffer", map[string]any{"size": float64(size), "usage": int(usage)})
	})
	if err != nil {
		return nil, err
	}
	return &made, nil
}

// ReleaseBuffer frees the memory when the submissions that use it have ended.
func (l *library) ReleaseBuffer(b port.Object) { b.(*Buffer).Call("destroy") }

func (l *library) Write(b port.Object, offset uint64, data []byte) error {
	for len(data) > 0 {
		n := js.CopyBytesToJS(l.staged, data)
		if err := try(port.ErrInvalid, func() { l.queue.Call("writeBuffer", *b.(*Buffer), float64(offset), l.staged, 0, n) }); err != nil {
			return err
		}
		data, offset = data[n:], offset+uint64(n)
	}
	return nil
}

func (l *library) CreatePipeline(desc port.PipelineDesc, dynamic int) (port.Object, error) {
	p := new(pipeline)
	types := map[gputypes.BufferBindingType]string{port.Uniform: "uniform", port.ReadOnly: "read-only-storage", port.ReadWrite: "storage"}
	entries := make([]any, len(desc.Bindings))
	for i, k := range desc.Bindings {
		entries[i] = map[string]any{
			"binding": i, "visibility": 4, // GPUShaderStage.COMPUTE
			"buffer": map[string]any{"type": types[k], "hasDynamicOffset": i == dynamic},
		}
	}
	var made js.Value
	err := l.scope(port.ErrShader, func() {
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
		err = port.Fault(failed.Error(), port.ErrShader)
	}
	return p, err
}

// ReleasePipeline leaves its object to the browser's garbage collector.
func (l *library) ReleasePipeline(port.Object) {}

// ReleaseGroup leaves its object to the browser's garbage collector.
func (l *library) ReleaseGroup(port.Object) {}

func (l *library) CreateGroup(p port.Object, spans []port.Span) (port.Object, error) {
	entries := make([]any, len(spans))
	for i, s := range spans {
		entries[i] = map[string]any{"binding": i, "resource": map[string]any{
			"buffer": *s.Buffer.(*Buffer), "offset": float64(s.Offset), "size": float64(s.Size),
		}}
	}
	var g js.Value
	err := try(port.ErrInvalid, func() {
		g = l.dev.Call("createBindGroup", map[string]any{"layout": p.(*pipeline).layout, "entries": entries})
	})
	return g, err
}

// Submit implements port.Library. The first pass of a timed submission writes its first timestamp,
// each one its second: the last remains.
func (l *library) Submit(steps []port.Step, stamps *port.Stamps) (port.Ticket, error) {
	err := try(port.ErrInvalid, func() {
		encoder, pass, desc := l.dev.Call("createCommandEncoder"), js.Undefined(), map[string]any{}
		if stamps != nil {
			desc["timestampWrites"] = map[string]any{
				"querySet": stamps.Queries, "beginningOfPassWriteIndex": stamps.First, "endOfPassWriteIndex": stamps.First + 1,
			}
		}
		begun := false
		begin := func() {
			if pass.IsUndefined() {
				pass = encoder.Call("beginComputePass", desc)
				if stamps != nil {
					delete(desc["timestampWrites"].(map[string]any), "beginningOfPassWriteIndex")
				}
				begun = true
			}
		}
		end := func() {
			if !pass.IsUndefined() {
				pass.Call("end")
				pass = js.Undefined()
			}
		}
		for i := range steps {
			s := &steps[i]
			if s.Pipeline == nil {
				end()
				encoder.Call("copyBufferToBuffer", *s.Src.(*Buffer), float64(s.SrcOffset), *s.Dst.(*Buffer), float64(s.DstOffset), float64(s.Size))
				continue
			}
			begin()
			pass.Call("setPipeline", s.Pipeline.(*pipeline).p)
			l.offset.SetIndex(0, float64(s.Offset[0]))
			pass.Call("setBindGroup", 0, s.Group, l.offset, 0, s.Dynamic)
			pass.Call("dispatchWorkgroups", s.Groups[0], s.Groups[1], s.Groups[2])
		}
		if stamps != nil && !begun {
			begin() // a submission of copies has none
		}
		end()
		if stamps != nil {
			encoder.Call("resolveQuerySet", stamps.Queries, stamps.First, 2, *stamps.Resolved.(*Buffer), 0)
			encoder.Call("copyBufferToBuffer", *stamps.Resolved.(*Buffer), 0, *stamps.Staging.(*Buffer), 0, port.StampBytes)
		}
		l.queue.Call("submit", []any{encoder.Call("finish")})
		l.queue.Call("onSubmittedWorkDone").Call("then", l.ends, l.ends)
	})
	if err != nil {
		return 0, err
	}
	l.last++
	return l.last, nil
}

// Poll returns the last submission that has ended, and an error that the browser has reported.
func (l *library) Poll() (port.Ticket, error) {
	err := l.failed
	l.failed = nil
	if l.isLost != nil {
		err = l.isLost
	}
	return l.ended, err
}

// Pause waits for the next event. None is missed between a look at the device's state and Pause, because callbacks run
// only while every goroutine waits. After a second the caller looks whether the device makes progress.
func (l *library) Pause(ctx context.Context) {
	late := time.NewTimer(time.Second)
	defer late.Stop()
	select {
	case <-l.event:
	case <-ctx.Done():
	case <-late.C:
	}
}

func (l *library) Read(x port.Object, offset uint64, dst []byte) error {
	b := x.(*Buffer)
	if _, err := await(b.Call("mapAsync", 1, float64(offset), len(dst))); err != nil { // GPUMapMode.READ
		return port.Fault(err.Error(), port.ErrInvalid)
	}
	return try(port.ErrInvalid, func() {
		js.CopyBytesToGo(dst, js.Global().Get("Uint8Array").New(b.Call("getMappedRange", float64(offset), len(dst))))
		b.Call("unmap")
	})
}

func (l *library) Close() {
	l.closed = true
	l.dev.Call("destroy")
}

func (l *library) CreateQueries(count int) (port.Object, error) {
	var q js.Value
	err := l.scope(port.ErrInvalid, func() {
		q = l.dev.Call("createQuerySet", map[string]any{"type": "timestamp", "count": count})
	})
	return q, err
}

// ReleaseQueries leaves them to the browser.
func (l *library) ReleaseQueries(port.Object) {}
