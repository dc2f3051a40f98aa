package main

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// pairsWanted checks the flags for what is known of pairs of queries and keys: scores,
// largest weights, what dropout keeps.
func (c *runCmd) pairsWanted(p *problem) error {
	top := c.TopKKeys != "" || c.TopKWeights != ""
	switch {
	case c.TopK < 0:
		return errors.New("--topk is negative, it must be at least 1")
	case top && c.TopK == 0:
		return errors.New("--topk is missing: how many of the largest weights to find")
	case c.TopK > 0 && !top:
		return errors.New("--topk finds weights that are written nowhere: give --topk-keys or --topk-weights")
	case c.KeepMask != "" && p.Dropout == nil:
		return errors.New("--keep-mask is given without a --dropout")
	case p.packed() && (top || c.Scores != "" || c.KeepMask != ""):
		return errors.New("--scores, --topk and --keep-mask cannot be given for packed sequences, whose lengths differ")
	}
	return nil
}

// writePairs computes and writes them.
func (c *runCmd) writePairs(ctx context.Context, calc *calculation, files *outputs) error {
	d := (&backend.Call{Q: calc.q, K: calc.k, V: calc.v}).Dims()
	if c.Scores != "" {
		at := map[string]backend.ScorePoint{"scaled": backend.Scaled, "capped": backend.Capped, "biased": backend.Biased}[c.ScoresAt]
		s, err := kernels.Scores(ctx, calc.be, calc.q, calc.k, at, calc.opt)
		if err != nil {
			return err
		}
		defer s.Release()
		shape := s.Shape()
		if err := calc.writeTensor(ctx, files, "scores", s, shape[:]); err != nil {
			return err
		}
	}
	if c.TopK > 0 {
		top, err := kernels.TopWeights(ctx, calc.be, calc.q, calc.k, c.TopK, calc.opt)
		if err != nil {
			return err
		}
		shape := []int{d.Batch, d.Heads, d.SeqQ, c.TopK}
		for _, f := range []struct {
			flag, descr string
			bits        func(i int) uint32
		}{
			{"topk-keys", "<i4", func(i int) uint32 { return uint32(top.Keys[i]) }},
			{"topk-weights", "<f4", func(i int) uint32 { return math.Float32bits(top.Weights[i]) }},
		} {
			if !files.has(f.flag) {
				continue
			}
			err := files.write(f.flag, func(w io.Writer) error {
				return writeArray(ctx, w, f.descr, shape, func(b []byte, i int) []byte { return binary.LittleEndian.AppendUint32(b, f.bits(i)) })
			})
			if err != nil {
				return err
			}
		}
	}
	if c.KeepMask != "" {
		keep, err := kernels.KeepMask(calc.opt.Dropout, d)
		if err != nil {
			return err
		}
		shape := keep.Shape()
		return calc.writeTensor(ctx, files, "keep-mask", keep, shape[:])
	}
	return nil
}
