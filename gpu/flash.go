package gpu

import (
	"errors"
	"math"

	"github.com/seed90331342/attn/backend"
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
	cut := a.newCutter(prefillBuffers)
	kernel := a.kernel(s.kernel(v, d.ValueDim))
	cut.granule = v.keys
	cut.keeps = v.split
	cut.align = max(cut.align, granuleBytes)
	cut.maxBind = cut.maxBind &^ (granuleBytes - 1)
	cut.most[axN] = longest(v.keys, v.loops(d.Dim, d.ValueDim)+a.rounds(v.kt()*v.rv), a.each*float64(v.rows()*v.keys), a.b.pieceWork(kernel))
	// One area; a second one, for what pieces leave, doubles it at most.
	area := 16 * uint64(v.area(d.ValueDim))
	blocks := func(x box) int { return x.len(axB) * x.len(axH) * ((x.len(axM) + v.rows() - 1) / v.rows()) }
	cut.state = func(x box) uint64 { return uint64(blocks(x)) * area }
	if cut.maxState /= 2; cut.room == 0 {
		cut.maxState = min(maxWindow(a.b.limits)/2, a.b.limits.MaxBufferSize/2, maxFlashState)
	}
	err = cut.boxes(a.all(), func(box, int) error { return nil })
	if errors.Is(err, backend.ErrMemory) {
		return "", err
	}
	if err != nil {
		return err.Error(), nil
	}

	a.path, a.why = "register-tiled WGSL, variant "+v.name, why
	a.v, a.cut, a.rows, a.keys, a.tiled = kernel, cut, v.rows(), v.keys, true
	a.kept = func(x box, piece int) (totals, bytes uint64) {
		one := cut.state(x)
		if x.lo[axN]/v.split < (x.hi[axN]-1)/v.split {
			totals = one
		}
		if bytes = totals; piece < x.len(axN) {
			bytes += one
		}
		return totals, bytes
	}
	return "", nil
}

// unit is what turns dot products, or with softcap what tanh makes of them, into
// scores in units of log 2.
func unit(p *backend.Problem) float32 {
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
		wide:     sideBySide(c.Q) && (c.K.DType() == backend.Q8 || sideBySide(c.K) && sideBySide(c.V)),
		half:     c.O.DType() != backend.F32,
		software: a.b.info.Type == backend.CPU, limits: a.b.limits,
	}
}

// sideBySide reports whether rows of t begin at multiples of 4 elements and have
// their elements next to one another, in fours.
func sideBySide(t backend.Tensor) bool {
	shape, strides := t.Shape(), t.Strides()
	if shape[backend.Dim]%4 != 0 || strides[backend.Dim] != 1 || t.Offset()%4 != 0 {
		return false
	}
	for i, s := range strides[:backend.Dim] {
		if shape[i] > 1 && s%4 != 0 {
			return false
		}
	}
	return true
}
