package onnx

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// rotaryOp is a RotaryEmbedding node: it rotates pairs of the elements of each row of X, [batch, heads, sequence, size]
// or [batch, sequence, heads·size], by angles whose cosines and sines are inputs:
//
//	cos_cache, sin_cache [positions, R/2] with position_ids [batch, sequence]
//	cos_cache, sin_cache [batch, sequence, R/2] without
type rotaryOp struct {
	heads       int // 0 when not given
	dim         int // R; 0 means the head size
	interleaved bool
}

func newRotaryEmbedding(_ *node, a *attributes) operator {
	return &rotaryOp{
		heads: a.integer("num_heads", 0, 0, math.MaxInt32), dim: a.integer("rotary_embedding_dim", 0, 0, math.MaxInt32),
		interleaved: a.flag("interleaved"),
	}
}

func (op *rotaryOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	x, cos, sin, ids := in[0], in[1], in[2], in[3]
	heads, seq := op.heads, 0
	switch s := x.Shape; {
	case len(s) == 4 && (heads == 0 || heads == s[1]):
		heads, seq = s[1], s[2]
	case len(s) == 3 && heads > 0 && s[2]%heads == 0:
		seq = s[1]
	default:
		return nil, "", fmt.Errorf("input X has shape %v and num_heads is %d: it must be [batch heads sequence size], or [batch sequence heads·size] with num_heads: %w", s, heads, kernels.ErrShape)
	}
	if x.Elements() == 0 {
		return nil, "", fmt.Errorf("input X has shape %v, every length must be at least 1: %w", x.Shape, kernels.ErrShape)
	}
	r := rotation{x: x, heads: heads, cos: cos, sin: sin, interleaved: op.interleaved}
	batch, size := x.Shape[0], x.Elements()/(x.Shape[0]*heads*seq)
	dim := op.dim
	if dim == 0 {
		dim = size
	}
	if dim%2 != 0 || dim > size {
		return nil, "", fmt.Errorf("rotary_embedding_dim is %d, it must be even and at most the head size %d: %w", dim, size, kernels.ErrOption)
	}
	rule := "[batch sequence rotary_embedding_dim/2] without position_ids"
	want := []int{batch, seq, dim / 2}
	if ids != nil {
		var err error
		if r.positions, err = positions(ids, batch, seq); err != nil {
			return nil, "", err
		}
		rule, want = "[positions rotary_embedding_dim/2] with position_ids", []int{firstLength(cos), dim / 2}
	}
	for i, t := range []*onnxfile.Tensor{cos, sin} {
		if !slices.Equal(t.Shape, want) {
			return nil, "", fmt.Errorf("%s has shape %v, it must be %v: %s: %w", []string{"cos_cache", "sin_cache"}[i], t.Shape, want, rule, kernels.ErrShape)
		}
	}
	y, err := r.run(ctx, dev)
	return []*onnxfile.Tensor{y}, "rotation, " + typeText(x.Type, dtypeOf(x.Type)), err
}

// positions returns the elements of position_ids, [batch, seq].
func positions(ids *onnxfile.Tensor, batch, seq int) ([]int, error) {
	if ids.Type.Float() || ids.Type == onnxfile.Bool {
		return nil, fmt.Errorf("position_ids is %v, it must be int64: %w", ids.Type, kernels.ErrDType)
	}
	if !slices.Equal(ids.Shape, []int{batch, seq}) {
		return nil, fmt.Errorf("position_ids has shape %v, it must be [%d %d], [batch sequence]: %w", ids.Shape, batch, seq, kernels.ErrShape)
	}
	list := make([]int, ids.Elements())
	for i := range list {
		list[i] = int(ids.Int(i))
	}
	return list, nil
}

// rotation rotates the rows of x by angles from caches of cosines and sines.
type rotation struct {
	x        *onnxfile.Tensor // [batch, heads, sequence, size] or [batch, sequence, heads·size]
	heads    int
	cos, sin *onnxfile.Tensor // [..., R/2]
	// positions [batch·sequence] are rows of the caches; nil means all in order.
	positions   []int
	offset      int // the first element of a head that is rotated
	interleaved bool
}

// run returns the rotated tensor in the type and layout of x.
func (r *rotation) run(ctx context.Context, dev *kernels.Device) (*onnxfile.Tensor, error) {
	pairs := r.cos.Shape[len(r.cos.Shape)-1]
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	for _, t := range []*onnxfile.Tensor{r.x, r.cos, r.sin} {
		if !t.Type.Float() {
			return nil, fmt.Errorf("input X is %v, cos_cache %v and sin_cache %v: they must be f32, f16, bf16 or f64: %w", r.x.Type, r.cos.Type, r.sin.Type, kernels.ErrDType)
		}
	}
	x := up.rows("X", r.x, dtypeOf(r.x.Type), r.heads)
	s := x.Shape()
	angles := func(name string, cache *onnxfile.Tensor) (kernels.Tensor, error) {
		if r.positions != nil {
			rows := cache.Shape[0]
			size := pairs * cache.Type.Size()
			data := cache.Data
			var err error
			if cache, err = newTensor(cache.Type, []int{len(r.positions), pairs}); err != nil {
				return kernels.Tensor{}, err
			}
			for i, p := range r.positions {
				if p < 0 || p >= rows {
					return kernels.Tensor{}, fmt.Errorf("position %d (element %d) has no row in %s, it must be 0 to %d: %w", p, i, name, rows-1, kernels.ErrOption)
				}
				cache.Data = append(cache.Data, data[p*size:(p+1)*size]...)
			}
		}
		return up.upload(name, cache, kernels.F32, kernels.Shape{s[kernels.Batch], 1, s[kernels.Seq], pairs}), up.err
	}
	if up.err != nil {
		return nil, up.err
	}
	cos, err := angles("cos_cache", r.cos)
	if err != nil {
		return nil, err
	}
	sin, err := angles("sin_cache", r.sin)
	if err != nil {
		return nil, err
	}
	part := x
	if r.offset > 0 {
		if part, err = x.Slice(kernels.Dim, r.offset, r.offset+2*pairs); err != nil {
			return nil, err
		}
	}
	if err := dev.Rotate(ctx, part, part, kernels.Angles{Cos: cos, Sin: sin, Rotation: kernels.Rotation{Interleaved: r.interleaved}}); err != nil {
		return nil, err
	}
	return unrows(ctx, dev, x, r.x)
}

// firstLength returns the length of the first axis, 0 for a scalar.
func firstLength(t *onnxfile.Tensor) int {
	if len(t.Shape) == 0 {
		return 0
	}
	return t.Shape[0]
}
