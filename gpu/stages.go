package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

// QK computes s = q·kᵀ for each batch and head:
//
//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
func (b *Backend) QK(ctx context.Context, s, q, k backend.Tensor) error {
	out := []backend.Operand{{Name: "s", Tensor: s}}
	in := []backend.Operand{{Name: "q", Tensor: q}, {Name: "k", Tensor: k}}
	return b.call(ctx, "qk", out, in, func(r *runner) error { return b.scores(r, s, q, k) })
}

func (b *Backend) scores(r *runner, s, q, k backend.Tensor) error {
	kt, err := k.Swap(backend.Seq, backend.Dim)
	if err != nil {
		return err
	}
	return b.matmul(r, product{y: s, a: q, w: kt, names: [3]string{"s", "q", "k"}})
}

// PV computes o = w·v for each batch and head; a weight of exactly 0 hides its
// value:
//
//	o [B, H, Sq, Dv]    w [B, H, Sq, Sk] F32    v [B, Hkv, Sk, Dv]
func (b *Backend) PV(ctx context.Context, o, w, v backend.Tensor) error {
	out := []backend.Operand{{Name: "o", Tensor: o}}
	in := []backend.Operand{{Name: "w", Tensor: w}, {Name: "v", Tensor: v}}
	return b.call(ctx, "pv", out, in, func(r *runner) error { return b.weighted(r, o, w, v) })
}

func (b *Backend) weighted(r *runner, o, w, v backend.Tensor) error {
	return b.matmul(r, product{y: o, a: w, w: v, skip: true, names: [3]string{"o", "w", "v"}})
}

// Project computes y = x·w + bias for each batch and head:
//
//	y [B, H, S, N]    x [B, H, S, M]    w [B, H, M, N]    bias [1, 1, 1, N] or none
func (b *Backend) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	out := []backend.Operand{{Name: "y", Tensor: y}}
	in := []backend.Operand{{Name: "x", Tensor: x}, {Name: "w", Tensor: w}, {Name: "bias", Tensor: bias}}
	return b.call(ctx, "project", out, in, func(r *runner) error {
		return b.matmul(r, product{y: y, a: x, w: w, bias: bias, names: [3]string{"y", "x", "w"}})
	})
}

// product is y = a·w + bias: a [B, H, M, X], w [B, Hw, X, N], y [B, H, M, N].
type product struct {
	y, a, w, bias backend.Tensor
	skip          bool
	names         [3]string    // of y, a and w in errors
	tile          *productTile // instead of what is chosen
}

func (b *Backend) matmul(r *runner, m product) error {
	ys, as, ws := m.y.Shape(), m.a.Shape(), m.w.Shape()
	d := backend.Dims{Batch: ys[0], Heads: ys[1], KVHeads: ws[1], SeqQ: ys[2], SeqK: ys[3], Dim: as[3], ValueDim: 1}
	if err := checkDims(d); err != nil {
		return err
	}
	if as != (backend.Shape{ys[0], ys[1], ys[2], as[3]}) || ws != (backend.Shape{ys[0], ws[1], as[3], ys[3]}) {
		return fmt.Errorf("%s %v, %s %v and %s %v (as rows and columns of the product) do not fit: %w",
			m.names[0], ys, m.names[1], as, m.names[2], ws, backend.ErrShape)
	}
	if !m.bias.IsZero() && m.bias.Shape() != (backend.Shape{1, 1, 1, ys[3]}) {
		return fmt.Errorf("bias has shape %v, it must be [1, 1, 1, %d]: %w", m.bias.Shape(), ys[3], backend.ErrShape)
	}
	group := d.Heads / d.KVHeads
	y := cut.Writes(m.names[0], m.y, [4]int{cut.Batch, cut.Head, cut.Row, cut.Col})
	a := cut.Reads(m.names[1], m.a, [4]int{cut.Batch, cut.Head, cut.Row, cut.Sum}, 1)
	w := cut.Reads(m.names[2], m.w, [4]int{cut.Batch, cut.Head, cut.Sum, cut.Col}, group)
	bias := cut.Reads("bias", m.bias, [4]int{cut.Whole, cut.Whole, cut.Whole, cut.Col}, 1)

	v := b.chooseProduct(ys[0]*ys[1], ys[2], ys[3])
	if m.tile != nil {
		v = *m.tile
	}
	all := cut.Space(ys[0], ys[1], ys[2], ys[3], as[3])
	// What a cut leaves may be aligned or not; which loads it takes changes no bit.
	kernel := func(a, w cut.View, x cut.Box) variant {
		k := productShape{a: m.a.DType(), w: m.w.DType(), skip: m.skip}
		k.aWide = a.AlignedAlong(backend.Dim, x.Len(cut.Sum))
		if k.along = m.w.Strides()[backend.Seq] < m.w.Strides()[backend.Dim]; k.along {
			k.wWide = w.AlignedAlong(backend.Seq, x.Len(cut.Sum))
		} else {
			k.wWide = w.AlignedAlong(backend.Dim, x.Len(cut.Col))
		}
		return v.kernel(k)
	}
	main := kernel(cut.View{Base: m.a.Offset(), Strides: m.a.Strides()}, cut.View{Base: m.w.Offset(), Strides: m.w.Strides()}, all)
	const chunks = cut.Tile / (4 * productQD)
	cutter := b.newCutter(cut.Sum, cut.Tile, a, w, bias, y)
	cutter.AlignGranules()
	groups := func(x cut.Box) int {
		return x.Len(cut.Batch) * x.Len(cut.Head) * v.tiles(x.Len(cut.Row), x.Len(cut.Col))
	}
	cutter.State = func(x cut.Box) uint64 { return uint64(groups(x)) * uint64(4*v.height()*v.width()) }
	ops := 2 * float64(v.height()*v.width()) // for each x
	cutter.Most[cut.Sum] = cut.Longest(cut.Tile, chunks*v.loops(), ops*cut.Tile, b.pieceWork(main))

	return cutter.Boxes(all, func(x cut.Box, piece int) error {
		stateBytes := uint64(0)
		var state cut.Window
		if piece < x.Len(cut.Sum) {
			stateBytes = cutter.State(x)
			buf, err := r.stateFor(stateBytes)
			if err != nil {
				return err
			}
			state = cut.Window{Buf: buf, Size: stateBytes}
		}
		return cutter.Pieces(x, piece, func(x cut.Box, first, last bool) error {
			av, wv, bv, yv := a.View(x, cutter.Align).Granules(), w.View(x, cutter.Align).Granules(), bias.View(x, cutter.Align), y.View(x, cutter.Align)
			p := &shaders.MatmulParams{
				RowTiles: v.tiles(x.Len(cut.Row), 1), ColTiles: v.tiles(1, x.Len(cut.Col)), Heads: x.Len(cut.Head), Head0: x.Lo[cut.Head], Group: group,
				Rows: x.Len(cut.Row), Cols: x.Len(cut.Col), Depth: x.Len(cut.Sum), Flags: when(!first, shaders.GoOn) | when(!last, shaders.Leave),
				BiasType: biasType(m.bias), OutType: int(m.y.DType()), A: strides(av), W: strides(wv), O: strides(yv),
				BiasBase: bv.Base, BiasStride: bv.Strides[backend.Dim],
			}
			s := step{variant: kernel(av, wv, x), params: p, windows: []cut.Window{av.Window, wv.Window, bv.Window, yv.Window, state}}
			return r.dispatch(s, groups(x), ops*float64(x.Len(cut.Sum)))
		})
	})
}

