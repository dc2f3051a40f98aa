package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

const (
	// rotateUnits is the number of units, pairs or elements that do not turn, of a workgroup of rope.wgsl.
	rotateUnits = 256
	// rotateOps is the approximate cost of a unit: six operations, divisions for its place, four memory accesses.
	rotateOps = 50
	// convertUnits is the number of units, elements or pairs of them, of a workgroup of convert.wgsl; quantiseRows is
	// the number of rows when it converts to q8, and quantiseBlocks that of blocks when it converts to q4.
	convertUnits   = 256
	quantiseRows   = 4
	quantiseBlocks = 64
	// convertOps is the approximate cost of an element: divisions for its place, rounding, two memory accesses.
	convertOps = 40
	// mergeOps is the approximate cost of a merged element.
	mergeOps = 10
)

// Rotate turns pairs of elements of each row by angles:
//
//	y, x [B, H, S, D]    cos, sin [B, H, S, R/2] F32
func (b *Backend) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, how backend.Rotation) error {
	sh, pairs, inPlace := y.Shape(), cos.Shape()[backend.Dim], y == x
	units := sh[backend.Dim] - pairs
	if inPlace { // elements that do not turn stay
		units = pairs
	}
	in, out := inOut("x", x, "y", y)
	ops := []*cut.Operand{in, cut.Reads("cos", cos, cut.RowAxes, 1), cut.Reads("sin", sin, cut.RowAxes, 1), out}
	var kernel shaders.Variant = shaders.RoPE{InPlace: inPlace}
	step := func(box cut.Box, v []cut.View) queue.Step {
		n := rows(box) * units
		if inPlace {
			v[0] = v[3]
		}
		return queue.Step{
			Kernel: kernel, Groups: ceil(n, rotateUnits), OpsPerGroup: rotateUnits * rotateOps,
			Params: &shaders.RoPEParams{
				Heads: box.Len(cut.Head), Rows: box.Len(cut.Row), Pairs: pairs, Units: units, All: n, Interleaved: when(how.Interleaved, 1), Inverse: when(how.Inverse, 1),
				XType: int(x.DType()), OutType: int(y.DType()), X: strides(v[0]), Cosine: strides(v[1]), Sine: strides(v[2]), O: strides(v[3]),
			},
		}
	}
	return b.run(ctx, "rotate", func() (*queue.Op, error) { return b.rowOp(sh, ops, step), nil })
}

// inOut returns the operands of a kernel that reads the rows of x and writes those of y. In place, when y is x itself,
// it binds y alone.
func inOut(in string, x backend.Tensor, out string, y backend.Tensor) (*cut.Operand, *cut.Operand) {
	if x == y {
		return new(cut.Operand), cut.Updates(out, y, cut.RowAxes)
	}
	return cut.Reads(in, x, cut.RowAxes, 1), cut.Writes(out, y, cut.RowAxes)
}

// Copy implements backend.Copier. The copies share submissions. Between equal types it moves
// bits; rows of Q8 and Q4 keep their scales and integers, those of F8 their codes.
func (b *Backend) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	return b.runAll(ctx, "copy", len(dst), func(i int) (*queue.Op, error) { return b.convert(dst[i], src[i]) })
}

func (b *Backend) convert(dst, src backend.Tensor) (*queue.Op, error) {
	from, err := cut.Words(src)
	if err != nil {
		return nil, fmt.Errorf("src: %w", err)
	}
	to, err := cut.Words(dst)
	if err != nil {
		return nil, fmt.Errorf("dst: %w", err)
	}
	in, out, dim := src.DType(), dst.DType(), dst.Shape()[backend.Dim]
	if in == out && in.Quantised() {
		in, out, dim = from.DType(), to.DType(), to.Shape()[backend.Dim]
	}
	ops := []*cut.Operand{cut.Reads("src", from, cut.RowAxes, 1), cut.Writes("dst", to, cut.RowAxes)}
	return b.rowOp(dst.Shape(), ops, func(box cut.Box, v []cut.View) queue.Step {
		return conversion(shaders.ConvertParams{
			Heads: box.Len(cut.Head), Rows: box.Len(cut.Row), InType: int(in), OutType: int(out), Src: strides(v[0]),
		}, rows(box), dim, v[1])
	}), nil
}

// conversion returns the step of convert.wgsl, without windows, that writes rows of dim elements to a view. p has what depends on
// their source.
func conversion(p shaders.ConvertParams, rows, dim int, to cut.View) queue.Step {
	kernel, out, each := shaders.Convert{}, backend.DType(p.OutType), convertUnits
	if out.Quantised() {
		kernel.To = shaders.Type(out)
	}
	p.Units, p.O = dim, strides(to)
	switch {
	case out == backend.Q8:
		p.Units, each = dim/4, quantiseRows
	case out == backend.F8:
		p.Units = dim / 4
	case out == backend.Q4:
		p.Units, each = dim/32, quantiseBlocks
	case out.Size() == 2 && inPairs(to, dim):
		p.Units, p.Pairs = dim/2, 1
	}
	if p.All = rows * p.Units; out == backend.Q8 {
		p.All = rows
	}
	groups := ceil(p.All, each)
	return queue.Step{Kernel: kernel, Params: &p, Groups: groups, OpsPerGroup: convertOps * float64(rows*dim) / float64(groups)}
}

