package queue

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/shaders"
)

// Op describes an operation: how its index space is cut and the steps that compute it.
type Op struct {
	Cutter *cut.Cutter // with the operands
	Space  cut.Box
	// Sweep returns how a box with chunks of some length is computed; nil is one pass
	// over the chunks, with the Cutter's state if there are several.
	Sweep func(x cut.Box, chunk int) Sweep
	// Step returns the step that computes a chunk.
	Step func(p Chunk) Step
	// Chained means that boxes update what earlier boxes wrote.
	Chained bool
	// Table is the contents of Chunk.Table; nil means that no step has it.
	Table []byte
	// Fill, unless nil, returns the operation that writes Chunk.Table, of Filled bytes, in place of Table.
	Fill   func(table cut.Window) *Op
	Filled uint64
	// Call, unless nil, is a call that continues from Call.Resume and may be interrupted. Kernel leaves its state.
	Call   *backend.Call
	Kernel shaders.Variant
}

// Sweep is how a box is computed.
type Sweep struct {
	Box    cut.Box // narrowed to the columns that it needs
	Chunk  int     // length of chunks
	Passes int     // over all chunks
	After  int     // more steps that follow, each for the whole box
	State  uint64  // bytes of state that the steps share; 0 is none
}

// Chunk is the span of a box along the inner axis that one step computes.
type Chunk struct {
	cut.Box
	Of          Sweep
	Pass        int  // from Of.Passes on for the last steps
	First, Last bool // of the chunks of the box
	// State and Table are the windows of the state and of the operation's Table, the zero
	// Window without. They have no buffer in plans and rehearsals.
	State, Table cut.Window
}

// Step is a dispatch.
type Step struct {
	Kernel      shaders.Variant
	Windows     []cut.Window   // for all bindings but the uniform
	Params      shaders.Params // contents of the uniform
	Groups      int            // workgroups
	OpsPerGroup float64        // operations of a workgroup, at most
}

// NewCutter returns a Cutter for operands on the device.
func (d *Device) NewCutter(inner, granule int, operands ...*cut.Operand) *cut.Cutter {
	return cut.New(d.cutLimits(), d.Memory(), inner, granule, operands...)
}

