package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
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
	y := writes(m.names[0], m.y, [4]int{axB, axH, axM, axN}, 1)
	a := reads(m.names[1], m.a, [4]int{axB, axH, axM, axX}, 1)
	w := reads(m.names[2], m.w, [4]int{axB, axH, axX, axN}, group)
	bias := reads("bias", m.bias, [4]int{whole, whole, whole, axN}, 1)

	v := b.chooseProduct(ys[0]*ys[1], ys[2], ys[3])
	if m.tile != nil {
		v = *m.tile
	}
	all := box{hi: [nAxes]int{axB: ys[0], axH: ys[1], axM: ys[2], axN: ys[3], axX: as[3]}}
	// What a cut leaves may be aligned or not; which loads it takes changes no bit.
	kernel := func(a, w view, x box) variant {
		k := productShape{a: m.a.DType(), w: m.w.DType(), skip: m.skip}
		k.aWide = a.wideAlong(backend.Dim, x.len(axX))
		if k.along = m.w.Strides()[backend.Seq] < m.w.Strides()[backend.Dim]; k.along {
			k.wWide = w.wideAlong(backend.Seq, x.len(axX))
		} else {
			k.wWide = w.wideAlong(backend.Dim, x.len(axN))
		}
		return v.kernel(k)
	}
	main := kernel(view{base: m.a.Offset(), strides: m.a.Strides()}, view{base: m.w.Offset(), strides: m.w.Strides()}, all)
	const chunks = tile / (4 * productQD)
	cut := b.newCutter(axX, tile, a, w, bias, y)
	cut.align = max(cut.align, granuleBytes)
	cut.maxBind &^= granuleBytes - 1
	groups := func(x box) int { return x.len(axB) * x.len(axH) * v.tiles(x.len(axM), x.len(axN)) }
	cut.state = func(x box) uint64 { return uint64(groups(x)) * uint64(4*v.height()*v.width()) }
	ops := 2 * float64(v.height()*v.width()) // for each x
	cut.most[axX] = longest(tile, chunks*v.loops(), ops*tile, b.pieceWork(main))

	return cut.boxes(all, func(x box, piece int) error {
		stateBytes := uint64(0)
		var state window
		if piece < x.len(axX) {
			stateBytes = cut.state(x)
			buf, err := r.stateFor(stateBytes)
			if err != nil {
				return err
			}
			state = window{buf, 0, stateBytes}
		}
		return cut.pieces(x, piece, func(x box, first, last bool) error {
			av, wv, bv, yv := granules(a.view(x, cut.align)), granules(w.view(x, cut.align)), bias.view(x, cut.align), y.view(x, cut.align)
			p := newParams()
			p.u32(0, 0, v.tiles(x.len(axM), 1), v.tiles(1, x.len(axN)), x.len(axH), x.lo[axH], group,
				x.len(axM), x.len(axN), x.len(axX), flagBits(!first, !last), biasType(m.bias), int(m.y.DType()))
			p.strides(av.base, av.strides)
			p.strides(wv.base, wv.strides)
			p.strides(yv.base, yv.strides)
			p.u32(bv.base, bv.strides[3])
			p.pad()
			s := step{variant: kernel(av, wv, x), params: p, windows: []window{av.window, wv.window, bv.window, yv.window, state}}
			return r.dispatch(s, groups(x), ops*float64(x.len(axX)))
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
	opts, err := newOptions(p, sh)
	if err != nil {
		return err
	}
	s := updates("s", st, pairAxes, 1)
	lse := writes("lse", lt, rowAxes, 1)
	cut := b.newCutter(axN, softmaxGrain, append(opts.operands(), s, lse)...)
	opts.limit(cut)
	cut.most[axN] = longest(softmaxGrain, 2+opts.rounds(4), softmaxOps*softmaxGrain, b.pieceWork(softmaxAny)) // 2 phases
	rows := func(x box) int { return x.len(axB) * x.len(axH) * x.len(axM) }
	cut.state = func(x box) uint64 { return uint64(rows(x)) * 2 * softmaxThreads * 4 }
	lo, hi := bounds(p.Visible)

	queue := func(v variant, x box, state window, phases int) error {
		sv, lv := s.view(x, cut.align), lse.view(x, cut.align)
		pairs := opts.views(x, cut.align)
		mask, bias, more := opts.windows(pairs)
		// As in softmax.wgsl.
		flags := phases | flagBits(state.buf != nil, !lt.IsZero(), p.Visible.KLen != nil)<<2 | opts.flags()<<1
		w := newParams()
		w.u32(0, 0, x.len(axH), x.len(axM), x.lo[axM], x.len(axN), x.lo[axN])
		w.f32(p.Scale)
		w.f32(p.Softcap)
		w.u32(lo, hi, flags, biasType(opts.bias.t))
		opts.params(&w, x)
		for _, o := range []view{sv, lv, pairs.mask, pairs.bias, pairs.blocks, pairs.relative} {
			w.strides(o.base, o.strides)
		}
		opts.tables(&w, x, 1)
		st := step{variant: opts.kernel(v), params: w, windows: append([]window{mask, bias, sv.window, lv.window, state}, more...)}
		return r.dispatch(st, rows(x), softmaxOps*float64(x.len(axN)))
	}
	all := box{hi: [nAxes]int{axB: sh[0], axH: sh[1], axM: sh[2], axN: sh[3], axX: 1}}
	return cut.boxes(all, func(x box, piece int) error {
		if scores {
			return cut.pieces(x, piece, func(x box, _, _ bool) error { return queue(softmaxAny, x, window{}, 0) })
		}
		if piece == x.len(axN) {
			return queue(b.chooseSoftmax(piece), x, window{}, 1|2)
		}
		buf, err := r.stateFor(cut.state(x))
		if err != nil {
			return err
		}
		for _, phase := range []int{1, 2} {
			err := cut.pieces(x, piece, func(x box, _, _ bool) error {
				return queue(softmaxAny, x, window{buf, 0, cut.state(x)}, phase)
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
		ops := []*operand{reads("the part's o", po, rowAxes, 1), reads("the part's lse", plse, rowAxes, 1), updates("o", o, rowAxes, 1), updates("lse", lse, rowAxes, 1)}
		cut := b.newCutter(axX, tile, ops...)
		all := box{hi: [nAxes]int{axB: sh[0], axH: sh[1], axM: sh[2], axN: 1, axX: 1}}
		return cut.boxes(all, func(x box, _ int) error {
			var v [4]view
			s := step{variant: variant{shaders.Merge, nil}}
			for i, op := range ops {
				v[i] = op.view(x, cut.align)
				s.windows = append(s.windows, v[i].window)
			}
			s.params.u32(0, 0, x.len(axH), x.len(axM), sh[3])
			for _, i := range []int{2, 3, 0, 1} {
				s.params.strides(v[i].base, v[i].strides)
			}
			return r.dispatch(s, x.len(axB)*x.len(axH)*x.len(axM), mergeOps*float64(sh[3]))
		})
	})
}
