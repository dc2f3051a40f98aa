package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// QK implements backend.Backend: s = q·kᵀ, tile by tile, on the vector kernels or
// by blas32.Gemm. Errors as for Attention.
func (be *Backend) QK(ctx context.Context, s, q, k backend.Tensor) error {
	if err := be.gate.enter(ctx, "qk"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.qk(ctx, s, q, k); err != nil {
		return fmt.Errorf("cpu: qk: %w", err)
	}
	return nil
}

func (be *Backend) qk(ctx context.Context, s, q, k backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "s", Tensor: s}},
		[]backend.Operand{{Name: "q", Tensor: q}, {Name: "k", Tensor: k}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	if be.stageTakes(q.Shape()[backend.Dim]) {
		return be.vectorQK(ctx, s, q, k)
	}
	j := qkJob{d: q.Shape()[backend.Dim], share: q.Shape()[backend.Heads] / k.Shape()[backend.Heads],
		qInPlace: rowsInPlace(q), kInPlace: rowsInPlace(k), sInPlace: rowsInPlace(s)}
	if j.s, err = f32View("s", s); err != nil {
		return err
	}
	if j.q, err = floatView("q", q); err != nil {
		return err
	}
	if j.k, err = floatView("k", k); err != nil {
		return err
	}
	j.rowCut = cutRows(s.Shape(), 1, j.d, be.threads())
	return be.workers.run(ctx, &j, j.tasks, be.threads())
}

// qkJob is one QK call.
type qkJob struct {
	rowCut
	s, q, k                      view
	d, share                     int
	qInPlace, kInPlace, sInPlace bool
}

// size implements job.
func (j *qkJob) size() (floats, rows int) {
	return queryBlock*keyBlock + keyBlock*roundUp(j.d) + j.taskRows()*j.d, 0
}

// task implements job: a stretch of rows of one head against all keys.
func (j *qkJob) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	hk := h / j.share
	buf, kbuf := w.floats(queryBlock*keyBlock), w.floats(keyBlock*roundUp(j.d))
	q, ldq := []float32(nil), j.d
	if j.qInPlace {
		q, ldq = j.q.rowsAt(b, h, from)
	} else {
		q = w.floats(j.taskRows() * j.d)
		j.q.pack(q, j.d, b, h, from, to-from, 0, j.d)
	}
	seqK := j.s.shape[backend.Dim]
	for k0 := 0; k0 < seqK; k0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(keyBlock, seqK-k0)
		k, ldk := keyRows(&j.k, j.kInPlace, kbuf, b, hk, span{k0, k0 + n})
		for i := from; i < to; i += queryBlock {
			m := min(queryBlock, to-i)
			if j.sInPlace {
				s, lds := j.s.rowsAt(b, h, i)
				mulNT(m, n, j.d, q[(i-from)*ldq:], ldq, k, ldk, s[k0:], lds)
				continue
			}
			mulNT(m, n, j.d, q[(i-from)*ldq:], ldq, k, ldk, buf, keyBlock)
			for r := range m {
				j.s.store(buf[r*keyBlock:r*keyBlock+n], b, h, i+r, k0)
			}
		}
	}
	return nil
}

// keyRows returns the rows of span of a key head as rows ldk apart: as they lie
// when inPlace and aligned, else packed into buf.
func keyRows(v *view, inPlace bool, buf []float32, b, hk int, keys span) (k []float32, ldk int) {
	if inPlace {
		if k, ldk = v.rowsAt(b, hk, keys.lo); aligned(k, ldk) {
			return k, ldk
		}
	}
	dim := v.shape[backend.Dim]
	ldk = roundUp(dim)
	v.pack(buf, ldk, b, hk, keys.lo, keys.hi-keys.lo, 0, dim)
	return buf, ldk
}