// Queue cuts operations into dispatches and adds them to the batch. It submits a batch that is full; Do
// submits the last one.
func (r *Runner) Queue(ops ...*Op) (err error) {
	for _, op := range ops {
		if err := r.separate(); err != nil {
			return err
		}
		var k *checkpoint
		if c := op.Call; c != nil && (op.Cutter.Room > 0 || c.Resume != nil) {
			if k, err = r.keep(op); err != nil {
				return err
			}
		}
		op.Cutter.Share = r.d.pacing.share(r.deadline) / r.d.pacing.share(time.Time{})
		var table port.Buffer
		switch err = r.hold(&table, op.tableBytes()); {
		case err != nil:
		case op.Fill != nil:
			err = r.Queue(op.Fill(cut.Window{Buf: table, Size: op.Filled}))
		case table != nil:
			err = r.d.wrap(r.d.Port.Write(table, 0, op.Table))
		}
		if err != nil {
			return err
		}
		var box cut.Box
		err = op.walk(r, k, table, func(p Chunk) error {
			if op.Chained && p.Of.Box != box {
				if err := r.separate(); err != nil {
					return err
				}
				box = p.Of.Box
			}
			return r.queueStep(op.Step(p))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// walk calls f for each chunk of op in order, one for each step. The chunks of a box follow one another. Where op runs, r has the
// buffer of the state, table is that of the table, and k, unless nil, skips what is finished. Plans have none of them.
func (op *Op) walk(r *Runner, k *checkpoint, table port.Buffer, f func(p Chunk) error) error {
	c := op.Cutter
	boxes, err := c.Boxes(nil, op.Space)
	if err != nil {
		return err
	}
	for _, x := range boxes {
		if k != nil && k.done(x.Box) {
			continue
		}
		p := Chunk{Of: Sweep{Box: x.Box, Chunk: x.Chunk, Passes: 1, State: c.StateOf(x.Box, x.Chunk)}, Table: cut.Window{Buf: table, Size: op.tableBytes()}}
		if op.Sweep != nil {
			p.Of = op.Sweep(x.Box, x.Chunk)
		}
		if p.State.Size = p.Of.State; p.State.Size > 0 && r != nil {
			h := &r.held // whose state all boxes share, because their steps follow one another
			h.size = p.State.Size
			if err := r.hold(&h.state, h.size); err != nil {
				return err
			}
			p.State.Buf = h.state
		}
		all := p.Of.Box
		for ; p.Pass < p.Of.Passes; p.Pass++ {
			lo := all.Lo[c.Inner]
			if k != nil && p.Of.Chunk < all.Len(c.Inner) {
				if lo, err = k.start(all); err != nil {
					return err
				}
			}
			for ; lo < all.Hi[c.Inner]; lo += p.Of.Chunk {
				p.Box, p.First, p.Last = c.ChunkAt(all, lo, p.Of.Chunk)
				if err = f(p); err == nil && k != nil && !p.Last {
					err = k.queued(p.Box, false)
				}
				if err != nil {
					return err
				}
			}
		}
		for p.Box = all; p.Pass < p.Of.Passes+p.Of.After; p.Pass++ {
			if err := f(p); err != nil {
				return err
			}
		}
		if k != nil {
			if err := k.queued(x.Box, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// tableBytes returns the size of the table.
func (op *Op) tableBytes() uint64 { return max(op.Filled, uint64(len(op.Table))) }

// queueStep queues the dispatches of a step after copies. Its parameters are shaders.Ranged.
func (r *Runner) queueStep(s Step, before ...cut.Copy) error {
	x := dispatch{pipeline: r.d.Pipelines.Of(s.Kernel), windows: s.Windows, params: s.Params, before: before}
	if n := len(x.pipeline.Kinds); n < len(s.Windows) {
		_, err := shaders.Render(s.Kernel)
		return fmt.Errorf("a kernel binds %d buffers and gets %d (%v): %w", n, len(s.Windows), err, backend.ErrUnsupported)
	}
	if err := r.stage(&x); err != nil {
		return err
	}
	for first, n := 0, 0; first < s.Groups; first += n {
		n, x.grid = r.d.groupsFrom(&s, first, r.deadline)
		s.Params.(shaders.Ranged).SetRange(first, first+n)
		x.work = float64(n) * s.OpsPerGroup
		x.seconds = r.d.pacing.seconds(x.pipeline.Pace.Speed(), n, s.OpsPerGroup)
		if err := r.add(&x); err != nil {
			return err
		}
	}
	return nil
}

// Dispatch queues one dispatch of a kernel on a row of workgroups, whatever time it takes. The
// probes of the device's ceilings use it.
func (r *Runner) Dispatch(k shaders.Variant, windows []cut.Window, p shaders.Params, groups int) error {
	return r.add(&dispatch{pipeline: r.d.Pipelines.Of(k), windows: windows, params: p, grid: [3]uint32{uint32(groups), 1, 1}})
}

// Extent counts what running an operation takes.
type Extent struct {
	Boxes, Chunks, Dispatches int
	MaxChunk, MaxBox          int    // columns of the longest chunk and box
	State                     uint64 // bytes of the largest state
}

// Count returns the extent of op.
func (d *Device) Count(op *Op) (e Extent, err error) {
	var last cut.Box
	err = op.walk(nil, nil, nil, func(p Chunk) error {
		if e.Boxes == 0 || p.Of.Box != last {
			e.Boxes++
			last = p.Of.Box
		}
		if p.Pass < p.Of.Passes {
			e.Chunks++
			e.MaxChunk = max(e.MaxChunk, p.Len(cut.Col))
		}
		e.MaxBox = max(e.MaxBox, p.Of.Box.Len(cut.Col))
		e.State = max(e.State, p.State.Size)
		s := op.Step(p)
		for _, s := range append(s.shifts(), s) {
			for first, n := 0, 0; first < s.Groups; first += n {
				n, _ = d.groupsFrom(&s, first, time.Time{})
				e.Dispatches++
			}
		}
		return nil
	})
	return e, err
}

// Dispatch is a dispatch of an operation.
type Dispatch struct {
	Kernel shaders.Variant
	Sizes  []uint64       // bytes of the bindings, with the uniform's
	Params shaders.Params // contents of the uniform
	Grid   [3]uint32      // workgroups
	Groups int            // workgroups that compute; those beyond it return at once
}

// Dispatches calls f for each dispatch of a step of op, in order. The tensors need no memory.
func (d *Device) Dispatches(op *Op, f func(x Dispatch) error) error {
	return op.walk(nil, nil, nil, func(p Chunk) error {
		s := op.Step(p)
		x := Dispatch{Kernel: d.Pipelines.Own(s.Kernel), Params: s.Params}
		for _, w := range s.Windows {
			x.Sizes = append(x.Sizes, cmp.Or(w.Size, resource.MinBytes))
		}
		x.Sizes = slices.Insert(x.Sizes, d.Pipelines.Of(s.Kernel).Uniform, uint64(s.Params.Size()))
		for first := 0; first < s.Groups; first += x.Groups {
			x.Groups, x.Grid = d.groupsFrom(&s, first, time.Time{})
			s.Params.(shaders.Ranged).SetRange(first, first+x.Groups)
			if err := f(x); err != nil {
				return err
			}
		}
		return nil
	})
}
