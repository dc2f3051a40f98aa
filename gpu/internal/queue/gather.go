package queue

import (
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

// fill gives window j of a step a buffer that is filled before it, and copied back after a step that
// writes a gathered window.
func (r *Runner) fill(x *dispatch, j int, a *cut.Staged) (err error) {
	if a.Of.OnHost {
		x.windows[j].Buf, err = r.upload(a)
		return err
	}
	buf, whole := &r.held.gathers[j], []cut.Copy(nil)
	if !r.rehearsal {
		if err := r.hold(buf, a.Size()); err != nil {
			return err
		}
		x.windows[j].Buf = *buf
		whole = a.Copies(a.Runs, *buf, false)
		if a.Of.Use != cut.Read {
			x.after = append(x.after, a.Copies(a.Runs, *buf, true)...)
		}
	}
	for _, run := range a.Shifts() {
		s := shift(run, a)
		if !r.rehearsal {
			if err := r.hold(&r.held.words, a.Size()); err != nil {
				return err
			}
			s.Windows[0].Buf, s.Windows[1].Buf = r.held.words, *buf
			whole = append(whole, a.Copies([]cut.Run{run.Words()}, r.held.words, false)...)
		}
		if err := r.dispatch(s, whole...); err != nil {
			return err
		}
		whole = nil
	}
	x.before = append(x.before, whole...)
	return nil
}

// shift returns the step that moves the elements of a run to the window of a, without buffers. convert.wgsl
// takes 256 units, elements or pairs, of about 40 operations each a workgroup.
func shift(r cut.Run, a *cut.Staged) Step {
	units, to, pairs := int(r.Hi-r.Lo)/2, int(r.To/2), 0
	if (units|to)%2 == 0 {
		units, pairs = units/2, 1
	}
	return Step{
		Kernel: shaders.Convert{}, Windows: []cut.Window{{Size: a.Size()}, {Size: a.Size()}}, Groups: (units + 255) / 256, Each: 256 * 40,
		Params: &shaders.ConvertParams{
			Heads: 1, Rows: 1, Units: units, All: units, Pairs: pairs, InType: int(shaders.F16), OutType: int(shaders.F16),
			Src: shaders.Strides{Base: int(r.Lo % 4 / 2), D: 1}, O: shaders.Strides{Base: to, D: 1},
		},
	}
}

// each calls f for the shifts of the windows of s, and for s.
func (s Step) each(f func(s Step) error) error {
	for _, w := range s.Windows {
		if a, ok := w.Buf.(*cut.Staged); ok && !a.Of.OnHost {
			for _, run := range a.Shifts() {
				if err := f(shift(run, a)); err != nil {
					return err
				}
			}
		}
	}
	return f(s)
}
