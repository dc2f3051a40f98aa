package linear

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// convRows is the number of tokens that a convolution computes at a time, and convStrips the most strips of channels of a
// task, whose rows are then whole lines of cache of neighbours.
const (
	convRows   = 32
	convStrips = 16
)

// Conv is a causal convolution, see backend.CausalConv. A task computes some strips of channels of one sequence. It
// implements pool.Job.
type Conv struct {
	columns                       *vec.Kernels // whose lanes are channels
	y, x, w, bias, past, present  view.View
	silu                          bool
	cuQ                           []int
	strips, tasks, before, window int // of a sequence; W-1; floats of a window
}

// Set makes j the call c, whose operands are pinned, and returns the number of tasks and the floats of scratch of each.
func (j *Conv) Set(x *vec.Kernels, c *backend.CausalConv) (tasks, floats int) {
	*j = Conv{y: view.Of(&c.Y), x: view.Of(&c.X), w: view.Of(&c.W), bias: view.Of(&c.Bias), past: view.Of(&c.PastState), present: view.Of(&c.PresentState),
		silu: c.SiLU, cuQ: c.CuQ, before: c.W.Shape()[backend.Seq] - 1}
	j.columns, j.strips = tableOf(x, j.x.Shape[backend.Dim])
	j.tasks = tile.CeilDiv(j.strips, convStrips)
	j.window = (j.before + convRows) * j.columns.Width
	return backend.Sequences(c.CuQ, j.x.Shape[backend.Batch]) * j.tasks, convStrips*(j.window+(j.before+2)*j.columns.Width) + (2*convRows+2)*j.columns.Width
}

// convStrip is a strip of channels: [before + convRows, Width] rows of x, weights and bias.
type convStrip struct {
	at, cols             int // channels
	window, weights, add []float32
}

// Task implements pool.Job.
func (j *Conv) Task(turn *pool.Turn, scratch *pool.Scratch, t int) error {
	y, width := j.columns, j.columns.Width
	n, first := t/j.tasks, t%j.tasks*convStrips
	b, lo, hi := backend.Sequence(j.cuQ, n, j.x.Shape[backend.Seq])
	all := scratch.Floats(convStrips * (j.window + (j.before+2)*width))
	out, e, one, lanes := scratch.Floats(convRows*width), scratch.Floats(convRows*width), scratch.Floats(width), scratch.Floats(width)
	tile.Fill(one, 1)
	var memory [convStrips]convStrip
	strips := memory[:min(convStrips, j.strips-first)]
	for i := range strips {
		s := &strips[i]
		s.at = (first + i) * width
		s.cols = min(width, j.x.Shape[backend.Dim]-s.at)
		s.window, s.weights, s.add, all = all[:j.window], all[j.window:][:(j.before+1)*width], all[j.window+(j.before+1)*width:][:width], all[j.window+(j.before+2)*width:]
		j.w.Load(y, s.weights, width, 0, 0, 0, j.before+1, s.at, s.cols)
		clear(s.add)
		if !j.bias.IsZero() {
			j.bias.Load(y, s.add, width, 0, 0, 0, 1, s.at, s.cols)
		}
		clear(s.window[:j.before*width])
		if !j.past.IsZero() {
			j.past.Load(y, s.window, width, n, 0, 0, j.before, s.at, s.cols)
		}
	}
	for ; lo < hi; lo += convRows {
		if err := turn.Pause(); err != nil {
			return err
		}
		rows := min(convRows, hi-lo)
		for i := range strips {
			s := &strips[i]
			j.x.Load(y, s.window[j.before*width:], width, b, 0, lo, rows, s.at, s.cols)
			for r := range rows {
				copy(out[r*width:], s.add)
			}
			for tap := range j.before + 1 {
				fold(y, out[:rows*width], s.window[tap*width:], one, s.weights[tap*width:])
			}
			if j.silu {
				silu(y, out[:rows*width], e, lanes)
			}
			for r := range rows {
				j.y.Store(y, out[r*width:][:s.cols], b, 0, lo+r, s.at)
			}
			copy(s.window[:j.before*width], s.window[rows*width:])
		}
	}
	for i := range strips {
		for r := 0; r < j.before && !j.present.IsZero(); r++ {
			j.present.Store(y, strips[i].window[r*width:][:strips[i].cols], n, 0, r, strips[i].at)
		}
	}
	return nil
}

// silu replaces whole vectors y by y·σ(y) = y/(1+e) with e = exp(-y), or by 0 where e exceeds 2^125.
func silu(x *vec.Kernels, y, e, lanes []float32) {
	e = e[:len(y)]
	copy(e, y)
	x.Bound(e, 87) // e up to 2^125.5, and not an infinite one
	x.ScaleMax(e, -math.Log2E, lanes)
	x.Exp2(e, 0)
	for i, z := range e {
		if y[i] /= 1 + z; z > 0x1p125 {
			y[i] = 0
		}
	}
}
