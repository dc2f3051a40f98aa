package cut

import (
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestAlignedAlong checks which windows can be loaded in groups of four.
func TestAlignedAlong(t *testing.T) {
	for _, c := range []struct {
		what    string
		base    int
		strides backend.Strides
		axis, n int
		want    bool
	}{
		{"rows of 8", 4, backend.Strides{64, 32, 8, 1}, 3, 8, true},
		{"one of two axes broadcast", 0, backend.Strides{0, 0, 8, 1}, 3, 8, true},
		{"columns", 0, backend.Strides{64, 32, 1, 8}, 2, 4, true},
		{"another axis", 0, backend.Strides{64, 32, 8, 1}, 2, 4, false},
		{"from an odd element", 2, backend.Strides{64, 32, 8, 1}, 3, 8, false},
		{"odd rows", 0, backend.Strides{64, 32, 9, 1}, 3, 8, false},
		{"an odd rest", 0, backend.Strides{64, 32, 8, 1}, 3, 6, false},
		{"every second element", 0, backend.Strides{64, 32, 16, 2}, 3, 8, false},
	} {
		if got := (View{Base: c.base, Strides: c.strides}).AlignedAlong(c.axis, c.n); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// TestVisible compares the keys to which boxes are narrowed with the visibility rule.
func TestVisible(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		seqQ, seqK, tile := 1+rng.IntN(20), 1+rng.IntN(40), 1+rng.IntN(8)
		v := backend.Visibility{Offset: rng.IntN(60) - 30, Left: rng.IntN(30), Right: rng.IntN(30)}
		if rng.IntN(3) == 0 {
			v.Left = backend.Unbounded
		}
		if rng.IntN(3) == 0 {
			v.Right = backend.Unbounded
		}
		if rng.IntN(2) == 0 {
			v.KLen = []int{rng.IntN(seqK + 1), rng.IntN(seqK + 1)}
		}
		if rng.IntN(2) == 0 {
			v.Offsets = []int{rng.IntN(21) - 10, rng.IntN(21) - 10}
		}
		x := Space(2, 1, seqQ, seqK, 1)
		x.Lo[Row] = rng.IntN(seqQ)
		x.Lo[Batch] = rng.IntN(2)
		rows := x.VisibleRows(v, tile)
		got := x.Visible(v, tile)
		for b := x.Lo[Batch]; b < x.Hi[Batch]; b++ {
			for i := x.Lo[Row]; i < x.Hi[Row]; i++ {
				lo, hi := v.Range(b, i, seqK)
				if lo < hi && (i < rows.Lo[Row] || i >= rows.Hi[Row]) {
					t.Fatalf("%+v of %+v: row %d sees a key outside of [%d, %d)", v, x, i, rows.Lo[Row], rows.Hi[Row])
				}
				for j := lo; j < hi; j++ {
					if j < got.Lo[Col] || j >= got.Hi[Col] {
						t.Fatalf("%+v of %+v: row %d sees key %d outside of [%d, %d)", v, x, i, j, got.Lo[Col], got.Hi[Col])
					}
				}
			}
		}
		if n := got.Len(Col); n > 0 && (got.Lo[Col]%tile != 0 || got.Hi[Col]%tile != 0 && got.Hi[Col] != seqK) {
			t.Fatalf("[%d, %d) is not made of tiles of %d", got.Lo[Col], got.Hi[Col], tile)
		}
	}
}

// TestBoxesCoverTheSpace cuts a product of drawn shapes and strides: chunks contain each
// index once, and no window exceeds the limits.
func TestBoxesCoverTheSpace(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		b, h, m, n, x := 1+rng.IntN(3), 1+rng.IntN(3), 1+rng.IntN(90), 1+rng.IntN(90), 1+rng.IntN(90)
		tensor := func(shape backend.Shape) backend.Tensor {
			stored := shape
			stored[backend.Dim] += rng.IntN(5) // gaps between rows
			all := must.Get(backend.Meta(backend.F32, stored))(t)
			return must.Get(all.Slice(backend.Dim, 0, shape[backend.Dim]))(t)
		}
		ops := []*Operand{
			Reads("a", tensor(backend.Shape{b, h, m, x}), [4]int{Batch, Head, Row, Sum}, 1),
			Reads("w", tensor(backend.Shape{b, h, x, n}), [4]int{Batch, Head, Sum, Col}, 1),
			Writes("y", tensor(backend.Shape{b, h, m, n}), PairAxes),
		}
		l := Limits{Binding: 16 << 10, Buffer: 1 << 20, Align: 256}
		c := New(l, Memory{}, Sum, 8, ops...)
		c.Most[Sum] = 8 + rng.IntN(90)
		c.State = func(x Box) uint64 { return uint64(x.Len(Row) * x.Len(Col) * 4) }
		c.MaxState = 4 << 10
		all := Space(b, h, m, n, x)
		covered := make([]int, b*h*m*n*x)
		for _, c1 := range must.Get(c.Boxes(nil, all))(t) {
			box := c1.Box
			for lo := box.Lo[Sum]; lo < box.Hi[Sum]; lo += c1.Chunk {
				p, first, last := c.ChunkAt(box, lo, c1.Chunk)
				if first != (p.Lo[Sum] == box.Lo[Sum]) || last != (p.Hi[Sum] == box.Hi[Sum]) {
					t.Fatalf("chunk %+v of %+v: first %t, last %t", p, box, first, last)
				}
				for _, o := range ops {
					if v := o.View(p, c.Align); v.Size > l.Binding || v.Offset%l.Align != 0 {
						t.Fatalf("%s: window of %d bytes at %d", o.Name, v.Size, v.Offset)
					}
				}
				for i := p.Lo[Batch]; i < p.Hi[Batch]; i++ {
					for j := p.Lo[Head]; j < p.Hi[Head]; j++ {
						for k := p.Lo[Row]; k < p.Hi[Row]; k++ {
							for l := p.Lo[Col]; l < p.Hi[Col]; l++ {
								for s := p.Lo[Sum]; s < p.Hi[Sum]; s++ {
									covered[(((i*h+j)*m+k)*n+l)*x+s]++
								}
							}
						}
					}
				}
			}
		}
		for i, times := range covered {
			if times != 1 {
				t.Fatalf("index %d of %dx%dx%dx%dx%d is in %d chunks", i, b, h, m, n, x, times)
			}
		}
	}
}
