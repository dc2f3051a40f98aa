package gpu

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestIndexCuts chooses keys in calls that are cut, also into blocks of keys.
func TestIndexCuts(t *testing.T) {
	const batch, heads, seq, keys, dim, top = 2, 12, 30, 1500, 8, 200
	most := 0
	sameOn(t, "chosen keys", someLowered(0), func(b *Backend, w way) [][]float32 {
		c := &backend.Index{TopK: top, Visible: backend.Visibility{Left: backend.Unbounded, Offset: keys - seq, KLen: []int{keys, 700}},
			Q: tensor(t, b, backend.F16, backend.Shape{batch, heads, seq, dim}, wave),
			K: tensor(t, b, backend.F32, backend.Shape{batch, 1, keys, dim}, wave), W: tensor(t, b, backend.BF16, backend.Shape{batch, 1, seq, heads}, wave)}
		chosen := must.Get(b.Index(t.Context(), c))(t)
		defer chosen.Release()
		host := must.Get(backend.AllocHost(backend.I32, chosen.Shape()))(t)
		check(t, b.Download(t.Context(), host, chosen))
		var list []float32
		for _, key := range must.Get(host.Int32s())(t) {
			list = append(list, float32(key))
		}
		x := indexing{b: b, c: c}
		check(t, x.alloc(t.Context()))
		for _, t := range append(x.best[:], x.products, x.out) {
			t.Release()
		}
		blocks := ceil(keys, x.n)
		if w.name == "" && blocks != 1 {
			t.Errorf("a whole call has %d blocks", blocks)
		}
		most = max(most, blocks)
		return [][]float32{list}
	})
	if most < 3 {
		t.Errorf("at most %d blocks", most)
	}
	b := open(t, Options{})
	must.Fail(t, "too many keys", must.Err(b.Index(t.Context(), &backend.Index{TopK: maxTop + 1})), backend.ErrUnsupported, "GPUs choose up to")
}
