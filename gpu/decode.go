package gpu

import (
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

const (
	// decodeRows is the most query rows a key head that are decoded: those of two
	// workgroups for each split. The smallest tiles of the prefill kernel have 16 to 64
	// rows of one head; so few rows would leave most of a tile empty and the grid small.
	decodeRows    = 16
	decodeSums    = 4 // vec4 of a row's sums, see splitmerge.wgsl
	decodeBuffers = 6 // storage buffers of decode.wgsl
)

// decode is an attention call that runs as splits of the keys and a merge
// (Flash-Decoding, Dao 2023): K and V are read once for all query heads that share them.
type decode struct {
	*attention
	tiling tune.Tiling
	kernel shaders.Variant
	merge  shaders.Variant
	wide   bool    // K is read 16 bytes at a time
	seen   cut.Box // the keys that any row sees, in whole splits
	rows   int     // query rows of a workgroup
	width  int     // float32 of a row's state for a split
	// The products on matrix units, for plans, or why these do not take the call.
	onMatrix, noMatrix string
}

// newDecode returns c as a decode call, or the reason why it is none. Without matrix units both paths compute
// the same bits.
func (b *Backend) newDecode(c *backend.Call) (*decode, error) {
	d := c.Dims()
	group := d.Heads / d.KVHeads
	a, err := b.newAttention(c)
	if err != nil {
		return nil, err
	}
	x := &decode{attention: a, tiling: tune.TilingOf(d.Dim, d.ValueDim)}
	switch rows := group * d.SeqQ; { // three variants instead of eight
	case rows == 1:
		x.rows = 1
	case rows <= 4:
		x.rows = 4
	default:
		x.rows = 8
	}
	if err := a.newCutter(decodeBuffers); err != nil {
		return nil, err
	}
	if err := x.variants(); err != nil {
		return nil, err
	}
	if err := a.check(x.kernel); err != nil {
		return nil, err
	}
	x.width = x.tiling.Width + 4*decodeSums + 4
	x.merge = shaders.SplitMerge{Split: x.tiling.Split, TX: x.tiling.Lanes, Quads: x.tiling.Width / 4}
	x.cutter.Granule = x.tiling.Split
	x.cutter.AlignGranules()
	x.seen = a.all().Visible(c.Visible, x.tiling.Split)
	// The splits of a row are adjacent until they are merged. MaxState bounds a merge, too:
	// splitmerge.wgsl makes 16 iterations for 128 splits, whose state takes 26 KiB or more.
	splits := ceil(x.seen.Len(cut.Col), x.tiling.Split)
	rows := int(x.cutter.MaxState / uint64(4*x.width*max(splits, 1)))
	if rows == 0 {
		return nil, fmt.Errorf("the %d splits of a row take %d bytes of scratch, a binding holds %d: %w",
			splits, 4*x.width*splits, x.cutter.MaxState, backend.ErrUnsupported)
	}
	most := &x.cutter.Most
	most[cut.Row] = min(rows, d.SeqQ)
	most[cut.Head] = min(rows/most[cut.Row], d.Heads)
	most[cut.Batch] = min(rows/most[cut.Row]/most[cut.Head], d.Batch)
	a.options.limit(x.cutter)
	return x, x.cutter.Fits(x.seen)
}

// variants sets the kernel of a split, on matrix units where they take the call, with its rows and tiling.
func (x *decode) variants() error {
	kv, l := x.c.K.DType(), x.b.dev.Limits
	m, products, whyNot := x.matrixKernel(x.b.matrices.Decode)
	if x.noMatrix = whyNot; whyNot == "" && x.rows == 1 {
		x.noMatrix = "matrices need two query rows a key head"
	}
	if x.noMatrix == "" {
		x.kernel, x.rows, x.tiling, x.onMatrix = x.withOptions(m), m.TY*m.M, tune.Tiling{Width: m.Columns, Keys: m.Keys, Lanes: 1, Split: m.Split}, products
		return nil
	}
	el := cut.GranuleBytes / kv.Size()
	x.wide = !kv.Quantised() && cut.AlignedRows(x.c.K, el) && cut.AlignedRows(x.c.V, el)
	k, bad := x.tiling.Decode(shaders.Decode{
		In: shaders.Type(x.c.Q.DType()), KV: shaders.Type(kv), Paged: x.HasTable(), Listed: x.listed(), Wide: x.wide, Both: x.options.both, Low: x.c.WeightType() != backend.F32,
		Extra: x.options.flags&(shaders.HasSlopes|shaders.HasBlocks|shaders.HasDropout) != 0 || !x.c.Relative.IsZero(), Rows: x.rows,
	}, x.d.Dim, x.b.info.Type == backend.CPU, tune.Limits{Threads: int(l.MaxComputeInvocationsPerWorkgroup), Memory: int(l.MaxComputeWorkgroupStorageSize)})
	if bad != "" {
		return fmt.Errorf("decoding needs %s, %s has %d and %d: %w",
			bad, x.b.info.Name, l.MaxComputeInvocationsPerWorkgroup, l.MaxComputeWorkgroupStorageSize, backend.ErrUnsupported)
	}
	x.kernel, x.rows = x.options.modded(k, false), k.Rows
	return nil
}

func (x *decode) op() *queue.Op {
	return &queue.Op{Cutter: x.cutter, Space: x.seen, Sweep: x.sweep, Step: x.step, Table: x.table, Kernel: x.kernel}
}

// sweep narrows a box to the keys that any of its rows sees, in whole splits: chunks of
// splits, then one merge. The box may have no keys; then the merge writes zeros.
func (x *decode) sweep(box cut.Box, chunk int) queue.Sweep {
	n := x.tiling.Split
	seen := box.Visible(x.c.Visible, n)
	splits := ceil(seen.Len(cut.Col), n)
	return queue.Sweep{
		Box: seen, Chunk: max(chunk/n*n, n), Passes: 1, After: 1,
		State: uint64(max(rows(seen)*splits, 1)) * uint64(4*x.width),
	}
}

func (x *decode) step(p queue.Chunk) queue.Step {
	n, box, align := x.tiling.Split, p.Of.Box, x.cutter.Align
	splits := ceil(box.Len(cut.Col), n)
	group := x.K.Group
	kvHeads := (box.Hi[cut.Head]-1)/group + 1 - box.Lo[cut.Head]/group
	blocks := ceil(min(group, box.Len(cut.Head))*box.Len(cut.Row), x.rows)
	w := &shaders.AttentionParams{
		Blocks: blocks, Group: group, KVHeads: kvHeads, Parts: ceil(p.Len(cut.Col), n), Part0: (p.Lo[cut.Col] - box.Lo[cut.Col]) / n, Splits: splits,
		Dim: x.d.Dim, VDim: x.d.ValueDim, Flags: when(!x.c.LSE.IsZero(), shaders.WantLSE), OutType: int(x.c.O.DType()),
	}
	if p.Pass == p.Of.Passes { // the merge, after the splits of all chunks
		o, lse := x.O.View(box, align), x.LSE.View(box, align)
		x.options.params(w, p.Box, math.Log2E)
		w.O, w.LSE = strides(o), strides(lse)
		return queue.Step{
			Kernel: x.merge, Params: w, Windows: []cut.Window{p.State, o.Window, lse.Window},
			Groups: rows(box), OpsPerGroup: mergeOps * float64(x.width*max(splits, 1)),
		}
	}
	q, k, v := x.Q.View(p.Box, align).Granules(), x.K.View(p.Box, align).Granules(), x.V.View(p.Box, align).Granules()
	w.Q, w.K, w.V = strides(q), strides(k), strides(v)
	mask, bias, more := x.bind(w, p)
	return queue.Step{
		Kernel: x.kernel, Params: w, Windows: append([]cut.Window{q.Window, k.Window, v.Window, mask, bias, p.State}, more...),
		Groups: p.Len(cut.Batch) * kvHeads * w.Parts * blocks, OpsPerGroup: x.opsPerPair * float64(x.rows*n),
	}
}

func (x *decode) describe(p *backend.Plan, e queue.Extent) {
	load := "16 bytes a load of K"
	if x.c.K.DType().Quantised() {
		load = "4 integers a load"
	} else if !x.wide {
		load = "element by element, because rows are not aligned to 16 bytes"
	}
	rows, arithmetic := x.K.Group*x.d.SeqQ, "float32 arithmetic"
	p.Path = "split keys WGSL (decode)" + x.products()
	if x.onMatrix != "" {
		p.Path, load, arithmetic, p.Matrices = fmt.Sprintf("split keys (decode) on matrix units WGSL, products of %s, in splits of %d", x.onMatrix, x.tiling.Split), "for matrices in workgroup memory", "float32 sums", 1
	} else if x.products() != "" {
		arithmetic += " (" + x.noMatrix + ")"
	}
	p.Why = fmt.Sprintf("%d query rows a key head, up to %d are decoded: K and V are read once for %d rows, %s, and splits of the keys fill the device; %s storage, %s, %s; %s",
		rows, x.b.decodeRows, x.rows, load, x.storage(), arithmetic, x.b.exponentials, x.b.dev.Pacing(x.kernel))
	p.Cut = fmt.Sprintf("%d batches x %d kv heads x up to %d splits of %d keys x %d blocks of %d rows, key tiles of %d; %d merges",
		x.d.Batch, x.d.KVHeads, ceil(e.MaxBox, x.tiling.Split), x.tiling.Split, ceil(rows, x.rows), x.rows, x.tiling.Keys, e.Boxes)
}
