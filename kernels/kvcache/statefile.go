package kvcache

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/weights"
)

// file lists the tensors of a file, and data of them.
func (c *States) file(data *[3]kernels.Tensor) weights.List {
	return weights.List{
		{Name: "meta", Tensor: "meta", T: &data[0], Shape: kernels.Shape{1, 1, 1, 4}, Vector: true, Of: "states"},
		{Name: "state", Tensor: "state", T: &data[1], Shape: kernels.Shape{1, 1, c.config.KVHeads * c.config.Dim, c.config.ValueDim}, Columns: true, Of: "states"},
		{Name: "rows", Tensor: "rows", T: &data[2], Shape: kernels.Shape{1, 1, c.config.Width - 1, c.config.Channels}, Columns: true, Of: "a convolution"},
	}[:2+min(c.config.Channels, 1)]
}

// Save writes sequence b as a .safetensors file of F32:
//
//	meta   [4]          Hv, K, and the number of tokens as ⌊n/65536⌋ and n mod 65536
//	state  [Hv·K, V]
//	rows   [W-1, Ch]    if there is a convolution
//
// Errors: ErrOption for a sequence that does not exist and between the two calls of a step, ErrReleased, those of the
// backend and of w.
func (c *States) Save(ctx context.Context, b int, w io.Writer) error {
	return c.change("save", b, true, func() error {
		var data [3]kernels.Tensor
		n, l := c.linear.n[b], c.file(&data)
		meta := []float32{float32(c.config.KVHeads), float32(c.config.Dim), float32(n >> 16), float32(n & 0xffff)}
		data[0], _ = kernels.HostF32(meta, l[0].Shape) // of 4 numbers
		for i, r := range c.rings() {
			x, err := c.pool.dev.ToFloat32(ctx, c.of(r, b))
			if err == nil {
				data[1+i], err = kernels.HostF32(x, l[1+i].Shape)
			}
			if err != nil {
				return err
			}
		}
		return l.Write(w)
	})
}

// Load makes sequence b the one of a file of the given size, which Save wrote from a cache of the same shape. Rewind does not
// shorten it. Errors: ErrFile for another file and one that is cut, ErrOption for a sequence that does not exist,
// ErrMemory, ErrReleased, and the backend's.
func (c *States) Load(ctx context.Context, b int, r io.ReaderAt, size int64) error {
	return c.change("load", b, false, func() error {
		var data [3]kernels.Tensor
		n, err := 0, weights.Load(r, size, "", c.file(&data))
		if err == nil {
			n, err = c.tokens(data[0])
		}
		if err != nil {
			if !errors.Is(err, kernels.ErrMemory) {
				err = op.As(kernels.ErrFile, err)
			}
			return err
		}
		for i, r := range c.rings() {
			x, _ := data[1+i].Float32s() // F32
			if data[1+i], err = c.pool.dev.FromFloat32(ctx, kernels.F32, x, c.of(r, b).Shape()); err != nil {
				return err
			}
			defer data[1+i].Release()
		}
		return c.set(ctx, b, n, data[1:]...)
	})
}

// tokens returns the number of tokens in the meta of a file.
func (c *States) tokens(t kernels.Tensor) (int, error) {
	meta, _ := t.Float32s() // F32
	heads, dim, n := float32(c.config.KVHeads), float32(c.config.Dim), float64(meta[2])*65536+float64(meta[3])
	if meta[0] != heads || meta[1] != dim || !(n >= 0 && n <= op.MaxLength && n == float64(int(n))) {
		return 0, fmt.Errorf("meta is %v, it must be %v, %v, and a number of tokens up to %d", meta, heads, dim, op.MaxLength)
	}
	return int(n), nil
}
