package queue

import (
	"context"
	"time"

	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// maxDispatches bounds the dispatches of one submission.
const maxDispatches = 128

// dispatch is one dispatch of a step.
type dispatch struct {
	pipeline *Pipeline
	windows  []cut.Window
	params   shaders.Params
	grid     [3]uint32
	work     float64 // operations, for progress
	seconds  float64 // expected
	// Copies that fill windows before the dispatch and return them after it.
	before, after []cut.Copy

	offset uint64 // of the parameters in the batch
}

// writes reports whether x writes to buf.
func (x *dispatch) writes(buf cut.Buffer) bool {
	for j, w := range x.windows {
		if w.Buf == buf && x.pipeline.kinds[j] == 'w' {
			return true
		}
	}
	return false
}

// batch is the submission that is being assembled. Its slices are used again by later
// calls.
type batch struct {
	list    []dispatch
	data    []byte // parameters as they are written to the slot
	work    float64
	seconds float64

	commands []port.Command
	bindings []port.Binding
}

// holds returns the bytes of parameters of b with x.
func (b *batch) holds(x *dispatch, s *slots) int {
	return cut.AlignUp(len(b.data), s.align) + x.params.Size()
}

// add adds x with its present parameters.
func (b *batch) add(x dispatch, s *slots) {
	at := cut.AlignUp(len(b.data), s.align)
	for len(b.data) < at {
		b.data = append(b.data, 0)
	}
	x.offset = uint64(at)
	b.data = x.params.Append(b.data)
	b.list = append(b.list, x)
	b.work += x.work
	b.seconds += x.seconds
}

// clear empties b.
func (b *batch) clear() {
	clear(b.list)
	clear(b.commands)
	clear(b.bindings)
	*b = batch{list: b.list[:0], data: b.data[:0], commands: b.commands[:0], bindings: b.bindings[:0]}
}

// record writes the parameters to f's slot and makes the commands of b.
func (b *batch) record(ctx context.Context, d *Device, f *flight) error {
	if err := d.Port.Write(f.slot, 0, b.data); err != nil {
		return d.wrap(err)
	}
	for i := range b.list {
		x := &b.list[i]
		p, err := d.Acquire(ctx, x.pipeline)
		if err != nil {
			return err
		}
		f.pipelines = append(f.pipelines, x.pipeline)
		b.copies(x.before)
		uniform := port.Binding{Buffer: f.slot, Offset: x.offset, Size: uint64(x.params.Size())}
		from := len(b.bindings)
		for j, w := range x.windows {
			if j == x.pipeline.uniform {
				b.bindings = append(b.bindings, uniform)
			}
			if w.Buf == nil {
				w = cut.Window{Buf: d.blank[j], Size: BlankBytes}
			}
			b.bindings = append(b.bindings, port.Binding{Buffer: w.Buf, Offset: w.Offset, Size: w.Size})
		}
		if len(x.windows) == x.pipeline.uniform {
			b.bindings = append(b.bindings, uniform)
		}
		b.commands = append(b.commands, port.Command{Pipeline: p, Bindings: b.bindings[from:len(b.bindings):len(b.bindings)], Groups: x.grid})
		b.copies(x.after)
	}
	return nil
}

// copies records copies between buffers.
func (b *batch) copies(list []cut.Copy) {
	for _, c := range list {
		b.commands = append(b.commands, port.Command{Src: c.Src, SrcOffset: c.SrcOffset, Dst: c.Dst, DstOffset: c.DstOffset, Size: c.Size})
	}
}

// flight is a submission on the device.
type flight struct {
	ticket    port.Ticket
	slot      port.Buffer // the uniform buffer that it reads
	pipelines []*Pipeline // one for each dispatch
	began     time.Time
	work      float64
	seconds   float64 // expected
}

// end releases what f used.
func (f *flight) end(d *Device) {
	for _, p := range f.pipelines {
		d.Release(p)
	}
	d.slots.give(f.slot)
}

// only returns the pipeline of all dispatches of f, nil if there are several.
func (f *flight) only() *Pipeline {
	for _, p := range f.pipelines {
		if p != f.pipelines[0] {
			return nil
		}
	}
	return f.pipelines[0]
}

// flights are the submissions of a call on the device, oldest first.
type flights struct {
	list   [MaxFlight + 1]flight // the last one is for the slices of the flight that pop returned
	n      int
	landed int       // how many have ended
	ended  time.Time // when the last one of them had
}

// next returns an empty flight behind the others. It counts once n is incremented.
func (l *flights) next() *flight {
	f := &l.list[l.n]
	f.clear()
	return f
}

// clear empties f but keeps its slices.
func (f *flight) clear() {
	clear(f.pipelines)
	*f = flight{pipelines: f.pipelines[:0]}
}

// reset prepares l for the next call.
func (l *flights) reset() {
	for i := range l.list {
		l.list[i].clear()
	}
	l.n, l.landed, l.ended = 0, 0, time.Time{}
}

// pop removes the oldest flight. It is valid until the next call of next.
func (l *flights) pop() *flight {
	first := l.list[0]
	copy(l.list[:], l.list[1:])
	l.list[MaxFlight] = first
	l.n--
	l.landed++
	return &l.list[MaxFlight]
}

// started returns how many submissions the call has started.
func (l *flights) started() int { return l.landed + l.n }

// learn corrects the pace of f's pipeline. Short submissions say more about the cost of a
// submission than about the kernel, and are ignored.
func (l *flights) learn(f *flight, now time.Time, share float64) {
	from := f.began
	if l.ended.After(from) {
		from = l.ended // it waited for the one before
	}
	l.ended = now
	took := now.Sub(from).Seconds()
	if p := f.only(); p != nil && f.seconds > 0 && max(took, f.seconds) > share/8 {
		p.pace.measured(took / f.seconds)
	}
}