// softmaxOps is about what one score costs: an exponential, a few products,
// two or three trips to memory counted as operations.
const softmaxOps = 50

// softmaxThreads are those of a workgroup of the softmax kernel, which has a row.
const softmaxThreads = 64

// softmaxHeld are the kernels for rows of up to so many keys, which are held in
// workgroup memory: few, so that many workgroups run side by side, or what fits into
// 16 KiB. softmaxAny, for any row, reads it twice.
var (
	softmaxHeld = []variant{softmaxKernel(1, 1024), softmaxKernel(1, 3840)}
	softmaxAny  = softmaxKernel(0, softmaxGrain)
)

func softmaxKernel(held, row uint32) variant {
	k := shaders.Softmax
	k.WorkgroupMemory = 4 * (int(row) + softmaxThreads)
	return variant{k, map[string]uint32{"EXPAND": shaders.Registers, "HELD": held, "ROW": row}}
}

// chooseSoftmax returns the kernel for rows of n keys in one piece.
func (b *Backend) chooseSoftmax(n int) variant {
	for _, v := range softmaxHeld {
		if n <= int(v.consts["ROW"]) && v.kernel.WorkgroupMemory <= int(b.limits.MaxComputeWorkgroupStorageSize) {
			return v
		}
	}
	return softmaxAny
}

// Softmax replaces each row of s by its softmax, as backend.Problem says:
//
//	s [B, H, Sq, Sk] F32    lse [B, H, Sq, 1] F32 or none
func (b *Backend) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	out := []backend.Operand{{Name: "s", Tensor: s}, {Name: "lse", Tensor: lse}}
	in := p.Operands()
	return b.call(ctx, "softmax", out, in[:], func(r *runner) error { return b.softmax(r, s, lse, p) })
}

func (b *Backend) softmax(r *runner, st, lt backend.Tensor, p *backend.Problem) error {
	return b.rows(r, st, lt, p, false)
}

