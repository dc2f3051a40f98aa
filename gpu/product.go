package gpu

import (
	"sync"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// productTile is one way to cut the results of a matrix product into tiles.
type productTile struct {
	name   string
	rows   int // a thread
	cv     int // vec4 of columns a thread
	ty     int // threads along rows
	expand uint32
	// scalar loads elements one by one even where four lie side by side.
	scalar bool
}

// In tiles of L a thread has 8x8 results; S has 4x4, for grids that would be small.
var (
	productL = productTile{name: "L", rows: 8, cv: 2, ty: 16, expand: shaders.Full}
	productS = productTile{name: "S", rows: 4, cv: 1, ty: 8, expand: shaders.Full}
)

// Threads along columns, and vec4 along the summed axis that are staged at once: the
// same in all tiles, so that what is added beyond the end (zeros) is, too.
const (
	productLanes = 8
	productQD    = 4
)

func (v productTile) height() int  { return v.rows * v.ty }
func (v productTile) width() int   { return 4 * v.cv * productLanes }
func (v productTile) threads() int { return v.ty * productLanes }

// tiles is how many of them cover m rows and n columns.
func (v productTile) tiles(m, n int) int {
	return (m + v.height() - 1) / v.height() * ((n + v.width() - 1) / v.width())
}

// together is how many rows of a thread are written at once: as many as fit where its
// rows of a are staged.
func (v productTile) together() int { return v.rows * productQD / productLanes }

// lengths are those of the rows of as_ and ws in matmul.wgsl, in vec4: odd.
func (v productTile) lengths() (sa, sb int) {
	return v.rows*productQD | 1, 4*productQD*v.cv | 1
}

// memory is the workgroup memory in bytes.
func (v productTile) memory() int {
	sa, sb := v.lengths()
	return 16*(v.ty*sa+productLanes*sb) + 4*v.threads()
}

// perWord returns how many multiply-adds a thread does for each word that it reads
// from workgroup memory. With skip it reads a word of zeros for each thread beside it
// and chunk.
func (v productTile) perWord(skip bool) float64 {
	columns, depth := 4*v.cv, 4*productQD
	read := (v.rows + columns) * depth
	if skip {
		read += productLanes
	}
	return float64(v.rows*columns*depth) / float64(read)
}

// loops bounds the rounds of loops that a thread makes for a chunk.
func (v productTile) loops() int {
	n := 1
	if v.expand < shaders.Full { // with the loops marked 'unroll deep'
		n += productQD + productLanes
	}
	if v.expand < shaders.Registers { // and with the others
		staged := v.rows*productQD/productLanes + 4*productQD*v.cv/v.ty
		n += 3*staged + productQD*(v.cv*5+v.rows*(1+v.cv))
	}
	return n
}

// fits reports whether a device has the threads and memory that the tile takes, with
// the state of a workgroup in one binding.
func (v productTile) fits(l gputypes.Limits) bool {
	return v.threads() <= int(l.MaxComputeInvocationsPerWorkgroup) &&
		v.memory() <= int(l.MaxComputeWorkgroupStorageSize) &&
		uint64(4*v.height()*v.width()) <= maxWindow(l)
}

// chooseProduct picks the tile for that many products of m rows and n columns: L when
// there are enough to keep a large GPU busy, and not twice as much of them lies beyond
// the edges as of S, which is at half the speed where reads bound it.
func (b *Backend) chooseProduct(products, m, n int) productTile {
	v := productS
	large := productL.tiles(m, n)
	padded := large * productL.height() * productL.width()
	if products*large >= tune.Busy && productL.fits(b.limits) && padded <= 2*productS.tiles(m, n)*productS.height()*productS.width() {
		v = productL
	}
	if b.info.Type == backend.CPU { // compiles in a third of the time, and half as often
		v.expand, v.scalar = shaders.Registers, true
	}
	return v
}

// productShape is what else the kernel of a product is made for.
type productShape struct {
	a, w         backend.DType
	aWide, wWide bool // four neighbours lie side by side, aligned
	along        bool // w's neighbours lie along the summed axis
	skip         bool
}

// kernel returns the tile's kernel for a shape.
func (v productTile) kernel(s productShape) variant {
	key := productKey{v, s}
	if k, ok := productKernels.Load(key); ok {
		return k.(variant)
	}
	sa, sb := v.lengths()
	k := shaders.Matmul
	k.WorkgroupMemory, k.Threads = v.memory(), v.threads()
	c := map[string]uint32{
		"EXPAND": v.expand, "A": uint32(s.a), "W": uint32(s.w),
		"AVEC": uint32(when(s.aWide && !v.scalar, 1)), "WVEC": uint32(when(s.wWide && !v.scalar, 1)),
		"ALONG": uint32(when(s.along, 1)), "SKIP": uint32(when(s.skip, 1)),
	}
	for name, n := range map[string]int{
		"TX": productLanes, "TY": v.ty, "THREADS": v.threads(), "ROWS": v.rows, "CV": v.cv, "QD": productQD,
		"ER": v.together(), "SA": sa, "SB": sb, "O4": v.rows * v.cv, "W4": 4 * v.cv,
		"AN": v.rows * productQD / productLanes, "WN": 4 * productQD * v.cv / v.ty,
	} {
		c[name] = uint32(n)
	}
	productKernels.Store(key, variant{k, c})
	return variant{k, c}
}

// productKernels are the kernels that calls asked for, by productKey: a call that is
// repeated makes none of its constants again.
var productKernels sync.Map

type productKey struct {
	productTile
	productShape
}
