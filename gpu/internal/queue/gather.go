package queue

import (
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

// gather fills a buffer for window j of a step with a gathered window before the step, and copies it
// back after a step that writes it.
func (r *Runner) gather(x *dispatch, j int, a *cut.Staged) error {
	buf, shifts := &r.held.gathers[j], a.Shifts()
	var before []cut.Copy
	if !r.rehearsal {
		if err := r.hold(buf, a.Size()); err != nil {
			return err
		}
		x.windows[j].Buf = *buf
		before = a.Copies(*buf, false)
		if a.Of.Use != cut.Read {
			x.after = append(x.after, a.Copies(*buf, true)...)
		}
		if len(shifts) > 0 {
			if err := r.hold(&r.held.shift, a.Size()); err != nil {
				return err
			}
		}
	}
	for _, s := range shifts {
		step := shiftStep(s, a)
		if !r.rehearsal {
			step.Windows[0].Buf, step.Windows[1].Buf = r.held.shift, *buf
			before = append(before, a.CopiesOf(s, r.held.shift)...)
		}
		if err := r.dispatch(step, before...); err != nil {
			return err
		}
		before = nil
	}
	x.before = append(x.before, before...)
	return nil
}

// The units, elements or pairs, of a workgroup of convert.wgsl, and the approximate cost of one.
const (
	shiftUnits = 256
	shiftOps   = 40
)

// shiftStep returns the step that moves the elements of s to the window of a, without buffers.
func shiftStep(s cut.Shift, a *cut.Staged) Step {
	units, pairs := s.Elements, 0
	if (s.Elements|s.To|s.ToStep)%2 == 0 {
		units, pairs = units/2, 1
	}
	n := len(s.Runs) * units
	return Step{
		Kernel: shaders.Convert{}, Windows: []cut.Window{{Size: a.Size()}, {Size: a.Size()}},
		Groups: (n + shiftUnits - 1) / shiftUnits, Each: shiftUnits * shiftOps,
		Params: &shaders.ConvertParams{
			Heads: 1, Rows: len(s.Runs), Units: units, All: n, Pairs: pairs, InType: int(shaders.F16), OutType: int(shaders.F16),
			Src: shaders.Strides{Base: s.From, S: s.FromStep, D: 1}, O: shaders.Strides{Base: s.To, S: s.ToStep, D: 1},
		},
	}
}

// each calls f for the steps that fill the windows of s, and for s.
func (s Step) each(f func(s Step) error) error {
	for _, w := range s.Windows {
		if a, ok := w.Buf.(*cut.Staged); ok && !a.Of.OnHost {
			for _, x := range a.Shifts() {
				if err := f(shiftStep(x, a)); err != nil {
					return err
				}
			}
		}
	}
	return f(s)
}
