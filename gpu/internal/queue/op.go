package queue

import (
	"cmp"
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
	// Call, unless nil, is a call that continues from Call.Resume and may be interrupted.
	// Kernel leaves its state.
	Call   *backend.Call
	Kernel shaders.Variant
}

// NewCutter returns a Cutter for operands on the device.
func (d *Device) NewCutter(inner, granule int, operands ...*cut.Operand) *cut.Cutter {
	return cut.New(d.cutLimits(), d.Memory(), inner, granule, operands...)
}

// Sweep is how a box is computed.
type Sweep struct {
	Box    cut.Box // narrowed to the columns that it needs
	Chunk  int     // length of chunks
	Passes int     // over all chunks
	Last   int     // more steps that follow, each for the whole box
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
	Kernel  shaders.Variant
	Windows []cut.Window   // for all bindings but the uniform
	Params  shaders.Params // contents of the uniform
	Groups  int            // workgroups
	Each    float64        // operations of a workgroup, at most
}

// walk calls f for each step of op in order. The steps of a box follow one another. table and
// state provide the buffers of the table and of a state; in plans both are nil.
func (op *Op) walk(table port.Buffer, state func(bytes uint64) (port.Buffer, error), f func(p Chunk, s Step) error) error {
	return op.Cutter.Boxes(op.Space, func(x cut.Box, chunk int) (err error) {
		p := Chunk{Of: Sweep{Box: x, Chunk: chunk, Passes: 1, State: op.Cutter.StateOf(x, chunk)}, Table: cut.Window{Buf: table, Size: op.tableBytes()}}
		if op.Sweep != nil {
			p.Of = op.Sweep(x, chunk)
		}
		if p.State.Size = p.Of.State; p.State.Size > 0 && state != nil {
			if p.State.Buf, err = state(p.State.Size); err != nil {
				return err
			}
		}
		for ; p.Pass < p.Of.Passes; p.Pass++ {
			err := op.Cutter.Chunks(p.Of.Box, p.Of.Chunk, func(x cut.Box, first, last bool) error {
				p.Box, p.First, p.Last = x, first, last
				return f(p, op.Step(p))
			})
			if err != nil {
				return err
			}
		}
		for p.Box = p.Of.Box; p.Pass < p.Of.Passes+p.Of.Last; p.Pass++ {
			if err := f(p, op.Step(p)); err != nil {
				return err
			}
		}
		return nil
	})
}

// tableBytes returns the size of the table.
func (op *Op) tableBytes() uint64 { return max(op.Filled, uint64(len(op.Table))) }

// Extent counts what running an operation takes.
type Extent struct {
	Boxes, Chunks, Dispatches int
	MaxChunk, MaxBox          int    // columns of the longest chunk and box
	State                     uint64 // bytes of the largest state
}

// Count returns the extent of op.
func (d *Device) Count(op *Op) (e Extent, err error) {
	var last cut.Box
	err = op.walk(nil, nil, func(p Chunk, s Step) error {
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
		return s.each(func(s Step) error {
			return d.split(s, time.Time{}, func(first, n int, grid [3]uint32) error {
				e.Dispatches++
				return nil
			})
		})
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
	return op.walk(nil, nil, func(_ Chunk, s Step) error {
		x := Dispatch{Kernel: d.Pipelines.Own(s.Kernel), Params: s.Params}
		for _, w := range s.Windows {
			x.Sizes = append(x.Sizes, cmp.Or(w.Size, resource.MinBytes))
		}
		x.Sizes = slices.Insert(x.Sizes, d.Pipelines.Of(s.Kernel).Uniform, uint64(s.Params.Size()))
		return d.split(s, time.Time{}, func(first, n int, grid [3]uint32) error {
			s.Params.(shaders.Ranged).SetRange(first, first+n)
			x.Grid, x.Groups = grid, n
			return f(x)
		})
	})
}
