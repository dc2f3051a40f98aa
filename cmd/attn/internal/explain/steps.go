package explain

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/kernels"
)

// steps are the tensors from the input to the output, as the device computes them.
type steps struct {
	x, q, k, v      matrix.Matrix
	scores, weights matrix.Matrix // scores include the scale
	capped          matrix.Matrix // scores after the softcap, if there is one
	output          matrix.Matrix
	rounded         *steps // of --round: the same with rounded weights and the output that follows from them
	decimals        int    // of rounded weights

	dev           *kernels.Device
	device        [3]kernels.Tensor // q, k and v
	deviceWeights kernels.Tensor
	release       []kernels.Tensor
}

// computeSteps computes a walk-through stage by stage. The caller calls close.
func computeSteps(ctx context.Context, dev *kernels.Device, wt *walkthrough) (*steps, error) {
	st := &steps{dev: dev}
	err := st.run(ctx, wt)
	if err != nil {
		st.close()
	}
	return st, err
}

func (st *steps) close() {
	for _, t := range st.release {
		t.Release()
	}
}

func (st *steps) run(ctx context.Context, wt *walkthrough) error {
	st.x = wt.x.matrix()
	x, err := st.upload(ctx, st.x)
	if err != nil {
		return err
	}
	for i, to := range []*matrix.Matrix{&st.q, &st.k, &st.v} {
		if st.device[i], err = st.project(ctx, x, wt.projections[i]); err != nil {
			return err
		}
		if *to, err = st.download(ctx, st.device[i]); err != nil {
			return err
		}
	}
	s, err := st.dev.QK(ctx, st.device[0], st.device[1])
	if err != nil {
		return err
	}
	st.release = append(st.release, s)
	if st.scores, err = st.download(ctx, s); err != nil {
		return err
	}
	scale := wt.scale()
	for i := range st.scores.Data {
		st.scores.Data[i] *= float32(scale)
	}
	if c := wt.Softcap; c > 0 {
		st.capped = st.scores
		st.capped.Data = slices.Clone(st.scores.Data)
		for i, x := range st.capped.Data {
			st.capped.Data[i] = float32(c * math.Tanh(float64(x)/c))
		}
	}
	if err := st.dev.Softmax(ctx, s, kernels.Tensor{}, kernels.Options{Scale: &scale, Softcap: wt.Softcap}); err != nil {
		return err
	}
	if st.weights, err = st.download(ctx, s); err != nil {
		return err
	}
	st.deviceWeights = s
	st.output, err = st.product(ctx, s, st.device[2])
	return err
}

// round computes st.rounded.
func (st *steps) round(ctx context.Context, decimals int) error {
	r := *st
	r.decimals, r.weights.Data = decimals, nil
	for at := 0; at < len(st.weights.Data); at += st.weights.Cols {
		r.weights.Data = append(r.weights.Data, roundRow(st.weights.Data[at:][:st.weights.Cols], decimals)...)
	}
	w, err := st.upload(ctx, r.weights)
	if err == nil {
		r.output, err = st.product(ctx, w, st.device[2])
	}
	st.rounded = &r
	return err
}

// roundRow rounds a row of weights to so many decimals and keeps its sum, as published walk-throughs do: 0.063, 0.468,
// 0.468 becomes 0, 0.5, 0.5 and not 0.1, 0.5, 0.5. It cuts each weight and gives the missing units to the largest
// remainders; of equal ones to the larger weight, then to the earlier key.
func roundRow(w []float32, decimals int) []float32 {
	unit := math.Pow10(decimals)
	whole, order := make([]float64, len(w)), make([]int, len(w))
	units := func(i int) float64 {
		x := float64(w[i]) * unit
		if near := math.Round(x); math.Abs(x-near) <= 8*u*x { // 0.3 is not a float32
			return near
		}
		return x
	}
	missing := 0.0
	for i := range w {
		order[i], whole[i] = i, math.Floor(units(i))
		missing += units(i) - whole[i]
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(units(b)-whole[b], units(a)-whole[a]), cmp.Compare(w[b], w[a]))
	})
	for n, i := range order {
		if float64(n) < math.Round(missing) {
			whole[i]++
		}
	}
	out := make([]float32, len(w))
	for i, x := range whole {
		out[i] = float32(x / unit)
	}
	return out
}

// project computes x·w + b, with the identity for a missing w.
func (st *steps) project(ctx context.Context, x kernels.Tensor, p projection) (y kernels.Tensor, err error) {
	if p.w == nil {
		return x, nil
	}
	weight := p.w.matrix()
	w, err := st.upload(ctx, weight)
	if err != nil {
		return y, err
	}
	var b kernels.Tensor
	if p.b != nil {
		if b, err = st.upload(ctx, p.b.matrix()); err != nil {
			return y, err
		}
	}
	shape := x.Shape()
	shape[kernels.Dim] = weight.Cols
	if y, err = st.dev.Alloc(ctx, kernels.F32, shape); err != nil {
		return y, err
	}
	st.release = append(st.release, y)
	return y, st.dev.Project(ctx, y, x, w, b)
}

// product computes a·b.
func (st *steps) product(ctx context.Context, a, b kernels.Tensor) (matrix.Matrix, error) {
	o, err := st.dev.PV(ctx, a, b)
	if err != nil {
		return matrix.Matrix{}, err
	}
	defer o.Release()
	return st.download(ctx, o)
}

func (st *steps) upload(ctx context.Context, s matrix.Matrix) (kernels.Tensor, error) {
	t, err := st.dev.FromFloat32(ctx, kernels.F32, s.Data, kernels.Shape{s.Batch, 1, s.Rows, s.Cols})
	if err == nil {
		st.release = append(st.release, t)
	}
	return t, err
}

// download copies a tensor [B, 1, rows, cols].
func (st *steps) download(ctx context.Context, t kernels.Tensor) (matrix.Matrix, error) {
	s := t.Shape()
	data, err := st.dev.ToFloat32(ctx, t)
	return matrix.Matrix{Batch: s[kernels.Batch], Rows: s[kernels.Seq], Cols: s[kernels.Dim], Data: data}, err
}
