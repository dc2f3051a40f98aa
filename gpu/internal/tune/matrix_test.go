package tune

import (
	"fmt"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// TestMatrices: the kernel takes the largest product that the device lists, and fits its limits. Rows
// and heads change only how many subgroups share keys.
func TestMatrices(t *testing.T) {
	nvidia, intel, mesa := [][3]uint32{{16, 8, 16}, {16, 16, 16}, {16, 8, 8}}, [][3]uint32{{8, 16, 16}}, [][3]uint32{{8, 8, 8}}
	for _, c := range []struct {
		name          string
		of            backend.DType
		sizes         [][3]uint32
		lanes         uint32
		memory        int
		dim, dv, rows int
		software      bool
		want, whyNot  string // MxNxK, subgroups x keys, depth and columns
		few           string // subgroups x keys of decoding
	}{
		{"16 keys for small heads", backend.F16, nvidia, 32, 48 << 10, 64, 64, 4096, false, "16x16x16, 8x16, 64 64", "", "1x32"},
		{"32 for others", backend.F16, nvidia, 32, 48 << 10, 128, 128, 4096, false, "16x16x16, 8x32, 128 128", "", "1x16"},
		{"few keys for large heads", backend.F16, nvidia, 32, 48 << 10, 256, 256, 4096, false, "16x16x16, 8x16, 256 256", "", ""},
		{"16 KiB", backend.F16, nvidia, 32, 16 << 10, 64, 64, 4096, false, "16x16x16, 4x16, 64 64", "", "1x32"},
		{"odd heads are padded", backend.F16, nvidia, 32, 48 << 10, 33, 31, 4096, false, "16x16x16, 8x16, 48 32", "", "1x32"},
		{"few rows", backend.F16, nvidia, 32, 48 << 10, 128, 128, 20, false, "16x16x16, 1x32, 128 128", "", "1x16"},
		{"eight rows a matrix", backend.F16, intel, 16, 32 << 10, 64, 80, 4096, false, "8x16x16, 8x32, 64 80", "", "1x16"},
		{"a software driver", backend.F16, mesa, 8, 32 << 10, 64, 64, 4096, true, "8x8x8, 16x8, 64 64", "", "1x8"},
		{"no matrices", backend.F16, nil, 32, 48 << 10, 64, 64, 4096, false, "", "lists no products", ""},
		{"subgroups of two sizes", backend.F16, nvidia, 0, 48 << 10, 64, 64, 4096, false, "", "8 to 32 lanes", ""},
		{"heads over 256", backend.F16, nvidia, 32, 48 << 10, 257, 64, 4096, false, "", "up to 256", ""},
		{"f32: 16 keys", backend.F32, nvidia, 32, 48 << 10, 128, 128, 4096, false, "16x16x16, 8x16, 128 128", "", ""},
		{"f32: heads over 128", backend.F32, nvidia, 32, 48 << 10, 64, 129, 4096, false, "", "up to 128 elements of f32", ""},
		{"no memory", backend.F16, nvidia, 32, 2 << 10, 128, 128, 4096, false, "", "fit no workgroup", ""},
	} {
		f := port.Features{F16: true, SubgroupMin: c.lanes, SubgroupMax: c.lanes}
		if c.lanes == 0 {
			f.SubgroupMin, f.SubgroupMax = 8, 32
		}
		for _, x := range c.sizes {
			f.Matrices = append(f.Matrices, port.Matrix{M: x[0], N: x[1], K: x[2], Component: port.F16, Result: port.F32})
		}
		m := MatricesOf(f)
		s := Shape{ValueDim: c.dv, Heads: 16, SeqQ: c.rows, In: c.of, KV: c.of, Wide: true, Half: true, Software: c.software,
			Limits: Limits{Threads: 256, Memory: c.memory}}
		k, whyNot := m.Kernel(s, c.dim)
		if (whyNot == "") != (c.whyNot == "") || !strings.Contains(whyNot, c.whyNot) {
			t.Errorf("%s: %q, want %q", c.name, whyNot, c.whyNot)
			continue
		} else if whyNot != "" {
			continue
		}
		if got := fmt.Sprintf("%dx%dx%d, %dx%d, %d %d", k.M, k.N, k.K, k.TY, k.Keys, k.Depth, k.Columns); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if d := shaders.Describe(k); d.WorkgroupMemory > c.memory || d.Threads != k.TY*k.Lanes || d.Threads > 256 {
			t.Errorf("%s: %d bytes, %d threads", c.name, d.WorkgroupMemory, d.Threads)
		}
		if one, whyNot := m.Decode(s, c.dim); (whyNot == "") != (c.few != "") || c.few != "" && (fmt.Sprintf("%dx%d", one.TY, one.Keys) != c.few || one.Ahead && one.Keys*(one.Depth+one.Columns) > 128*one.Lanes || one.Split%max(one.Keys, 1) != 0 ||
			shaders.Describe(one).WorkgroupMemory > c.memory || one.M != k.M || one.Out16) {
			t.Errorf("%s: decoding takes %+v, %s", c.name, one, whyNot)
		}
		if full := c.dim == k.Depth && c.dv == k.Columns; k.Full != full || k.Ahead == c.software {
			t.Errorf("%s: %+v", c.name, k)
		}
	}
}
