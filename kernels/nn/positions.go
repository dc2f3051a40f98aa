package nn

import (
	"math"
	"sync"

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

// positions returns those of n rows of x: the ones of the options, or those after the tokens of the
// cache before x.
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

// chunk sets the segments of n rows of x and of the tokens before them, the chunks of Chunk positions.
func (l *MultiHeadAttention) chunk(opt *MultiHeadOptions, n int) error {
	size := l.config.Chunk
	if size == 0 {
		return nil
	}
	positions, err := opt.positions(n)
	if err != nil {
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
	ids, err := l.chunks.first(opt.keys(), size)
	if opt.Positions == nil || err != nil {
		opt.KSegments = [][]int32{ids}
		return err
	}
	for b, before := range opt.before() { // the tokens of x are in the chunks of their own positions
		own, err := kernels.Make[int32](len(ids))
		if err != nil {
			return err
		}
		copy(own, ids)
		copy(own[min(before, len(own)):], opt.QSegments[min(b, len(positions)-1)])
		opt.KSegments = append(opt.KSegments, own)
	}
	return nil
}

// chunkIDs are the chunks of the positions 0, 1, 2, .. Calls over a cache share them. A call of one token then allocates no
// number for each token of the cache.
type chunkIDs struct {
	mu  sync.Mutex
	ids []int32
}

// first returns the chunks of the first n positions.
func (c *chunkIDs) first(n, size int) ([]int32, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > len(c.ids) {
		ids, err := kernels.Make[int32](max(n, 2*len(c.ids)))
		if err != nil {
			return nil, err
		}
		for i := range ids {
			ids[i] = int32(i / size)
		}
		c.ids = ids
	}
	return c.ids[:n], nil
}
