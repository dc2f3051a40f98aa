package nn

import (
	"math"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// Temperature multiplies the query at position t by
//
//	1 + Scale·ln(1 + ⌊(t+1)/Floor⌋)
//
// after its norm and rotation, so that attention over many keys stays sharp (Llama 4).
type Temperature struct {
	// Scale is that of the logarithm, 0.1 in Llama 4.
	Scale float64
	// Floor is the number of positions after which the factor first grows, 8192 in Llama 4.
	Floor int
}

// factors returns the factors of queries of shape s, [B, H, S, 1], or nothing for a nil t.
func (t *Temperature) factors(b *steps.Steps, opt *MultiHeadOptions, s kernels.Shape) (f kernels.Tensor) {
	if t == nil || b.Err != nil {
		return f
	}
	positions, err := opt.positions(s[kernels.Seq])
	if b.Err = err; err != nil {
		return f
	}
	var data []float32
	for _, list := range positions {
		for _, at := range list {
			data = append(data, float32(1+t.Scale*math.Log1p(float64(max(at+1, 0)/t.Floor))))
		}
	}
	f = b.Must(b.Dev.FromFloat32(b.Ctx, kernels.F32, data, kernels.Shape{len(positions), 1, s[kernels.Seq], 1}))
	b.Own(f)
	if b.Err == nil {
		s[kernels.Dim] = 1
		f = b.Must(f.Broadcast(s))
	}
	return f
}

// positions returns those of n rows of x: the ones of the options, or those after the tokens of the cache before x.
func (opt *MultiHeadOptions) positions(n int) ([][]int, error) {
	from := []int{0}
	switch {
	case opt.Positions != nil:
		return opt.Positions, nil
	case opt.Cache != nil:
		from = opt.before()
	}
	return op.Positions(from, n)
}

// chunk hides from n rows of x the keys of other chunks of Chunk positions: by a window from one row of each sequence of a
// cache, and otherwise by segments, which have a number for each key.
func (l *MultiHeadAttention) chunk(opt *MultiHeadOptions, n int) error {
	size := l.config.Chunk
	if size == 0 {
		return nil
	}
	positions, err := opt.positions(n)
	if err != nil || opt.chunkWindow(positions, n, size) {
		return err
	}
	opt.QSegments = make([][]int32, len(positions))
	for b, list := range positions {
		for _, at := range list {
			opt.QSegments[b] = append(opt.QSegments[b], int32(at/size))
		}
	}
	if opt.Cache == nil {
		return nil
	}
	for b, before := range opt.before() { // the tokens of x are in the chunks of their own positions
		ids, err := kernels.Make[int32](opt.keys())
		if err != nil {
			return err
		}
		for i := range ids {
			ids[i] = int32(i / size)
		}
		copy(ids[min(before, len(ids)):], opt.QSegments[min(b, len(positions)-1)])
		opt.KSegments = append(opt.KSegments, ids)
	}
	return nil
}

// chunkWindow sets a window of size keys that begins with the chunk of the row of each sequence of a cache, and reports
// whether n, the rows of a sequence, is 1 and the options allow it. The Offset moves the row to the last position of its
// chunk. That hides nothing: the row is the last token of its sequence.
func (opt *MultiHeadOptions) chunkWindow(positions [][]int, n, size int) bool {
	given := opt.Options
	if opt.Cache == nil || n != 1 || opt.Cache.Config().Window > 0 || opt.MaskLast || opt.SharePrefix || given.Window != nil ||
		given.Offset != nil || given.Prefix != nil || given.Spans != nil || given.ALiBi != nil || given.ScoreMod != nil {
		return false
	}
	var offset []int
	for b, before := range opt.before() {
		if positions[min(b, len(positions)-1)][0]/size != before/size {
			return false
		}
		offset = append(offset, size-1-before%size)
	}
	opt.Offset, opt.Window = offset, &kernels.Window{Left: size - 1}
	return true
}
