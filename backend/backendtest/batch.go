package backendtest

import (
	"context"
	"errors"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// testBatch runs calls of many shapes and options together; each has the bits of a call alone.
// Their outputs are interleaved rows of one tensor.
func testBatch(t *testing.T, dev *kernels.Device) {
	needsAll(t, dev, "softcap")
	b := dev.Backend()
	const heads, seq, dim = 4, 400, 16
	shape := backend.Shape{1, heads, seq, dim}
	base := Case{Dims: dims(1, heads, 2, seq, seq, dim, dim), Seed: 5}.build()
	on := base.on(t, dev)
	defer on.release()
	fresh := func() (o, lse backend.Tensor) {
		return up(t, dev, make([]float32, shape.Elements()), shape), up(t, dev, make([]float32, heads*seq), backend.Shape{1, heads, seq, 1})
	}
	alone, aloneLSE := fresh()
	together, togetherLSE := fresh()
	// Long and short, with few rows and many, with one key and none.
	calls := func(o, lse backend.Tensor) (calls []*backend.Call) {
		at := 0
		for n, rows := range []int{1, 130, 3, 70, 2, 64, 1, 33, 90, 6} {
			keys := [][2]int{{0, 400}, {0, 130}, {399, 400}, {30, 100}, {7, 350}, {0, 64}, {12, 13}, {100, 400}, {0, 400}, {50, 90}}[n]
			part := func(x backend.Tensor, lo, hi int) backend.Tensor {
				x = must(x.Slice(backend.Seq, lo, hi))(t)
				return x
			}
			c := &backend.Call{Q: part(on.q.view, at, at+rows), K: part(on.k.view, keys[0], keys[1]), V: part(on.v.view, keys[0], keys[1]),
				O: part(o, at, at+rows), LSE: part(lse, at, at+rows), Problem: backend.Problem{Scale: 0.25, Visible: backend.Everything()}}
			switch n {
			case 1:
				c.Visible.Right = 0
			case 3:
				c.Softcap = 5
			case 5:
				c.Visible.KLen = []int{0}
			case 8:
				c.Visible.Left, c.Visible.Offset = 40, 250
			}
			calls = append(calls, c)
			at += rows
		}
		return calls
	}
	for _, c := range calls(alone, aloneLSE) {
		noError(t, b.Attention(t.Context(), c))
	}
	all := calls(together, togetherLSE)
	for range 3 {
		noError(t, b.Attention(t.Context(), all...))
		sameBits(t, answer{o: read(t, dev, alone), lse: read(t, dev, aloneLSE)}, answer{o: read(t, dev, together), lse: read(t, dev, togetherLSE)})
	}
	if err := b.Attention(t.Context()); err != nil {
		t.Errorf("no calls: %v", err)
	}
	dead, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Attention(dead, all...); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: error is %v, should be %v", err, context.Canceled)
	}
	gone := *all[3]
	gone.Q = up(t, dev, make([]float32, shape.Elements()), shape)
	gone.Q.Release()
	if err := b.Attention(t.Context(), all[0], &gone, all[1]); !errors.Is(err, backend.ErrReleased) {
		t.Errorf("one with a released operand: error is %v, should be %v", err, backend.ErrReleased)
	}
}
