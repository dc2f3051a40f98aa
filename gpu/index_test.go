package gpu

import (
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestIndexCuts compares lists of calls that are cut, also into blocks of keys, with those of whole calls.
func TestIndexCuts(t *testing.T) {
	const batch, heads, seq, keys, dim, top = 2, 12, 30, 1500, 8, 200
	lists := func(opt Options) (list []int32, blocks int) {
		b := open(t, opt)
		defer b.Close() // before the next one is opened
		c := &backend.Index{TopK: top, Visible: backend.Visibility{Left: backend.Unbounded, Offset: keys - seq, KLen: []int{keys, 700}},
			Q: tensor(t, b, backend.F16, backend.Shape{batch, heads, seq, dim}, wave),
			K: tensor(t, b, backend.F32, backend.Shape{batch, 1, keys, dim}, wave), W: tensor(t, b, backend.BF16, backend.Shape{batch, 1, seq, heads}, wave)}
		chosen := must.Get(b.Index(t.Context(), c))(t)
		defer chosen.Release()
		host := must.Get(backend.AllocHost(backend.I32, chosen.Shape()))(t)
		check(t, b.Download(t.Context(), host, chosen))
		list = must.Get(host.Int32s())(t)
		x := indexing{b: b, c: c}
		check(t, x.alloc(t.Context()))
		for _, t := range append(x.best[:], x.products, x.out) {
			t.Release()
		}
		return list, (keys + x.n - 1) / x.n
	}
	want, blocks := lists(Options{})
	if blocks != 1 {
		t.Errorf("a whole call has %d blocks", blocks)
	}
	most := 0
	for _, l := range someLowered(0) {
		got, blocks := lists(l.opt)
		if !slices.Equal(got, want) {
			t.Errorf("%s: other keys in %d blocks", l.name, blocks)
		}
		most = max(most, blocks)
	}
	if most < 3 {
		t.Errorf("at most %d blocks", most)
	}
	b := open(t, Options{})
	must.Fail(t, "too many keys", must.Err(b.Index(t.Context(), &backend.Index{TopK: maxTop + 1})), backend.ErrUnsupported, "GPUs choose up to")
}
