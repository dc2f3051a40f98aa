package join

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestUnits joins sequences of a packed batch, whose calls change one by one.
func TestUnits(t *testing.T) {
	equal, unequal := []int{20, 20, 20}, []int{20, 31, 20}
	for _, x := range []struct {
		name   string
		rows   []int
		change func(i int, c *backend.Call)
		units  int
		packed bool
	}{
		{"equal", equal, nil, 1, false},
		{"unequal", unequal, nil, 1, true},
		{"few rows", []int{3, 3, 3}, nil, 1, false},
		{"few rows at unequal distances", []int{3, 1, 3, 3}, nil, 1, true},
		{"few rows at unequal distances on a path with other bits", []int{3, 1, 3, 3}, func(i int, c *backend.Call) { c.LowPrecision = true }, 4, false},
		{"few rows and prompts", []int{3, 3, 20, 25}, nil, 1, true},
		{"few rows and prompts on a path with other bits", []int{3, 3, 20, 25}, func(i int, c *backend.Call) { c.LowPrecision = true }, 2, true},
		{"few rows, some with many keys, and prompts", []int{3, 3, 3, 20, 25}, func(i int, c *backend.Call) {
			if c.K, c.V = c.Q, c.Q; i == 1 {
				for _, x := range []*backend.Tensor{&c.K, &c.V} {
					*x = must.Get(x.View(backend.Shape{1, 4, 300, 8}, x.Strides(), 0))(t)
				}
			}
		}, 2, true},
		{"a long prompt among short ones", []int{20, 25, 20, 25, 700, 20, 25, 20, 25}, nil, 2, true},
		{"equal rows, keys that do not count", equal, func(i int, c *backend.Call) { c.Visible.KLen = []int{9 + i} }, 1, false},
		{"places of their own", equal, func(i int, c *backend.Call) { c.Visible.Offset = i * i }, 1, false},
		{"another window", equal, func(i int, c *backend.Call) { c.Visible.Left = 5 + i/2 }, 2, false},
		{"another scale", equal, func(i int, c *backend.Call) { c.Scale = float32(1 + i/2) }, 2, false},
		{"slopes of each", equal, func(i int, c *backend.Call) { c.Slopes = make([]float32, 4) }, 3, false},
		{"dropout", equal, func(i int, c *backend.Call) { c.Dropout.P = 0.1 }, 3, false},
		{"a mask", equal, func(i int, c *backend.Call) {
			c.Mask = must.Get(backend.Meta(backend.Bool, backend.Shape{1, 1, 1, 20}))(t)
		}, 3, false},
		{"other outputs", equal, func(i int, c *backend.Call) { c.O = must.Get(c.O.View(c.O.Shape(), c.O.Strides(), 5*i*i))(t) }, 3, false},
		{"values elsewhere", unequal, func(i int, c *backend.Call) { c.V = must.Get(c.V.View(c.V.Shape(), c.V.Strides(), 8*min(i, 1)))(t) }, 3, false},
	} {
		total := 0
		for _, n := range x.rows {
			total += n
		}
		of := func(heads int) backend.Tensor {
			return must.Get(must.Get(backend.Meta(backend.F16, backend.Shape{1, total + 2, heads, 8}))(t).Swap(backend.Heads, backend.Seq))(t)
		}
		q, kv, o := of(4), of(2), of(4)
		var calls []*backend.Call
		at := 0
		for i, n := range x.rows {
			part := func(x backend.Tensor) backend.Tensor { return must.Get(x.Slice(backend.Seq, at, at+n))(t) }
			calls = append(calls, &backend.Call{Q: part(q), K: part(kv), V: part(kv), O: part(o), Problem: backend.Problem{Scale: 1, Visible: backend.Visibility{Left: backend.Unbounded, Offset: 3}}})
			if x.change != nil {
				x.change(i, calls[i])
			}
			at += n
		}
		units := Units(calls, func(c *backend.Call) bool { return c.Dims().SeqQ <= 4 }, func(c *backend.Call) bool { return !c.LowPrecision })
		joined, packed := 0, false
		for _, u := range units {
			joined, packed = joined+len(u.Calls), packed || u.Packed != nil
			for i, c := range u.Calls {
				v, d := u.Call.Visible, u.Call.Dims()
				if d.Batch != len(u.Calls) || d.SeqQ < c.Dims().SeqQ || v.OffsetOf(i) != c.Visible.OffsetOf(0) {
					t.Errorf("%s: call %d is a batch of %+v, %+v", x.name, i, d, v)
				}
				if n := c.Dims().SeqK; d.Batch > 1 && (c.Visible.KLen == nil && v.KLen[i] != n || c.Visible.KLen != nil && v.KLen[i] != c.Visible.KLen[0]) {
					t.Errorf("%s: call %d has %d keys, should have %d or %v", x.name, i, v.KLen[i], n, c.Visible.KLen)
				}
			}
		}
		if len(units) != x.units || joined != len(calls) || packed != x.packed {
			t.Errorf("%s: %d units with %d calls, packed %t, should be %d, %d, %t", x.name, len(units), joined, packed, x.units, len(calls), x.packed)
		}
	}
}
