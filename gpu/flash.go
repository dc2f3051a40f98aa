package gpu

import (
	"errors"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/tune"
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
	if v.Name == "" {
		return why, nil
	}
	cutter := a.newCutter(prefillBuffers)
	tiled, consts := s.Kernel(v)
	kernel := a.kernel(variant{tiled, consts})
	cutter.Granule = v.Keys
	cutter.Keeps = v.Split
	cutter.AlignGranules()
	cutter.Most[cut.Col] = cut.Longest(v.Keys, v.Loops(d.Dim, d.ValueDim)+a.rounds(v.RowsByKeys()), a.each*float64(v.Rows()*v.Keys), a.b.pieceWork(kernel))
	// One area; a second one, for what pieces leave, doubles it at most.
	area := 16 * uint64(v.Area(d.ValueDim))
	blocks := func(x cut.Box) int {
		return x.Len(cut.Batch) * x.Len(cut.Head) * ((x.Len(cut.Row) + v.Rows() - 1) / v.Rows())
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

	a.path, a.why = "register-tiled WGSL, variant "+v.Name, why
	a.v, a.cut, a.rows, a.keys, a.tiled = kernel, cutter, v.Rows(), v.Keys, true
	a.kept = func(x cut.Box, piece int) (totals, bytes uint64) {
		one := cutter.State(x)
		if x.Lo[cut.Col]/v.Split < (x.Hi[cut.Col]-1)/v.Split {
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
func (a *attention) shape() tune.Shape {
	d, c, l := a.d, a.c, a.b.limits
	return tune.Shape{
		Class: tune.ClassOf(d.Dim, d.ValueDim), ValueDim: d.ValueDim, Heads: d.Batch * d.Heads, SeqQ: d.SeqQ,
		In: c.Q.DType(), KV: c.K.DType(),
		Paired:   a.paired(),
		Wide:     cut.AlignedRows(c.Q, 4) && (c.K.DType() == backend.Q8 || cut.AlignedRows(c.K, 4) && cut.AlignedRows(c.V, 4)),
		Half:     c.O.DType() != backend.F32,
		Software: a.b.info.Type == backend.CPU,
		Limits: tune.Limits{
			Threads: int(l.MaxComputeInvocationsPerWorkgroup), Memory: int(l.MaxComputeWorkgroupStorageSize), Binding: maxWindow(l),
		},
	}
}
