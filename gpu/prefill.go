package gpu

import (
	"errors"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/join"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// prefill is an attention call in which a workgroup computes a block of query rows of one head, one tile of keys after
// the other. The register-tiled kernel (flash.wgsl) runs it, or the plain one (attention.wgsl), which is the oracle of
// the other and the fallback where no tile fits the device, or the one on matrix units (matrix.wgsl).
type prefill struct {
	*attention
	kernel    shaders.Variant
	tiled     bool
	path, why string // for plans
	rows      int    // query rows of a workgroup
	keys      int    // of a tile
	split     int    // keys of a split, whose totals are state; 0 has no splits
	onMatrix  string // the products on matrix units, for plans, or ""
	noMatrix  string // why matrix units do not take the call
}

// prefillBuffers is the number of storage buffers of the kernels.
const prefillBuffers = 8

// chooser picks a variant for a shape and returns the reason. The zero Variant stands for the plain kernel.
type chooser func(tune.Shape) (v tune.Variant, why string)

// newPrefill returns c with the variant that choose picks.
func (b *Backend) newPrefill(c *backend.Call, choose chooser) (*prefill, error) {
	a, err := b.newAttention(c)
	if err != nil {
		return nil, err
	}
	return a.prefill(choose)
}

// prefill returns a with the variant that choose picks.
func (a *attention) prefill(choose chooser) (_ *prefill, err error) {
	x := &prefill{attention: a}
	whyNot, err := x.flash(choose)
	if err == nil && whyNot != "" {
		err = x.plain(whyNot)
	}
	if err != nil {
		return nil, err
	}
	return x, x.check(x.kernel)
}

// maxFlashState bounds the state of the register-tiled kernel's dispatches: enough for
// 200,000 rows of 128 columns, which keep any GPU busy.
const maxFlashState = 128 << 20

// flash sets x to the register-tiled kernel, or returns the reason why that kernel cannot run it. Too little memory for
// streaming is an error: memory must not change a result, and the plain kernel rounds differently.
func (x *prefill) flash(choose chooser) (whyNot string, err error) {
	s := x.shape()
	v, why := choose(s)
	if v.Name == "" {
		return why, nil
	}
	if err := x.newCutter(prefillBuffers); err != nil {
		return "", err
	}
	kernel := s.Kernel(v)
	kernel.Both, kernel.Paged, kernel.Low = x.options.both, x.HasTable(), x.c.WeightType() != backend.F32
	kernel.Listed, kernel.Packed = x.listed(), x.packed != nil
	x.path, x.why = "register-tiled WGSL, variant "+v.Name, why
	x.kernel, x.rows, x.keys = x.options.modded(kernel, false), v.Rows(), v.Keys
	x.cutter.StateAbove = v.Split
	// A second area, for the state of chunks, at most doubles it.
	whyNot, err = x.fit(v.Loops(x.d.Dim, x.d.ValueDim, s.Mask)+x.options.rounds(kernel.RV*kernel.KT), v.Area(x.d.ValueDim), 2)
	if whyNot == "" {
		x.split, x.tiled = v.Split, true
	}
	return whyNot, err
}

// fit sets the cutter for tiles of x.rows and x.keys, in each of which a thread makes so many loop iterations. A workgroup leaves
// vec4 of state in up to so many areas. It returns why a workgroup does not fit, and an error if that is for lack of memory.
func (x *prefill) fit(loops, vecs int, areas uint64) (whyNot string, err error) {
	c, l := x.cutter, &x.b.dev.Limits
	c.Granule = x.keys
	c.AlignGranules()
	c.Most[cut.Col] = cut.LongestChunk(x.keys, loops, x.opsPerPair*float64(x.rows*x.keys), x.b.dev.ChunkWork(x.kernel))
	x.leave(16 * uint64(vecs))
	if c.MaxState /= areas; c.Room == 0 {
		c.MaxState = min(queue.MaxWindow(*l)/areas, l.MaxBufferSize/areas, maxFlashState)
	}
	if err = c.Fits(x.all()); err != nil && !errors.Is(err, backend.ErrMemory) {
		return err.Error(), nil
	}
	return "", err
}

// leave sets the cutter's state: workgroups leave area bytes each.
func (x *prefill) leave(area uint64) {
	x.cutter.State = func(box cut.Box) uint64 {
		return uint64(box.Len(cut.Batch)*box.Len(cut.Head)*ceil(box.Len(cut.Row), x.rows)) * area
	}
}

// plain sets x to the plain kernel.
func (x *prefill) plain(because string) error {
	if err := x.newCutter(prefillBuffers); err != nil {
		return err
	}
	c := x.cutter
	blocks := 1 // of 32 columns: a power of two, so that there are four variants instead of eight
	for blocks*cut.Tile < x.d.ValueDim {
		blocks *= 2
	}
	x.path, x.why = "plain WGSL", because
	x.rows, x.keys = cut.Tile, cut.Tile
	x.kernel = x.options.modded(shaders.Attention{
		In: shaders.Type(x.c.Q.DType()), KV: shaders.Type(x.c.K.DType()),
		Paged: x.HasTable(), Listed: x.listed(), Both: x.options.both, Low: x.c.WeightType() != backend.F32, DVB: blocks,
	}, false)
	// Loop iterations of attention.wgsl for a tile, as if none were unrolled: staging and
	// products of a stage, options, maxima, exponentials, and the blocks of columns.
	loops := 1 + ceil(x.d.Dim, cut.Tile)*(1+4*(1+4)+8*(2+2*4)) + 4*(1+4+4) + 10 + 4*(1+4+4) + blocks*(9+4*(1+4)+32*(3+4)) + x.options.rounds(16)
	c.Most[cut.Col] = cut.LongestChunk(cut.Tile, loops, x.opsPerPair*cut.Tile*cut.Tile, x.b.dev.ChunkWork(x.kernel))
	x.leave(16 * 64 * uint64(4*blocks+2)) // output, sums and maxima of 64 threads
	return nil
}

// totals returns the bytes of state in which a box keeps the totals of splits.
func (x *prefill) totals(seen cut.Box) uint64 {
	if x.split > 0 && seen.Lo[cut.Col]/x.split < (seen.Hi[cut.Col]-1)/x.split {
		return x.cutter.State(seen)
	}
	return 0
}

func (x *prefill) op() *queue.Op {
	return &queue.Op{Cutter: x.cutter, Space: x.all(), Sweep: x.sweep, Step: x.step, Table: x.table, Kernel: x.kernel}
}

// sweep narrows a box to the keys that any of its rows sees. One tile stays where no row
// sees any, because the outputs must be written.
func (x *prefill) sweep(box cut.Box, chunk int) queue.Sweep {
	seen := box.Visible(x.c.Visible, x.keys)
	if seen.Len(cut.Col) == 0 {
		seen.Hi[cut.Col] = min(seen.Lo[cut.Col]+x.keys, box.Hi[cut.Col])
	}
	return queue.Sweep{Box: seen, Chunk: chunk, Passes: 1, State: x.totals(seen) + x.cutter.StateOf(seen, chunk)}
}

func (x *prefill) step(p queue.Chunk) queue.Step {
	align := x.cutter.Align
	q, k, v := x.Q.View(p.Box, align), x.K.View(p.Box, align), x.V.View(p.Box, align)
	o, lse := x.O.View(p.Box, align), x.LSE.View(p.Box, align)
	if x.tiled || x.onMatrix != "" {
		q, k, v = q.Granules(), k.Granules(), v.Granules()
	}
	heads, blocks := p.Len(cut.Batch)*p.Len(cut.Head), ceil(p.Len(cut.Row), x.rows)
	w := &shaders.AttentionParams{
		Blocks: blocks, BatchHeads: heads, Group: max(x.K.Group, 1), AllKeys: x.d.SeqK, Dim: x.d.Dim, VDim: x.d.ValueDim,
		Flags:   when(!p.First, shaders.GoOn) | when(!p.Last, shaders.Leave) | when(!x.c.LSE.IsZero(), shaders.WantLSE),
		OutType: int(x.c.O.DType()), Running: int(x.totals(p.Of.Box) / 16),
		Q: strides(q), K: strides(k), V: strides(v), O: strides(o), LSE: strides(lse),
	}
	mask, bias, more := x.bind(w, p)
	return queue.Step{
		Kernel: x.kernel, Params: w,
		Windows:     append([]cut.Window{q.Window, k.Window, v.Window, mask, bias, o.Window, lse.Window, p.State}, more...),
		Groups:      heads * blocks,
		OpsPerGroup: x.opsPerPair * float64(x.rows*p.Len(cut.Col)),
	}
}

func (x *prefill) describe(p *backend.Plan, e queue.Extent) {
	p.Path = x.path
	arithmetic := "float32 arithmetic"
	if x.onMatrix != "" {
		p.Path, arithmetic, p.Matrices = p.Path+", products of "+x.onMatrix, "float32 sums", 1
		if x.c.Split() {
			p.Matrices = 3
		}
	} else if x.c.WeightType() != backend.F32 {
		p.Path, arithmetic = p.Path+x.products(), arithmetic+" ("+x.noMatrix+")"
	}
	p.Why = fmt.Sprintf("%s; one pass over the keys for %d rows a workgroup, %s storage, %s, %s; %s",
		x.why, x.rows, x.storage(), arithmetic, x.b.exponentials, x.b.dev.Pacing(x.kernel))
	batches := "batches"
	if x.packed != nil {
		batches = "packed sequences"
	}
	p.Cut = fmt.Sprintf("%d %s x %d heads x %d query blocks of %d; %d chunks of up to %d keys, key tiles of %d",
		x.d.Batch, batches, x.d.Heads, ceil(x.d.SeqQ, x.rows), x.rows, e.Chunks, e.MaxChunk, x.keys)
}

// matrixPrefill returns a with the kernel on matrix units that choose picks, or the reason why it cannot run there.
func (a *attention) matrixPrefill(choose matrixChooser) (x *prefill, whyNot string, err error) {
	k, products, whyNot := a.matrixKernel(choose)
	if whyNot != "" {
		return nil, whyNot, nil
	}
	x = &prefill{attention: a, path: "matrix units WGSL", onMatrix: products}
	if err := x.newCutter(prefillBuffers); err != nil {
		return nil, "", err
	}
	x.kernel, x.rows, x.keys = x.withOptions(k), k.TY*k.M, k.Keys
	x.why = fmt.Sprintf("%d subgroups of %d lanes", k.TY, k.Lanes)
	made := shaders.Describe(k).Constants
	whyNot, err = x.fit(tune.MatrixLoops(k)+x.options.rounds(2*int(made["EACH"]*made["FOURS"])), int(made["AREA"]), 1)
	if err != nil || whyNot != "" {
		return nil, whyNot, err
	}
	return x, "", x.check(x.kernel)
}

// matrixChooser picks a kernel on matrix units for heads of dim elements, or returns the reason why there is none.
type matrixChooser func(s tune.Shape, dim int) (k shaders.Matrix, whyNot string)

// matrixKernel returns the kernel on matrix units that choose picks and describes its products, or returns the reason why a has none.
func (a *attention) matrixKernel(choose matrixChooser) (k shaders.Matrix, products, whyNot string) {
	c, t := a.c, a.c.V.DType()
	one := !t.Quantised() && c.Q.DType() == t && c.K.DType() == t
	if eights := t == backend.F8 && c.K.DType() == t && c.Q.DType() != backend.F32; !c.LowPrecision || !one && !eights {
		return k, "", "products on matrix units need LowPrecision, with q, k and v of one type, f16, bf16 or f32, or with f8 next to a q of 16 bits"
	}
	k, whyNot = choose(a.shape(), a.d.Dim)
	products = fmt.Sprintf("f16 matrices of %dx%dx%d", k.M, k.N, k.K)
	return k, products + map[backend.DType]string{backend.BF16: ", to which bf16 is scaled exactly", backend.F32: ", three for one of f32"}[c.Q.DType()], whyNot
}

// withOptions returns k with the options of a, which has a cutter.
func (a *attention) withOptions(k shaders.Matrix) shaders.Variant {
	k.Both, k.Paged, k.Listed, k.Packed, k.Paired = a.options.both, a.HasTable(), a.listed(), a.packed != nil, a.options.kinds != tune.Pairs{}
	return a.options.modded(k, false)
}

// prefills returns the prefill path of c, the zero value if it has none.
func (b *Backend) prefills(c *backend.Call) (x prefill) {
	if p, err := b.prefillOf(c, nil); err == nil {
		x = *p
	}
	return x
}

// packed returns the path of packed batches, or nil.
func (b *Backend) packed(u join.Unit) path {
	one := b.prefills(u.Calls[0])
	if !one.tiled && one.onMatrix == "" {
		return nil
	}
	x, err := b.prefillOf(u.Call, u.Packed)
	if err != nil || x.tiled != one.tiled || x.onMatrix != one.onMatrix || x.HasTable() != (u.Call.Pages != nil) {
		return nil
	}
	for _, o := range x.cutter.Operands { // each must be one window of device memory
		if _, staged := o.View(x.all(), x.cutter.Align).Buf.(*cut.Staged); staged || o.OnHost || o.Gathered {
			return nil
		}
	}
	return x
}

// pack makes the batches of a packed ones. Kernels find their rows, keys and offsets in the table.
func (a *attention) pack(p *join.Packed) (err error) {
	a.packed = p
	for n, o := range [5]*cut.Operand{a.Q, a.O, a.LSE, a.K, a.V} {
		if n < 3 || a.Pages == nil {
			o.T, err = cut.Words(p.Whole[n])
			o.Axes = [4]int{cut.Whole, cut.Head, cut.Whole, cut.Whole}
		}
		if err != nil {
			return err
		}
	}
	problem := a.c.Problem
	problem.Visible.KLen, problem.Visible.Offsets = nil, nil
	a.options = newScoreOptions(&problem, a.d.Heads, &a.Pairs)
	return nil
}
