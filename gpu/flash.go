package gpu

import (
	"errors"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
)

// maxFlashState bounds the totals of splits that a dispatch of the flash kernel
// keeps: enough for 200,000 rows of 128 columns, which keep any GPU busy.
const maxFlashState = 128 << 20

// flash makes the call one of the register-tiled kernel. It returns why not, when it
// cannot be. That there is too little room for what is streamed is an error: room
// changes no result, and another kernel would.
func (a *attention) flash(choose chooser) (whyNot string, err error) {
	d := a.d
	s := a.shape()
	v, why := choose(s)
	if v.name == "" {
		return why, nil
	}
	cutter := a.newCutter(prefillBuffers)
	kernel := a.kernel(s.kernel(v, d.ValueDim))
	cutter.Granule = v.keys
	cutter.Keeps = v.split
	cutter.AlignGranules()
	cutter.Most[cut.Col] = cut.Longest(v.keys, v.loops(d.Dim, d.ValueDim)+a.rounds(v.kt()*v.rv), a.each*float64(v.rows()*v.keys), a.b.pieceWork(kernel))
	// One area; a second one, for what pieces leave, doubles it at most.
	area := 16 * uint64(v.area(d.ValueDim))
	blocks := func(x cut.Box) int {
		return x.Len(cut.Batch) * x.Len(cut.Head) * ((x.Len(cut.Row) + v.rows() - 1) / v.rows())
	}
	cutter.State = func(x cut.Box) uint64 { return uint64(blocks(x)) * area }
	if cutter.MaxState /= 2; cutter.Room == 0 {
		cutter.MaxState = min(maxWindow(a.b.limits)/2, a.b.limits.MaxBufferSize/2, maxFlashState)
	}
	err = cutter.Boxes(a.all(), func(cut.Box, int) error { return nil })
	if errors.Is(err, backend.ErrMemory) {
		return "", err
	}
	if err != nil {
		return err.Error(), nil
	}

	a.path, a.why = "register-tiled WGSL, variant "+v.name, why
	a.v, a.cut, a.rows, a.keys, a.tiled = kernel, cutter, v.rows(), v.keys, true
	a.kept = func(x cut.Box, piece int) (totals, bytes uint64) {
		one := cutter.State(x)
		if x.Lo[cut.Col]/v.split < (x.Hi[cut.Col]-1)/v.split {
			totals = one
		}
		if bytes = totals; piece < x.Len(cut.Col) {
			bytes += one
		}
		return totals, bytes
	}
	return "", nil
}

// scoreUnit is what turns dot products, or with softcap what tanh makes of them, into
// scores in units of log 2.
func scoreUnit(p *backend.Problem) float32 {
	factor := p.Scale
	if p.Softcap > 0 {
		factor = p.Softcap
	}
	return float32(math.Log2E * float64(factor))
}

// shape is what the kernel of the call is chosen by. Pages are not in it: they change
// where rows are loaded from and nothing else.
func (a *attention) shape() flashShape {
	d, c := a.d, a.c
	return flashShape{
		class: classOf(d.Dim, d.ValueDim), valueDim: d.ValueDim, heads: d.Batch * d.Heads, seqQ: d.SeqQ,
		in: c.Q.DType(), kv: c.K.DType(),
		paired:   a.paired(),
		wide:     cut.AlignedRows(c.Q, 4) && (c.K.DType() == backend.Q8 || cut.AlignedRows(c.K, 4) && cut.AlignedRows(c.V, 4)),
		half:     c.O.DType() != backend.F32,
		software: a.b.info.Type == backend.CPU, limits: a.b.limits,
	}
}
