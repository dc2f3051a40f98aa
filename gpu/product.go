package gpu

import (
	"context"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// QK computes s = q·kᵀ for each batch and head:
//
//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
func (b *Backend) QK(ctx context.Context, s, q, k backend.Tensor) error {
	return b.run(ctx, "qk", func() (*queue.Op, error) { return b.qk(s, q, k) })
}

func (b *Backend) qk(s, q, k backend.Tensor) (*queue.Op, error) {
	kt, err := k.Swap(backend.Seq, backend.Dim)
	if err != nil {
		return nil, err
	}
	return b.product(product{y: s, a: q, w: kt, names: [3]string{"s", "q", "k"}}), nil
}

// PV computes o = w·v for each batch and head; a weight of exactly 0 hides its value:
//
//	o [B, H, Sq, Dv]    w [B, H, Sq, Sk] F32    v [B, Hkv, Sk, Dv]
func (b *Backend) PV(ctx context.Context, o, w, v backend.Tensor) error {
	return b.run(ctx, "pv", func() (*queue.Op, error) {
		return b.product(product{y: o, a: w, w: v, skip: true, names: [3]string{"o", "w", "v"}}), nil
	})
}

// Project computes y = x·w + bias for each batch and head:
//
//	y [B, H, S, N]    x [B, H, S, M]    w [B, H, M, N]    bias [1, 1, 1, N] or none
func (b *Backend) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	return b.run(ctx, "project", func() (*queue.Op, error) {
		return b.product(product{y: y, a: x, w: w, bias: bias, names: [3]string{"y", "x", "w"}}), nil
	})
}

// product is y = a·w + bias: a [B, H, M, X], w [B, Hw, X, N], y [B, H, M, N].
type product struct {
	y, a, w, bias backend.Tensor
	skip          bool         // a term with a factor of 0 in a is 0
	names         [3]string    // of y, a and w in errors
	tile          *productTile // instead of the tile that chooseProduct returns
}

// product returns the operation of m.
func (b *Backend) product(m product) *queue.Op {
	ys, depth, group := m.y.Shape(), m.a.Shape()[backend.Dim], m.y.Shape()[backend.Heads]/m.w.Shape()[backend.Heads]
	y := cut.Writes(m.names[0], m.y, cut.PairAxes)
	a := cut.Reads(m.names[1], m.a, [4]int{cut.Batch, cut.Head, cut.Row, cut.Sum}, 1)
	w := cut.Reads(m.names[2], m.w, [4]int{cut.Batch, cut.Head, cut.Sum, cut.Col}, group)
	bias := cut.Reads("bias", m.bias, [4]int{cut.Whole, cut.Whole, cut.Whole, cut.Col}, 1)
	t := b.chooseProduct(b.tilesOf(&m), ys[0]*ys[1], ys[2], ys[3])
	if m.tile != nil {
		t = *m.tile
	}
	all := cut.Space(ys[0], ys[1], ys[2], ys[3], depth)
	whole := func(t backend.Tensor) cut.View { return cut.View{Base: t.Offset(), Strides: t.Strides()} }
	uncut := t.of(&m, whole(m.a), whole(m.w), whole(m.y), all)
	granule, loops := cut.Tile, cut.Tile/(4*productQD) // terms, and the loops of a thread for them
	if t.matrix.Depth > 0 {
		granule = int(shaders.Describe(t.matrix).Constants["FOLD"])
		loops = 1 + granule/t.matrix.Depth
	} else if t.kernel.Expand < shaders.Full { // with those of @unroll(deep)
		loops *= 1 + productQD + productLanes
	}
	c := b.dev.NewCutter(cut.Sum, granule, a, w, bias, y)
	c.AlignGranules()
	groups := func(x cut.Box) int {
		return x.Len(cut.Batch) * x.Len(cut.Head) * t.tiles(x.Len(cut.Row), x.Len(cut.Col))
	}
	c.State = func(x cut.Box) uint64 { return uint64(groups(x)) * uint64(4*t.height()*t.width()) }
	ops := 2 * float64(t.height()*t.width()) // for each term of the sums
	c.Most[cut.Sum] = cut.LongestChunk(granule, loops, ops*float64(granule), b.dev.ChunkWork(uncut))
	return &queue.Op{
		Cutter: c, Space: all,
		Step: func(p queue.Chunk) queue.Step {
			av, wv := a.View(p.Box, c.Align).Granules(), w.View(p.Box, c.Align).Granules()
			bv, yv := bias.View(p.Box, c.Align), y.View(p.Box, c.Align)
			return queue.Step{
				Kernel: t.of(&m, av, wv, yv, p.Box),
				Params: &shaders.MatmulParams{
					RowTiles: t.tiles(p.Len(cut.Row), 1), ColTiles: t.tiles(1, p.Len(cut.Col)), Heads: p.Len(cut.Head), Head0: p.Lo[cut.Head], Group: group,
					Rows: p.Len(cut.Row), Cols: p.Len(cut.Col), Depth: p.Len(cut.Sum), Flags: when(!p.First, shaders.GoOn) | when(!p.Last, shaders.Leave),
					BiasType: biasType(m.bias), OutType: int(m.y.DType()), A: strides(av), W: strides(wv), O: strides(yv),
					BiasBase: bv.Base, BiasStride: bv.Strides[backend.Dim],
				},
				Windows: []cut.Window{av.Window, wv.Window, bv.Window, yv.Window, p.State},
				Groups:  groups(p.Box), OpsPerGroup: ops * float64(p.Len(cut.Sum)),
			}
		},
	}
}

