package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Scores computes what goes into the softmax, or how far it has come at an earlier
// point, and allocates it, for the caller to Release:
//
//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// At [backend.Scaled] and [backend.Capped] every key counts, at [backend.Biased] hidden
// ones have -Inf. With the weights these are the four modes of the ONNX operator's
// qk_matmul_output. It takes B·H·Sq·Sk·4 bytes: O(S²). Errors as for [Attention], and
// ErrUnsupported when the backend is no [backend.Scorer].
func Scores(ctx context.Context, be backend.Backend, q, k backend.Tensor, at backend.ScorePoint, opt Options) (backend.Tensor, error) {
	s, err := scores(ctx, be, q, k, at, &opt)
	if err != nil {
		s.Release()
		return backend.Tensor{}, fmt.Errorf("scores: %w", err)
	}
	return s, nil
}

func scores(ctx context.Context, be backend.Backend, q, k backend.Tensor, at backend.ScorePoint, opt *Options) (s backend.Tensor, err error) {
	if err := floats(backend.Operand{Name: "k", Tensor: k}); err != nil {
		return s, err
	}
	d, err := dims(q, k, k)
	if err != nil {
		return s, err
	}
	if at < backend.Scaled || at > backend.Biased {
		return s, fmt.Errorf("the point is %d, it must be Scaled, Capped or Biased: %w", at, backend.ErrOption)
	}
	p, err := opt.problem(d)
	if err != nil {
		return s, err
	}
	scorer, ok := be.(backend.Scorer)
	if !ok {
		return s, fmt.Errorf("%s gives no scores out: %w", be.Info().Name, backend.ErrUnsupported)
	}
	if s, err = be.Alloc(ctx, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK}); err != nil {
		return s, err
	}
	if err := be.QK(ctx, s, q, k); err != nil {
		return s, err
	}
	if at < backend.Biased {
		return s, scorer.Scores(ctx, s, &p.Problem, at)
	}
	d.SeqK = p.keys
	for _, x := range p.partsOf(d) {
		var cut slicer
		own, q := cut.pairs(s, x), cut.problem(&p.Problem, d, x)
		if cut.err != nil {
			return s, cut.err
		}
		if err := scorer.Scores(ctx, own, &q, at); err != nil {
			return s, err
		}
		err := outside(s, x, func(rest backend.Tensor, nothing *backend.Problem) error {
			return scorer.Scores(ctx, rest, nothing, at)
		})
		if err != nil {
			return s, err
		}
	}
	return s, nil
}
