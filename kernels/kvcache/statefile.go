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
		numbers := [3][]float32{{float32(c.config.KVHeads), float32(c.config.Dim), float32(n >> 16), float32(n & 0xffff)}}
		for i, x := range l {
			var err error
			if i > 0 {
				numbers[i], err = c.pool.dev.ToFloat32(ctx, c.of(c.rings()[i-1], b))
			}
			if err == nil {
				*x.T, err = kernels.HostF32(numbers[i], x.Shape)
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
		var data, up [3]kernels.Tensor
		n, err := c.read(r, size, c.file(&data))
		if err != nil {
			if !errors.Is(err, kernels.ErrMemory) {
				err = op.As(kernels.ErrFile, err)
			}
			return err
		}
		for i, r := range c.rings() {
			x, err := data[1+i].Float32s()
			if err == nil {
				up[i], err = c.pool.dev.FromFloat32(ctx, kernels.F32, x, c.of(r, b).Shape())
			}
			if err != nil {
				return err
			}
			defer up[i].Release()
		}
		return c.set(ctx, b, n, up[:]...)
	})
}

// read reads the tensors of a file, and returns its number of tokens.
func (c *States) read(r io.ReaderAt, size int64, l weights.List) (int, error) {
	f, err := weights.Open(r, size, "")
	if err != nil {
		return 0, err
	}
	var names []string
	for _, x := range l {
		names = append(names, x.Name)
	}
	if others := f.List("", names...); others != "none" {
		return 0, fmt.Errorf("the file has %s too, it is not one of such a cache", others)
	}
	if err := f.Load(l); err != nil {
		return 0, err
	}
	meta, err := l[0].T.Float32s()
	if err != nil {
		return 0, err
	}
	heads, dim, n := float32(c.config.KVHeads), float32(c.config.Dim), float64(meta[2])*65536+float64(meta[3])
	if meta[0] != heads || meta[1] != dim || !(n >= 0 && n <= maxLength && n == float64(int(n))) {
		return 0, fmt.Errorf("meta is %v, it must be %v, %v, and a number of tokens up to %d", meta, heads, dim, maxLength)
	}
	return int(n), nil
}
