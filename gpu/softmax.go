package gpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

const (
	// softmaxGrain divides the lengths of pieces.
	softmaxGrain = 256
	// softmaxOps is the approximate cost of a score: an exponential, a few products, and
	// two or three memory accesses counted as operations.
	softmaxOps = 50
	// softmaxThreads is the size of a workgroup of the softmax kernel, which has a row.
	softmaxThreads = 64
)

// softmaxHeld are the kernels that hold rows of up to so many keys in workgroup memory:
// few, so that many workgroups run at the same time, or what fits into 16 KiB.
// softmaxAny reads rows of any length twice.
var (
	softmaxHeld = []queue.Kernel{softmaxKernel(1, 1024), softmaxKernel(1, 3840)}
	softmaxAny  = softmaxKernel(0, softmaxGrain)
)

func softmaxKernel(held, row uint32) queue.Kernel {
	k := shaders.Softmax
	k.WorkgroupMemory = 4 * (int(row) + softmaxThreads)
	return queue.Kernel{Shader: k, Consts: map[string]uint32{"EXPAND": shaders.Registers, "HELD": held, "ROW": row}}
}

// chooseSoftmax returns the kernel for rows of n keys in one piece.
func (b *Backend) chooseSoftmax(n int) queue.Kernel {
	for _, v := range softmaxHeld {
		if n <= int(v.Consts["ROW"]) && v.Shader.WorkgroupMemory <= int(b.dev.Limits.MaxComputeWorkgroupStorageSize) {
			return v
		}
	}
	return softmaxAny
}

// Softmax replaces each row of s by its softmax, with the options of p:
//
//	s [B, H, Sq, Sk] F32    lse [B, H, Sq, 1] F32 or none
func (b *Backend) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	in := p.Operands()
	o := operands{out: []backend.Operand{{Name: "s", Tensor: s}, {Name: "lse", Tensor: lse}}, in: in[:], inPlace: 1}
	return b.call(ctx, "softmax", o, func(r *queue.Runner) error { return b.runSoftmax(r, s, lse, p, false) })
}

// Scores implements backend.Scorer with the first part of the softmax kernel.
func (b *Backend) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	q := p.Until(at)
	in := q.Operands()
	o := operands{out: []backend.Operand{{Name: "s", Tensor: s}}, in: in[:], inPlace: 1}
	return b.call(ctx, "scores", o, func(r *queue.Runner) error { return b.runSoftmax(r, s, backend.Tensor{}, &q, true) })
}

// runSoftmax queues Softmax, or Scores with scores.
func (b *Backend) runSoftmax(r *queue.Runner, s, lse backend.Tensor, p *backend.Problem, scores bool) error {
	op, err := b.softmax(s, lse, p, scores)
	if err != nil {
		return err
	}
	return r.Run(op)
}

// softmax returns the operation of Softmax, or of Scores with scores.
func (b *Backend) softmax(st, lt backend.Tensor, p *backend.Problem, scores bool) (*queue.Op, error) {
	sh := st.Shape()
	pairs, err := cut.PairsOf(p, sh)
	if err != nil {
		return nil, err
	}
	opts := options{p: p, heads: sh[backend.Heads], pairs: &pairs}
	s, lse := cut.Updates("s", st, cut.PairAxes), cut.Writes("lse", lt, cut.RowAxes)
	c := b.dev.NewCutter(cut.Col, softmaxGrain, append(pairs.List(), s, lse)...)
	opts.limit(c)
	c.Most[cut.Col] = cut.LongestPiece(softmaxGrain, 2+opts.rounds(4), softmaxOps*softmaxGrain, b.dev.PieceWork(softmaxAny)) // 2 phases
	if !scores {
		c.State = func(x cut.Box) uint64 { return uint64(rows(x)) * 2 * softmaxThreads * 4 }
	}
	return &queue.Op{
		Cutter: c, Space: cut.Space(sh[0], sh[1], sh[2], sh[3], 1),
		// A row in pieces takes a pass for its sum and one for its weights.
		Sweep: func(x cut.Box, piece int) queue.Sweep {
			w := queue.Sweep{Box: x, Piece: piece, Passes: 1}
			if !scores && piece < x.Len(cut.Col) {
				w.Passes, w.State = 2, c.State(x)
			}
			return w
		},
		Step: func(p queue.Piece) queue.Step {
			phases, v := shaders.Sums|shaders.Weights, softmaxAny
			switch {
			case scores:
				phases = 0
			case p.Of.Passes == 1:
				v = b.chooseSoftmax(p.Of.Piece)
			case p.Pass == 0:
				phases = shaders.Sums
			default:
				phases = shaders.Weights
			}
			sv, lv, pairs := s.View(p.Box, c.Align), lse.View(p.Box, c.Align), opts.views(p.Box, c.Align)
			w := &shaders.AttentionParams{
				Heads: p.Len(cut.Head), Rows: p.Len(cut.Row), Row0: p.Lo[cut.Row], Keys: p.Len(cut.Col), Key0: p.Lo[cut.Col],
				Flags: phases | when(p.Of.State > 0, shaders.Leave) | when(!lt.IsZero(), shaders.WantLSE),
				S:     strides(sv), LSE: strides(lv),
			}
			opts.params(w, p.Box, pairs, 1)
			mask, bias, more := opts.windows(pairs)
			return queue.Step{
				Kernel: opts.withBindings(v), Params: w, Windows: append([]cut.Window{mask, bias, sv.Window, lv.Window, p.State}, more...),
				Groups: rows(p.Box), Each: softmaxOps * float64(p.Len(cut.Col)),
			}
		},
	}, nil
}
