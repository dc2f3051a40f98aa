package linear

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// convRows is the number of tokens that a convolution reads at a time, and convChannels the most channels of a task.
// Where tokens are adjacent in memory, as ONNX has them, lanes are tokens: turnedRows at a time, of turnedChannels one
// after another.
const (
	convRows       = 16
	convChannels   = 512
	turnedRows     = 256
	turnedChannels = 16
)

// Conv is a causal convolution, see backend.CausalConv. A task computes some channels of one sequence. It implements
// pool.Job.
type Conv struct {
	kernels                      *vec.Kernels
	y, x, w, bias, past, present strided.Tensor
	silu, turned                 bool
	cuQ                          []int
	tasks, before                int // of a sequence; W-1
	tokens, channels, some       int // of X; of a task, at most
}

// Set makes j the call c, whose operands are pinned, and returns the number of tasks and the floats of scratch of each.
func (j *Conv) Set(x *vec.Kernels, c *backend.CausalConv) (tasks, floats int) {
	*j = Conv{kernels: x, y: strided.Of(&c.Y), x: strided.Of(&c.X), w: strided.Of(&c.W), bias: strided.Of(&c.Bias), past: strided.Of(&c.PastState), present: strided.Of(&c.PresentState),
		silu: c.SiLU, cuQ: c.CuQ, before: c.W.Shape()[backend.Seq] - 1}
	j.tokens, j.channels = j.x.Shape[backend.Seq], j.x.Shape[backend.Dim]
	j.some, floats = convChannels, (2*j.before+convRows+3)*convChannels
	if j.turned = j.x.Stride[backend.Dim] != 1 && j.x.Stride[backend.Seq] == 1; j.turned {
		j.some, floats = turnedChannels, j.before+(j.before+4)*turnedRows
		for _, v := range []*strided.Tensor{&j.y, &j.x, &j.w, &j.past, &j.present} {
			v.Shape[backend.Seq], v.Shape[backend.Dim] = v.Shape[backend.Dim], v.Shape[backend.Seq]
			v.Stride[backend.Seq], v.Stride[backend.Dim] = v.Stride[backend.Dim], v.Stride[backend.Seq]
		}
	}
	j.tasks = tile.CeilDiv(j.channels, j.some)
	return backend.Sequences(c.CuQ, j.x.Shape[backend.Batch]) * j.tasks, floats
}

// Task implements pool.Job.
func (j *Conv) Task(turn *pool.Turn, scratch *pool.Scratch, t int) error {
	x, n, at := j.kernels, t/j.tasks, t%j.tasks*j.some
	b, lo, hi := backend.Sequence(j.cuQ, n, j.tokens)
	cols := min(j.some, j.channels-at)
	if j.turned {
		for c := at; c < at+cols; c++ {
			scratch.Reset()
			if err := j.channel(turn, scratch, n, b, lo, hi, c); err != nil {
				return err
			}
		}
		return nil
	}
	width := tile.RoundUp(cols, x.Lanes)
	window, weights := scratch.Floats((j.before+convRows)*width), scratch.Floats((j.before+1)*width)
	bias, out := scratch.Floats(width), scratch.Floats(width)
	j.w.Load(x, weights, width, 0, 0, 0, j.before+1, at, cols)
	clear(bias)
	if !j.bias.IsZero() {
		j.bias.Load(x, bias, width, 0, 0, 0, 1, at, cols)
	}
	clear(window[:j.before*width])
	if !j.past.IsZero() {
		j.past.Load(x, window, width, n, 0, 0, j.before, at, cols)
	}
	for ; lo < hi; lo += convRows {
		if err := turn.Pause(); err != nil {
			return err
		}
		rows := min(convRows, hi-lo)
		j.x.Load(x, window[j.before*width:], width, b, 0, lo, rows, at, cols)
		for r := range rows {
			j.sum(out, window[r*width:], width, weights, width, bias)
			j.y.Store(x, out[:cols], b, 0, lo+r, at)
		}
		copy(window[:j.before*width], window[rows*width:])
	}
	for r := 0; r < j.before && !j.present.IsZero(); r++ {
		j.present.Store(x, window[r*width:][:cols], n, 0, r, at)
	}
	return nil
}

// sum computes whole vectors out = bias + Σ window·weights, a tap after another, and SiLU. Taps are ldx and ldw apart.
func (j *Conv) sum(out, window []float32, ldx int, weights []float32, ldw int, bias []float32) {
	for tap := range j.before + 1 {
		j.kernels.ProductSum(out, window[tap*ldx:], weights[tap*ldw:], bias)
		bias = out
	}
	if j.silu {
		j.kernels.SiLU(out)
	}
}

// channel computes tokens [lo, hi) of channel c of sequence n, in batch b, with tokens as lanes. The axes of all views are
// exchanged.
func (j *Conv) channel(turn *pool.Turn, scratch *pool.Scratch, n, b, lo, hi, c int) error {
	x := j.kernels
	most := min(turnedRows, tile.RoundUp(hi-lo, x.Lanes))
	window, weights, bias, out := scratch.Floats(j.before+most), scratch.Floats((j.before+1)*most), scratch.Floats(most), scratch.Floats(most)
	clear(bias)
	if !j.bias.IsZero() {
		tile.Fill(bias, j.bias.At(0, 0, 0, c))
	}
	for tap := range j.before + 1 {
		tile.Fill(weights[tap*most:][:most], j.w.At(0, 0, c, tap))
	}
	clear(window[:j.before])
	if !j.past.IsZero() {
		j.past.Load(x, window, j.before, n, 0, c, 1, 0, j.before)
	}
	for ; lo < hi; lo += most {
		if err := turn.Pause(); err != nil {
			return err
		}
		rows := min(most, hi-lo)
		j.x.Load(x, window[j.before:], most, b, 0, c, 1, lo, rows)
		j.sum(out[:tile.RoundUp(rows, x.Lanes)], window, 1, weights, most, bias)
		j.y.Store(x, out[:rows], b, 0, c, lo)
		copy(window[:j.before], window[rows:])
	}
	if !j.present.IsZero() {
		j.present.Store(x, window[:j.before], n, 0, c, 0)
	}
	return nil
}
