package gpu

import (
	"encoding/binary"
	"fmt"
	"math"
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

// TestHeavyBlocksFirst checks that each head computes every block once, those with many
// visible keys first, and that causal calls then keep a GPU busy to the end.
func TestHeavyBlocksFirst(t *testing.T) {
	b := open(t, Options{})
	causal := backend.Visibility{Left: backend.Unbounded}
	for _, c := range []struct {
		name          string
		heads, blocks int
		rows, keys    int // rows and keys of a tile
		row0, allKeys int
		visible       backend.Visibility
		busy          float64 // at least, of a device
	}{
		{"causal, D=64", 16, 64, 128, 64, 0, 8192, causal, 0.95},
		{"causal, D=128", 16, 128, 64, 128, 0, 8192, causal, 0.95},
		{"causal, D=64, more heads", 32, 32, 128, 64, 0, 4096, causal, 0.95},
		{"causal, D=128, more heads", 32, 32, 64, 128, 0, 2048, causal, 0.95},
		{"causal, the second half of the rows", 16, 64, 128, 64, 8192, 16384, causal, 0.95},
		{"causal, the last rows of a cache", 16, 33, 128, 64, 0, 1 << 20, backend.Visibility{Offset: 1<<20 - 33*128, Left: backend.Unbounded}, 0},
		{"a window to the left", 16, 64, 128, 64, 0, 8192, backend.Visibility{Left: 2048}, 0.9},
		{"a window to both sides", 16, 64, 128, 64, 0, 8192, backend.Visibility{Left: 2048, Right: 2048}, 0.9},
		{"a window to the right", 16, 64, 128, 64, 0, 8192, backend.Visibility{Right: backend.Unbounded}, 0.95},
		{"a window that ends before the rows", 16, 64, 128, 64, 0, 4096, backend.Visibility{Left: 1000, Right: 500}, 0.9},
		{"everything", 16, 64, 128, 64, 0, 8192, backend.Everything(), 0.9},
		{"one block", 1, 1, 128, 64, 0, 100, causal, 0},
		{"two blocks", 1, 2, 128, 64, 0, 200, causal, 0},
	} {
		order := orderOf(t, b, c.blocks, c.rows, c.row0, c.allKeys, c.visible)
		lo, hi := cut.Bounds(c.visible)
		done := make([]bool, c.blocks)
		var tiles []float64 // of each workgroup
		before := 1 << 40
		for _, n := range order {
			if int(n) >= c.blocks || done[n] {
				t.Fatalf("%s: block %d of %d twice or not at all: %v", c.name, n, c.blocks, order)
			}
			done[n] = true
			first := c.row0 + int(n)*c.rows
			from, to := max(first+lo, 0), min(first+c.rows-1+hi, c.allKeys)
			seen := max(to-from, 0)
			// The middle of the rows that see the most is not that of a block.
			if seen > before+c.rows {
				t.Errorf("%s: block %d sees %d keys, the block before it %d", c.name, n, seen, before)
			}
			before = seen
			work := 0.0
			if seen > 0 {
				work = float64(ceil(to, c.keys) - from/c.keys)
			}
			for range c.heads {
				tiles = append(tiles, work)
			}
		}
		for _, alone := range []float64{0.5, 0.7} {
			if share := busy(tiles, alone); share < c.busy {
				t.Errorf("%s: %.2f of a device is busy, should be %.2f", c.name, share, c.busy)
			}
		}
	}
}

// busy models a device of 132 processors that run two workgroups each and returns the share
// of its time that workgroups use. One that is alone on a processor runs at a share of
// the processor's rate.
func busy(work []float64, alone float64) float64 {
	const processors = 132
	sum, now := 0.0, 0.0
	for _, w := range work {
		sum += w
	}
	var left [processors][]float64
	next := func(i int) {
		if len(work) > 0 {
			left[i], work = append(left[i], work[0]), work[1:]
		}
	}
	for range 2 {
		for i := range left {
			next(i)
		}
	}
	for {
		step := math.Inf(1)
		rates := [3]float64{1, alone, 0.5}
		for _, l := range left {
			for _, w := range l {
				step = min(step, w/rates[len(l)])
			}
		}
		if math.IsInf(step, 1) {
			return sum / (now * processors)
		}
		now += step
		for i, l := range left {
			rate, kept := rates[len(l)], l[:0]
			for _, w := range l {
				if w -= step * rate; w > 1e-9 {
					kept = append(kept, w)
				}
			}
			free := len(l) - len(kept)
			left[i] = kept
			for range free {
				next(i)
			}
		}
	}
}
