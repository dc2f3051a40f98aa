package gpu

import (
	"context"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// paths opens a backend for each kernel of fused attention.
func paths(t *testing.T, f func(t *testing.T, b *Backend)) {
	for _, p := range []struct {
		name   string
		opt    Options
		choose chooser
	}{
		{"plain", Options{decodeRows: -1}, plainOnly},
		{"flash", Options{decodeRows: -1}, nil},
		{"decode", Options{decodeRows: everyRow}, nil},
	} {
		t.Run(p.name, func(t *testing.T) {
			b := open(t, p.opt)
			defer b.Close()
			if p.choose != nil {
				b.choose = p.choose
			}
			f(t, b)
		})
	}
}

// attend returns the output and log-sum-exp of q over what c has.
func attend(t testing.TB, b *Backend, c backend.Call) (o, lse []float32) {
	t.Helper()
	d := c.Dims()
	c.O = alloc(t, b, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim})
	c.LSE = alloc(t, b, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1})
	if err := b.Attention(context.Background(), &c); err != nil {
		t.Fatal(err)
	}
	return floats(t, b, c.O), floats(t, b, c.LSE)
}

// copied returns x in another type, converted on the device.
func copied(t testing.TB, b *Backend, dtype backend.DType, x backend.Tensor) backend.Tensor {
	t.Helper()
	y := alloc(t, b, dtype, x.Shape())
	if err := b.Copy(context.Background(), y, x); err != nil {
		t.Fatal(err)
	}
	return y
}

// TestKeysOfAnotherType attends to keys and values of another type than the queries',
// and to the same numbers in that of the queries: the same bits.
func TestKeysOfAnotherType(t *testing.T) {
	paths(t, func(t *testing.T, b *Backend) {
		for _, x := range []struct {
			q, kv backend.DType
			d, dv int
		}{
			{backend.F32, backend.F16, 64, 64},
			{backend.F32, backend.BF16, 31, 18}, // no row begins at a word of its own
		} {
			const heads, sq, sk = 4, 5, 70
			q := half(t, b, x.q, backend.Shape{2, heads, sq, x.d}, wave)
			k := half(t, b, x.kv, backend.Shape{2, 2, sk, x.d}, func(i int) float32 { return wave(i + 5) })
			v := half(t, b, x.kv, backend.Shape{2, 2, sk, x.dv}, func(i int) float32 { return wave(i + 9) })
			p := backend.Problem{Scale: 0.3, Visible: backend.Visibility{Offset: sk - sq, Left: backend.Unbounded, KLen: []int{sk, 33}}}
			o, lse := attend(t, b, backend.Call{Q: q, K: k, V: v, Problem: p})
			wantO, wantLSE := attend(t, b, backend.Call{Q: q, K: copied(t, b, x.q, k), V: copied(t, b, x.q, v), Problem: p})
			name := x.q.String() + " to " + x.kv.String()
			sameRow(t, name+": o", o, wantO)
			sameRow(t, name+": lse", lse, wantLSE)
		}
	})
}