// rows runs the softmax kernel, or as much of it as makes scores.
func (b *Backend) rows(r *runner, st, lt backend.Tensor, p *backend.Problem, scores bool) error {
	sh := st.Shape()
	if err := checkDims(backend.Dims{Batch: sh[0], Heads: sh[1], KVHeads: 1, SeqQ: sh[2], SeqK: sh[3], Dim: 1, ValueDim: 1}); err != nil {
		return err
	}
	if st.DType() != backend.F32 {
		return fmt.Errorf("s is %v, scores are f32: %w", st.DType(), backend.ErrDType)
	}
	pairs, err := cut.PairsOf(p, sh)
	if err != nil {
		return err
	}
	opts := &options{p: p, heads: sh[backend.Heads], pairs: &pairs}
	s := cut.Updates("s", st, cut.PairAxes)
	lse := cut.Writes("lse", lt, cut.RowAxes)
	cutter := b.newCutter(cut.Col, softmaxGrain, append(pairs.List(), s, lse)...)
	opts.limit(cutter)
	cutter.Most[cut.Col] = cut.Longest(softmaxGrain, 2+opts.rounds(4), softmaxOps*softmaxGrain, b.pieceWork(softmaxAny)) // 2 phases
	rows := func(x cut.Box) int { return x.Len(cut.Batch) * x.Len(cut.Head) * x.Len(cut.Row) }
	cutter.State = func(x cut.Box) uint64 { return uint64(rows(x)) * 2 * softmaxThreads * 4 }

	queue := func(v variant, x cut.Box, state cut.Window, phases int) error {
		sv, lv := s.View(x, cutter.Align), lse.View(x, cutter.Align)
		pairs := opts.views(x, cutter.Align)
		mask, bias, more := opts.windows(pairs)
		w := &shaders.AttentionParams{
			Heads: x.Len(cut.Head), Rows: x.Len(cut.Row), Row0: x.Lo[cut.Row], Keys: x.Len(cut.Col), Key0: x.Lo[cut.Col],
			Flags: phases | when(state.Buf != nil, shaders.Leave) | when(!lt.IsZero(), shaders.WantLSE),
			S:     strides(sv), LSE: strides(lv),
		}
		opts.params(w, x, pairs, 1)
		st := step{variant: opts.kernel(v), params: w, windows: append([]cut.Window{mask, bias, sv.Window, lv.Window, state}, more...)}
		return r.dispatch(st, rows(x), softmaxOps*float64(x.Len(cut.Col)))
	}
	all := cut.Space(sh[0], sh[1], sh[2], sh[3], 1)
	return cutter.Boxes(all, func(x cut.Box, piece int) error {
		if scores {
			return cutter.Pieces(x, piece, func(x cut.Box, _, _ bool) error { return queue(softmaxAny, x, cut.Window{}, 0) })
		}
		if piece == x.Len(cut.Col) {
			return queue(b.chooseSoftmax(piece), x, cut.Window{}, shaders.Sums|shaders.Weights)
		}
		buf, err := r.stateFor(cutter.State(x))
		if err != nil {
			return err
		}
		for _, phase := range []int{shaders.Sums, shaders.Weights} {
			err := cutter.Pieces(x, piece, func(x cut.Box, _, _ bool) error {
				return queue(softmaxAny, x, cut.Window{Buf: buf, Size: cutter.State(x)}, phase)
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// mergeOps is about what one merged element costs.
const mergeOps = 10

// Merge combines (po, plse) into (o, lse):
//
//	o, po [B, H, Sq, Dv] F32    lse, plse [B, H, Sq, 1] F32
func (b *Backend) Merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	out := []backend.Operand{{Name: "o", Tensor: o}, {Name: "lse", Tensor: lse}}
	in := []backend.Operand{{Name: "the part's o", Tensor: po}, {Name: "the part's lse", Tensor: plse}}
	return b.call(ctx, "merge", out, in, func(r *runner) error {
		sh := o.Shape()
		if err := checkDims(backend.Dims{Batch: sh[0], Heads: sh[1], KVHeads: 1, SeqQ: sh[2], SeqK: 1, Dim: 1, ValueDim: sh[3]}); err != nil {
			return err
		}
		one := sh
		one[backend.Dim] = 1
		if po.Shape() != sh || lse.Shape() != one || plse.Shape() != one {
			return fmt.Errorf("o %v, lse %v and the part's %v, %v do not fit: %w", sh, lse.Shape(), po.Shape(), plse.Shape(), backend.ErrShape)
		}
		ops := []*cut.Operand{cut.Reads("the part's o", po, cut.RowAxes, 1), cut.Reads("the part's lse", plse, cut.RowAxes, 1), cut.Updates("o", o, cut.RowAxes), cut.Updates("lse", lse, cut.RowAxes)}
		cutter := b.newCutter(cut.Sum, cut.Tile, ops...)
		all := cut.Space(sh[0], sh[1], sh[2], 1, 1)
		return cutter.Boxes(all, func(x cut.Box, _ int) error {
			var v [4]cut.View
			s := step{variant: variant{shaders.Merge, nil}}
			for i, op := range ops {
				v[i] = op.View(x, cutter.Align)
				s.windows = append(s.windows, v[i].Window)
			}
			s.params = &shaders.MergeParams{
				Heads: x.Len(cut.Head), Rows: x.Len(cut.Row), VDim: sh[3],
				Po: strides(v[0]), Plse: strides(v[1]), O: strides(v[2]), LSE: strides(v[3]),
			}
			return r.dispatch(s, x.Len(cut.Batch)*x.Len(cut.Head)*x.Len(cut.Row), mergeOps*float64(sh[3]))
		})
	})
}