// productTile is one way to divide the results of a matrix product into tiles.
type productTile struct {
	name   string
	time   int                   // of a result, relative to other tiles, by the table in docs/results/README.md
	kernel shaders.Matmul        // without what depends on the operands
	matrix shaders.MatrixProduct // instead of kernel, unless it is zero
	// scalar loads elements one at a time even where four are adjacent.
	scalar bool
}

// A thread has 8x8 results in tiles L, 4x8 in tiles M, and 4x4 in tiles S, for small grids.
var (
	productL = productTile{name: "L", time: 20, kernel: shaders.Matmul{Expand: shaders.Full, TX: productLanes, TY: 16, Rows: 8, CV: 2, QD: productQD}}
	productM = productTile{name: "M", time: 22, kernel: shaders.Matmul{Expand: shaders.Full, TX: productLanes, TY: 8, Rows: 4, CV: 2, QD: productQD}}
	productS = productTile{name: "S", time: 27, kernel: shaders.Matmul{Expand: shaders.Full, TX: productLanes, TY: 8, Rows: 4, CV: 1, QD: productQD}}

	productTiles = []productTile{productL, productM, productS}
)

// Threads along columns, and vec4 along the summed axis that are staged at once. All
// tiles share them, so that all add the same zeros beyond the end.
const (
	productLanes = 8
	productQD    = 4
)

func (v productTile) height() int {
	return v.kernel.Rows*v.kernel.TY + v.matrix.SY*v.matrix.RM*v.matrix.M
}
func (v productTile) width() int {
	return 4*v.kernel.CV*productLanes + v.matrix.SX*v.matrix.CN*v.matrix.N
}
func (v productTile) threads() int {
	return v.kernel.TY*productLanes + v.matrix.SY*v.matrix.SX*v.matrix.Lanes
}

func (v productTile) variant() shaders.Variant {
	if v.matrix.Depth > 0 {
		return v.matrix
	}
	return v.kernel
}

