package gpu

import (
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestListsOnTheDevice compares a call whose lists are looked up with calls that download them, by their plans too: ascending
// lists give the same bits.
func TestListsOnTheDevice(t *testing.T) {
	sameOn(t, "lists", []way{
		{name: "eight storage buffers", opt: Options{Limits: gputypes.Limits{MaxStorageBuffersPerShaderStage: 8}}},
		{name: "keys in host memory", opt: Options{MemoryBytes: 540 << 10}},
	}, func(b *Backend, w way) [][]float32 {
		k, v := input(t, b, backend.Shape{2, 1, 4000, 16}), input(t, b, backend.Shape{2, 1, 4000, 16})
		c := callOf(t, b, input(t, b, backend.Shape{2, 40, 1, 16}), k, v)
		c.Visible.KLen, c.LSE = []int{4000, 7}, backend.Tensor{}
		c.Lists = upload(t, b, must.Get(backend.Host([]int32{2, 5, 3000, -1, -1, 0, 3, 6, 7, 3999}, backend.I32, backend.Shape{2, 1, 1, 5}))(t))
		if p := must.Get(b.Plan(t.Context(), c))(t); strings.Contains(p.Why, "downloaded") != (w.name != "") {
			t.Errorf("%s: %s", w.name, p.Why)
		}
		check(t, b.Attention(t.Context(), c))
		return [][]float32{floats(t, b, c.O)}
	})
}
