package main

import (
	"context"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// stack is a matrix for each batch, row by row.
type stack struct {
	batch, rows, cols int
	data              []float32
}

// at returns the matrix of batch b.
func (s stack) at(b int) matrix {
	n := s.rows * s.cols
	return matrix{s.rows, s.cols, s.data[b*n : (b+1)*n]}
}

// matrix is rows x cols numbers, row by row.
type matrix struct {
	rows, cols int
	data       []float32
}

func (m matrix) row(i int) []float32 { return m.data[i*m.cols : (i+1)*m.cols] }

// steps are the tensors that lead from the input to the output, as the backend
// computes them.
type steps struct {
	scale           float64
	x, q, k, v      stack
	scores, weights stack // scores with the scale
	output          stack
	deviceV         backend.Tensor // v, kept for rounded weights
	be              backend.Backend
	release         []backend.Tensor
}

// computeSteps runs a walk-through on be, stage by stage. The caller calls close.
func computeSteps(ctx context.Context, be backend.Backend, wt *walkthrough) (*steps, error) {
	st := &steps{be: be, scale: 1 / math.Sqrt(float64(wt.dim))}
	if wt.Scale != nil {
		st.scale = *wt.Scale
	}
	if err := st.run(ctx, wt); err != nil {
		st.close()
		return nil, err
	}
	return st, nil
}

func (st *steps) close() {
	for _, t := range st.release {
		t.Release()
	}
}

func (st *steps) run(ctx context.Context, wt *walkthrough) error {
	st.x = stack{wt.batch, wt.seq, wt.model, wt.x.float32s()}
	x, err := st.upload(ctx, st.x.data, backend.Shape{wt.batch, 1, wt.seq, wt.model})
	if err != nil {
		return err
	}
	var p nn.Projections
	for i, to := range [][2]*backend.Tensor{{&p.Wq, &p.Bq}, {&p.Wk, &p.Bk}, {&p.Wv, &p.Bv}} {
		if err := st.uploadProjection(ctx, wt.projections()[i], wt.model, to); err != nil {
			return err
		}
	}
	q, k, v, err := p.Apply(ctx, kernels.NewDevice(st.be), x)
	if err != nil {
		return err
	}
	st.deviceV = v
	st.release = append(st.release, q, k, v)
	for _, f := range []struct {
		to *stack
		t  backend.Tensor
	}{{&st.q, q}, {&st.k, k}, {&st.v, v}} {
		if *f.to, err = st.download(ctx, f.t); err != nil {
			return err
		}
	}
	s, err := kernels.QK(ctx, st.be, q, k)
	if err != nil {
		return err
	}
	st.release = append(st.release, s)
	if st.scores, err = st.download(ctx, s); err != nil {
		return err
	}
	for i := range st.scores.data {
		st.scores.data[i] *= float32(st.scale)
	}
	if err := kernels.Softmax(ctx, st.be, s, backend.Tensor{}, kernels.Options{Scale: &st.scale}); err != nil {
		return err
	}
	if st.weights, err = st.download(ctx, s); err != nil {
		return err
	}
	st.output, err = st.weigh(ctx, s)
	return err
}

// uploadProjection puts a weight, the identity where the file has none, and a
// bias, if any, on the device.
func (st *steps) uploadProjection(ctx context.Context, p projection, model int, to [2]*backend.Tensor) error {
	n := p.columns(model)
	var w []float32
	if p.w != nil {
		w = p.w.float32s()
	} else {
		w = make([]float32, n*n)
		for i := range n {
			w[i*n+i] = 1
		}
	}
	var err error
	if *to[0], err = st.upload(ctx, w, backend.Shape{1, 1, model, n}); err == nil && p.b != nil {
		*to[1], err = st.upload(ctx, p.b.float32s(), backend.Shape{1, 1, 1, n})
	}
	return err
}

// weigh computes weights·v on the backend.
func (st *steps) weigh(ctx context.Context, weights backend.Tensor) (stack, error) {
	o, err := kernels.PV(ctx, st.be, weights, st.deviceV)
	if err != nil {
		return stack{}, err
	}
	defer o.Release()
	return st.download(ctx, o)
}

// rounded returns the weights rounded to so many decimals (see roundRow), and
// the output that they give.
func (st *steps) rounded(ctx context.Context, decimals int) (weights, output stack, err error) {
	weights = st.weights
	weights.data = make([]float32, 0, len(st.weights.data))
	row := make([]float64, weights.cols)
	for at := 0; at < len(st.weights.data); at += weights.cols {
		for j := range row {
			row[j] = float64(st.weights.data[at+j])
		}
		for _, w := range roundRow(row, decimals) {
			weights.data = append(weights.data, float32(w))
		}
	}
	w, err := st.upload(ctx, weights.data, backend.Shape{weights.batch, 1, weights.rows, weights.cols})
	if err != nil {
		return stack{}, stack{}, err
	}
	output, err = st.weigh(ctx, w)
	return weights, output, err
}

// weighted returns the values of one batch times the weight that a query gives
// them: [key][query][channel].
func weighted(weights, values matrix) []float32 {
	out := make([]float32, 0, weights.cols*weights.rows*values.cols)
	for key := range weights.cols {
		for query := range weights.rows {
			w := weights.row(query)[key]
			for _, v := range values.row(key) {
				out = append(out, w*v)
			}
		}
	}
	return out
}

func (st *steps) upload(ctx context.Context, data []float32, shape backend.Shape) (backend.Tensor, error) {
	t, err := kernels.FromFloat32(ctx, st.be, backend.F32, data, shape)
	if err == nil {
		st.release = append(st.release, t)
	}
	return t, err
}

// download copies a tensor [B, 1, rows, cols].
func (st *steps) download(ctx context.Context, t backend.Tensor) (stack, error) {
	s := t.Shape()
	data, err := kernels.Float32s(ctx, st.be, t)
	return stack{s[backend.Batch], s[backend.Seq], s[backend.Dim], data}, err
}