// of returns the kernel for a box of a product. Whether the box is aligned depends on the cut. It
// changes loads and stores, but no bit, unless a device counts subnormal f16 as 0 where it converts them: matrix units
// get aligned ones as they are stored.
func (v productTile) of(m *product, a, w, y cut.View, x cut.Box) shaders.Variant {
	k, n, staged := &v.kernel, &v.matrix, max(4*v.kernel.QD, v.matrix.Depth)
	k.A, k.W, k.Skip = shaders.Type(m.a.DType()), shaders.Type(m.w.DType()), m.skip
	k.Along = m.w.Strides()[backend.Seq] < m.w.Strides()[backend.Dim]
	if !v.scalar {
		if k.WVec = w.AlignedAlong(backend.Dim, x.Len(cut.Col)); k.Along {
			k.WVec = w.AlignedAlong(backend.Seq, x.Len(cut.Sum))
		}
		k.AVec = a.AlignedAlong(backend.Dim, x.Len(cut.Sum))
		k.OVec = m.y.DType() == backend.F32 && y.AlignedAlong(backend.Dim, x.Len(cut.Col))
		k.Full = k.AVec && k.WVec && x.Len(cut.Sum)%staged == 0
	}
	n.AVec, n.WVec, n.OVec, n.Full, n.Along = k.AVec, k.WVec, k.OVec, k.Full, k.Along
	return v.variant()
}

// tiles returns the number of tiles that cover m rows and n columns.
func (v productTile) tiles(m, n int) int { return ceil(m, v.height()) * ceil(n, v.width()) }

// cost is the time that a large GPU takes for these tiles, relative to other tiles.
func (v productTile) cost(m, n int) int { return v.tiles(m, n) * v.height() * v.width() * v.time }

// fits reports whether the limits allow the tile's threads and memory, and the state of a workgroup in one binding.
func (v productTile) fits(l gputypes.Limits) bool {
	return v.threads() <= int(l.MaxComputeInvocationsPerWorkgroup) &&
		shaders.Describe(v.variant()).WorkgroupMemory <= int(l.MaxComputeWorkgroupStorageSize) &&
		uint64(4*v.height()*v.width()) <= queue.MaxWindow(l)
}

// tilesOf returns the tiles for m, the last of which always fits. Products of f16 run on matrix units where the device has
// some, whatever their lengths: on those depend the tiles, and no bit.
func (b *Backend) tilesOf(m *product) []productTile {
	x, whyNot := b.matrices.Largest()
	if whyNot != "" || m.skip || m.a.DType() != backend.F16 || m.w.DType() != backend.F16 {
		return productTiles
	}
	k := shaders.MatrixProduct{M: x.M, N: x.N, K: x.K, Lanes: x.Lanes, SY: 2, SX: 2, RM: max(32/x.M, 1), CN: max(32/x.N, 1), Depth: max(32, x.K)}
	if b.info.Type == backend.CPU { // whose compilers take a second for a product of matrices
		k.RM, k.CN, k.Depth = 1, 1, x.K
	}
	few := k // rows
	few.SY, few.RM = 1, 1
	var tiles []productTile
	for _, t := range []productTile{{name: "matrices", time: 20, matrix: k}, {name: "matrices of few rows", time: 27, matrix: few}} {
		if t.whole() && t.fits(b.dev.Limits) {
			tiles = append(tiles, t)
		}
	}
	if tiles == nil {
		return productTiles
	}
	return tiles
}

// whole reports whether the threads of a tile on matrix units share its elements evenly.
func (v productTile) whole() bool {
	c := shaders.Describe(v.matrix).Constants
	return c["FOLD"]%c["DEPTH"] == 0 && c["AN"]*c["THREADS"] == c["SY"]*c["ROWS"]*c["QD"] && c["WN"]*c["THREADS"] == c["CQ"]*c["DEPTH"] &&
		c["FN"]*c["LANES"] == c["M"]*c["COLS"]
}

// chooseProduct returns the fastest of the tiles for so many products of m rows and n columns that
// has as many threads as keep a large GPU busy, or the last.
func (b *Backend) chooseProduct(tiles []productTile, products, m, n int) productTile {
	v := tiles[len(tiles)-1]
	for _, t := range tiles {
		busy := products*t.tiles(m, n)*t.threads() >= tune.Busy*productL.threads()
		if busy && t.fits(b.dev.Limits) && t.cost(m, n) < v.cost(m, n) {
			v = t
		}
	}
	if b.info.Type == backend.CPU { // compiles in a third of the time, and half as often
		v.kernel.Expand, v.scalar = shaders.Registers, true
	}
	return v
}