// inPairs reports whether rows of 16-bit elements, dim adjacent ones each, are whole words.
func inPairs(v cut.View, dim int) bool {
	odd := dim | v.Base | v.Strides[0] | v.Strides[1] | v.Strides[2]
	return odd&1 == 0 && v.Strides[backend.Dim] == 1
}

// Merge combines (po, plse) into (o, lse):
//
//	o, po [B, H, Sq, Dv] F32    lse, plse [B, H, Sq, 1] F32
func (b *Backend) Merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	return b.run(ctx, "merge", func() (*queue.Op, error) {
		dim := o.Shape()[backend.Dim]
		ops := []*cut.Operand{
			cut.Reads("the part's o", po, cut.RowAxes, 1), cut.Reads("the part's lse", plse, cut.RowAxes, 1),
			cut.Updates("o", o, cut.RowAxes), cut.Updates("lse", lse, cut.RowAxes),
		}
		return b.rowOp(o.Shape(), ops, func(x cut.Box, v []cut.View) queue.Step {
			return queue.Step{
				Kernel: shaders.Merge, Groups: rows(x), OpsPerGroup: mergeOps * float64(dim),
				Params: &shaders.MergeParams{
					Heads: x.Len(cut.Head), Rows: x.Len(cut.Row), VDim: dim,
					Po: strides(v[0]), Plse: strides(v[1]), O: strides(v[2]), LSE: strides(v[3]),
				},
			}
		}), nil
	})
}

const (
	// softmaxGrain divides the lengths of chunks.
	softmaxGrain = 256
	// softmaxOps is the approximate cost of a score: an exponential, a few products, and
	// two or three memory accesses counted as operations.
	softmaxOps = 50
	// softmaxThreads is the size of a workgroup of the softmax kernel, which has a row.
	softmaxThreads = 64
)

// softmaxHeld are the kernels that hold rows of up to so many keys in workgroup memory: few, so that many workgroups
// run at the same time, or what fits into 16 KiB. softmaxAny reads rows of any length twice.
var (
	softmaxHeld = []shaders.Softmax{{Held: true, Row: 1024}, {Held: true, Row: 3840}}
	softmaxAny  = shaders.Softmax{Row: softmaxGrain}
)

// chooseSoftmax returns the kernel for rows of n keys in one chunk.
func (b *Backend) chooseSoftmax(n int) shaders.Softmax {
	for _, v := range softmaxHeld {
		if n <= v.Row && shaders.Describe(v).WorkgroupMemory <= int(b.dev.Limits.MaxComputeWorkgroupStorageSize) {
			return v
		}
	}
	return softmaxAny
}

// Softmax replaces each row of s by its softmax, with the options of p:
//
//	s [B, H, Sq, Sk] F32    lse [B, H, Sq, 1] F32 or none
func (b *Backend) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	return b.run(ctx, "softmax", func() (*queue.Op, error) { return b.softmax(s, lse, p, false) })
}

// Scores implements backend.Scorer with the first part of the softmax kernel.
func (b *Backend) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	q := p.Until(at)
	return b.run(ctx, "scores", func() (*queue.Op, error) { return b.softmax(s, backend.Tensor{}, &q, true) })
}

// softmax returns the operation of Softmax, or of Scores with scores.
func (b *Backend) softmax(st, lt backend.Tensor, p *backend.Problem, scores bool) (*queue.Op, error) {
	sh := st.Shape()
	pairs, err := cut.PairsOf(p, sh)
	if err != nil {
		return nil, err
	}
	opts := newScoreOptions(p, sh[backend.Heads], &pairs)
	s, lse := cut.Updates("s", st, cut.PairAxes), cut.Writes("lse", lt, cut.RowAxes)
	c := b.dev.NewCutter(cut.Col, softmaxGrain, append(pairs.List(), s, lse)...)
	opts.limit(c)
	c.Most[cut.Col] = cut.LongestChunk(softmaxGrain, 2+opts.rounds(4), softmaxOps*softmaxGrain, b.dev.ChunkWork(softmaxAny)) // 2 phases
	if !scores {
		c.State = func(x cut.Box) uint64 { return uint64(rows(x)) * 2 * softmaxThreads * 4 }
	}
	return &queue.Op{
		Cutter: c, Space: cut.Space(sh[0], sh[1], sh[2], sh[3], 1), Table: opts.table(nil),
		// A row in chunks takes a pass for its sum and one for its weights.
		Sweep: func(x cut.Box, chunk int) queue.Sweep {
			w := queue.Sweep{Box: x, Chunk: chunk, Passes: 1}
			if w.State = c.StateOf(x, chunk); w.State > 0 {
				w.Passes = 2
			}
			return w
		},
		Step: func(p queue.Chunk) queue.Step {
			phases, v := shaders.Sums|shaders.Weights, softmaxAny
			switch {
			case scores:
				phases = 0
			case p.Of.Passes == 1:
				v = b.chooseSoftmax(p.Of.Chunk)
			case p.Pass == 0:
				phases = shaders.Sums
			default:
				phases = shaders.Weights
			}
			sv, lv := s.View(p.Box, c.Align), lse.View(p.Box, c.Align)
			w := &shaders.AttentionParams{
				Flags: phases | when(p.Of.State > 0, shaders.Leave) | when(!lt.IsZero(), shaders.WantLSE),
				S:     strides(sv), LSE: strides(lv),
			}
			v.Both = opts.both
			mask, bias, more := opts.bind(w, p, c.Align, 1)
			return queue.Step{
				Kernel: opts.modded(v, false), Params: w, Windows: append([]cut.Window{mask, bias, sv.Window, lv.Window, p.State}, more...),
				Groups: rows(p.Box), OpsPerGroup: softmaxOps * float64(p.Len(cut.Col)),
			}
		},
	}, nil
}

