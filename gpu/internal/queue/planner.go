package queue

import (
	"cmp"
	"slices"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

// NewPlanner returns a Device with limits and no device behind it. It plans operations
// (Count, Dispatches) and must not run any.
func NewPlanner(l gputypes.Limits, name string, kind backend.DeviceType, c Config) *Device {
	d := &Device{
		Limits: l, name: name, pacing: newPacing(kind, c),
		pipelines: pipelines{all: map[shaders.Variant]*Pipeline{}, most: maxPipelines},
		streaming: make(chan struct{}, 1), sent: newSent(), OwnExp2: c.OwnExp2,
	}
	d.bound.Store(c.MemoryBytes)
	d.runners.New = func() any { return new(Runner) }
	return d
}

// Dispatch is a dispatch of an operation.
type Dispatch struct {
	Kernel shaders.Variant
	Sizes  []uint64       // bytes of the bindings, with the uniform's
	Params shaders.Params // contents of the uniform
	Grid   [3]uint32      // workgroups
	Groups int            // workgroups that compute; those beyond it return at once
}

// Dispatches calls f for each dispatch of op, in order. The tensors need no memory.
func (d *Device) Dispatches(op *Op, f func(x Dispatch) error) error {
	return op.walk(nil, nil, func(_ Piece, s Step) error {
		x := Dispatch{Kernel: d.own(s.Kernel), Params: s.Params}
		for _, w := range s.Windows {
			x.Sizes = append(x.Sizes, cmp.Or(w.Size, BlankBytes))
		}
		x.Sizes = slices.Insert(x.Sizes, d.Pipeline(s.Kernel).uniform, uint64(s.Params.Size()))
		return d.split(s, time.Time{}, func(first, n int, grid [3]uint32) error {
			s.Params.(shaders.Ranged).SetRange(first, first+n)
			x.Grid, x.Groups = grid, n
			return f(x)
		})
	})
}
