package gpu

import (
	"slices"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestListsOnTheDevice compares a call whose lists are looked up with calls that download them, by their plans too: ascending
// lists give the same bits.
func TestListsOnTheDevice(t *testing.T) {
	var want []uint32
	for _, x := range []struct {
		what string
		opt  Options
		down bool
	}{
		{"looked up", Options{}, false},
		{"eight storage buffers", Options{Limits: gputypes.Limits{MaxStorageBuffersPerShaderStage: 8}}, true},
		{"keys in host memory", Options{MemoryBytes: 540 << 10}, true},
	} {
		b := open(t, x.opt)
		c := &backend.Call{
			Q: upload(t, b, host(t, backend.Shape{2, 40, 1, 16}, wave)), K: upload(t, b, host(t, backend.Shape{2, 1, 4000, 16}, wave)),
			V: upload(t, b, host(t, backend.Shape{2, 1, 4000, 16}, wave)), O: alloc(t, b, backend.F32, backend.Shape{2, 40, 1, 16}),
			Problem: backend.Problem{Scale: 0.3, Visible: backend.Everything()},
		}
		c.Visible.KLen = []int{4000, 7}
		c.Lists = upload(t, b, must.Get(backend.Host([]int32{2, 5, 3000, -1, -1, 0, 3, 6, 7, 3999}, backend.I32, backend.Shape{2, 1, 1, 5}))(t))
		if p := must.Get(b.Plan(t.Context(), c))(t); strings.Contains(p.Why, "downloaded") != x.down {
			t.Errorf("%s: %s", x.what, p.Why)
		}
		got := result(t, t.Context(), b, c)
		if want == nil {
			want = got
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: other bits", x.what)
		}
	}
}
