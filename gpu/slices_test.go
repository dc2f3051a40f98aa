package gpu

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestValuesInSlices computes heads of 576 with values of 512 columns, as absorbed latent attention has them, over
// adjacent keys and keys in pages, decoded and not. The plan reports the slices, pages change no bit, and slices have
// the bits of calls for some of the columns. Q8 and Q4 values cannot be sliced.
func TestValuesInSlices(t *testing.T) {
	b := open(t, Options{})
	const heads, sk, d, dv, page = 3, 100, 576, 512, 16
	const pages = (sk + page - 1) / page
	at := func(key, i, width int) float32 { return wave(key*width+i) / 8 }
	side := func(width int) (all, pool backend.Tensor) {
		all = host(t, backend.Shape{1, 1, sk, width}, func(i int) float32 { return at(i/width, i%width, width) })
		pool = host(t, backend.Shape{pages, 1, page, width}, func(i int) float32 {
			return at((pages-1-i/width/page)*page+i/width%page, i%width, width) // the last page first
		})
		return upload(t, b, all), upload(t, b, pool)
	}
	k, kPool := side(d)
	v, vPool := side(dv)
	table := make([]int32, pages)
	for i := range table {
		table[i] = int32(pages - 1 - i)
	}
	for _, sq := range []int{2, 20} {
		q := input(t, b, backend.Shape{1, heads, sq, d})
		run := func(k, v backend.Tensor, p *backend.Pages) (o, lse []float32) {
			n := v.Shape()[backend.Dim]
			c := callOf(t, b, q, k, v)
			c.Pages, c.Scale = p, 0.05
			plan := must.Get(b.Plan(t.Context(), c))(t)
			if strings.Contains(plan.Why, "512 columns of v in 2 slices") != (n == dv) {
				t.Errorf("%d columns: the plan says %s", n, plan.Why)
			}
			check(t, b.Attention(context.Background(), c))
			return floats(t, b, c.O), floats(t, b, c.LSE)
		}
		o, lse := run(k, v, nil)
		po, plse := run(kPool, vPool, &backend.Pages{Table: [][]int32{table}, Keys: sk})
		sameRow(t, fmt.Sprintf("%d rows in pages", sq), po, o)
		sameRow(t, fmt.Sprintf("%d rows in pages, lse", sq), plse, lse)
		some := must.Get(v.Slice(backend.Dim, 256, dv))(t)
		so, slse := run(k, some, nil)
		sameRow(t, "lse of a slice", slse, lse)
		for row := range heads * sq {
			sameRow(t, fmt.Sprintf("%d rows, row %d of a slice", sq, row), so[row*(dv-256):][:dv-256], o[row*dv+256:][:dv-256])
		}
	}
	for _, kv := range []backend.DType{backend.Q8, backend.Q4, backend.F8} {
		c := callOf(t, b, input(t, b, backend.Shape{1, heads, 1, d}), alloc(t, b, kv, backend.Shape{1, 1, sk, d}), alloc(t, b, kv, backend.Shape{1, 1, sk, dv}))
		must.Fail(t, fmt.Sprintf("%v", kv), b.Attention(context.Background(), c), backend.ErrUnsupported, "v of "+kv.String()+" has head size 512")
	}
}