const (
	// normThreads is the size of a workgroup of normgate.wgsl. Rows of up to fewElements have fewThreads each.
	normThreads, fewThreads, fewElements = 64, 16, 256
	// normOps is the approximate cost of an element: three reads of x and two of g and w, an exponential, two writes.
	normOps = 80
)

// Normalise implements backend.Normaliser, with sums in float32.
func (b *Backend) Normalise(ctx context.Context, y, x, w backend.Tensor, n backend.Norm) error {
	return b.normGate(ctx, "normalise", normParams(w, n), [5]string{"", "x", "w", "y", ""}, backend.Tensor{}, x, w, y, backend.Tensor{})
}

// NormaliseBackward implements backend.Normaliser, with sums in float32.
func (b *Backend) NormaliseBackward(ctx context.Context, dx, dw, dy, x, w backend.Tensor, n backend.Norm) error {
	p := normParams(w, n)
	p.Backward = 1
	return b.normGate(ctx, "normalise backward", p, [5]string{"dy", "x", "w", "dx", "dw"}, dy, x, w, dx, dw)
}

// Gate implements backend.Gater.
func (b *Backend) Gate(ctx context.Context, y, x, gate backend.Tensor, f backend.Activation) error {
	return b.normGate(ctx, "gate", shaders.NormGateParams{Gated: int(f) + 1}, [5]string{"", "x", "gate", "y", ""}, backend.Tensor{}, x, gate, y, backend.Tensor{})
}

// GateBackward implements backend.Gater.
func (b *Backend) GateBackward(ctx context.Context, dx, dgate, dy, x, gate backend.Tensor, f backend.Activation) error {
	return b.normGate(ctx, "gate backward", shaders.NormGateParams{Gated: int(f) + 1, Backward: 1}, [5]string{"dy", "x", "gate", "dx", "dgate"}, dy, x, gate, dx, dgate)
}

func normParams(w backend.Tensor, n backend.Norm) shaders.NormGateParams {
	return shaders.NormGateParams{Weighted: when(!w.IsZero(), 1), One: float32(when(n.PlusOne, 1)), Epsilon: float32(n.Epsilon)}
}

// normGate runs normgate.wgsl with operands as it names them. o may be x, or g of gradients.
func (b *Backend) normGate(ctx context.Context, call string, p shaders.NormGateParams, names [5]string, g, x, w, o, terms backend.Tensor) error {
	sh := o.Shape()
	ops := []*cut.Operand{0: cut.Reads(names[0], g, cut.RowAxes, 1), 2: cut.Reads(names[2], w, cut.RowAxes, 1), 4: cut.Writes(names[4], terms, cut.RowAxes)}
	own, source := 1, x // the operand that o may be
	if p.Backward == 1 {
		own, source, ops[1] = 0, g, cut.Reads(names[1], x, cut.RowAxes, 1)
	}
	ops[own], ops[3] = inOut(names[own], source, names[3], o)
	var kernel shaders.Variant = shaders.NormGate{InPlace: source == o}
	p.Dim, p.By, p.Lanes, p.Termed = sh[backend.Dim], 1/float32(sh[backend.Dim]), normThreads, when(!terms.IsZero(), 1)
	p.GType, p.XType, p.WType, p.OutType = int(g.DType()), int(x.DType()), int(w.DType()), int(o.DType())
	if p.Dim <= fewElements {
		p.Lanes = fewThreads
	}
	return b.run(ctx, call, func() (*queue.Op, error) {
		return b.rowOp(sh, ops, func(box cut.Box, v []cut.View) queue.Step {
			if source == o {
				v[own] = v[3]
			}
			p := p
			p.Heads, p.Rows, p.All = box.Len(cut.Head), box.Len(cut.Row), rows(box)
			p.G, p.X, p.W, p.O, p.Terms = strides(v[0]), strides(v[1]), strides(v[2]), strides(v[3]), strides(v[4])
			each := normThreads / p.Lanes
			return queue.Step{Kernel: kernel, Groups: ceil(p.All, each), OpsPerGroup: float64(each * p.Dim * normOps), Params: &p}
		}), nil
	})
}
