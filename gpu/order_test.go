package gpu

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

// orderOf returns the query blocks in the order in which flash.wgsl computes those of a
// head: it runs the kernel's block_of alone. Blocks have 128 rows, or 64.
func orderOf(t *testing.T, b *Backend, blocks, rows, row0, keys int, v backend.Visibility) []uint32 {
	t.Helper()
	text, _ := shaders.Text(shaders.Flash{})
	f := regexp.MustCompile(`(?m)^fn block_of\((?s:.*?)^}\n`).FindString(text)
	source := fmt.Sprintf("const TY: u32 = 16u;\nconst ROWS: u32 = %du;\n", rows/16) +
		"@binding var<storage, read_write> o: array<u32>;\n@binding var<uniform> p: AttentionParams;\n" + f +
		"@compute @workgroup_size(64)\nfn main(@builtin(global_invocation_id) i: vec3<u32>) {\n" +
		"    if (i.x < p.blocks) {\n        o[i.x] = block_of(i.x);\n    }\n}\n"
	k := shaders.Custom{Title: "order", WGSL: source}
	o := alloc(t, b, backend.F32, backend.Shape{1, 1, 1, blocks})
	lo, hi := cut.Bounds(v)
	p := &shaders.AttentionParams{Blocks: blocks, Row0: row0, AllKeys: keys, Lo: lo, Hi: hi}
	to := cut.Writes("o", o, cut.PairAxes)
	align := b.dev.NewCutter(cut.Col, cut.Tile, to).Align
	window := to.View(cut.Space(1, 1, 1, blocks, 1), align).Window
	r := b.dev.NewRunner(t.Context())
	err := r.Dispatch(k, []cut.Window{window}, p, ceil(blocks, 64))
	if err == nil {
		err = r.Flush()
	}
	r.Finish(err)
	check(t, err)
	host := make([]byte, 4*blocks)
	check(t, b.dev.Download(t.Context(), host, o.Strides(), o))
	order := make([]uint32, blocks)
	for i := range order {
		order[i] = binary.LittleEndian.Uint32(host[4*i:])
	}
	return order
}

// TestHeavyBlocksFirst checks that each head computes every block once, those with many visible keys first, so that
// the last ones, while which other processors of a GPU are idle, are short.
func TestHeavyBlocksFirst(t *testing.T) {
	b := open(t, Options{})
	causal := backend.Visibility{Left: backend.Unbounded}
	for _, c := range []struct {
		name          string
		blocks, rows  int // and the rows of each
		row0, allKeys int
		visible       backend.Visibility
	}{
		{"causal, D=64", 64, 128, 0, 8192, causal},
		{"causal, D=128", 128, 64, 0, 8192, causal},
		{"causal, D=64, more heads", 32, 128, 0, 4096, causal},
		{"causal, D=128, more heads", 32, 64, 0, 2048, causal},
		{"causal, the second half of the rows", 64, 128, 8192, 16384, causal},
		{"causal, the last rows of a cache", 33, 128, 0, 1 << 20, backend.Visibility{Offset: 1<<20 - 33*128, Left: backend.Unbounded}},
		{"a window to the left", 64, 128, 0, 8192, backend.Visibility{Left: 2048}},
		{"a window to both sides", 64, 128, 0, 8192, backend.Visibility{Left: 2048, Right: 2048}},
		{"a window to the right", 64, 128, 0, 8192, backend.Visibility{Right: backend.Unbounded}},
		{"a window that ends before the rows", 64, 128, 0, 4096, backend.Visibility{Left: 1000, Right: 500}},
		{"everything", 64, 128, 0, 8192, backend.Everything()},
		{"one block", 1, 128, 0, 100, causal},
		{"two blocks", 2, 128, 0, 200, causal},
	} {
		order := orderOf(t, b, c.blocks, c.rows, c.row0, c.allKeys, c.visible)
		lo, hi := cut.Bounds(c.visible)
		done := make([]bool, c.blocks)
		least := 1 << 40
		for _, n := range order {
			if int(n) >= c.blocks || done[n] {
				t.Fatalf("%s: block %d of %d twice or not at all: %v", c.name, n, c.blocks, order)
			}
			done[n] = true
			first := c.row0 + int(n)*c.rows
			seen := max(min(first+c.rows-1+hi, c.allKeys)-max(first+lo, 0), 0)
			// The middle of the rows that see the most is not that of a block.
			if seen > least+c.rows {
				t.Errorf("%s: block %d sees %d keys, one before it %d", c.name, n, seen, least)
			}
			least = min(least, seen)
		}
	}
}
