package explain

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/kernels"
)

// gradients are the steps of the backward pass, as the device computes their products:
//
//	dV = Pᵀ·dO    dP = dO·Vᵀ    D = rowsum(dO∘O)    dS = P∘(dP - D)
//	dX = dS∘(1 - tanh²)                        of scores before the softcap c, tanh = capped/c
//	dQ = scale·dX·K    dK = scale·dXᵀ·Q
type gradients struct {
	dO, dV, dP, dots, dS, dX matrix.Matrix // dX is dS without a softcap
	dQ, dK                   matrix.Matrix
}

// differentiate computes the backward pass from the gradient of the output: that of the file, or 1 for each number.
func (st *steps) differentiate(ctx context.Context, wt *walkthrough) (*gradients, error) {
	g := &gradients{dO: st.output}
	if wt.dOutputs != nil {
		g.dO = wt.dOutputs.matrix()
	} else {
		g.dO.Data = slices.Repeat([]float32{1}, len(st.output.Data))
	}
	dO, err := st.upload(ctx, g.dO)
	if err != nil {
		return nil, err
	}
	if g.dV, err = st.transposedProduct(ctx, st.deviceWeights, dO); err != nil {
		return nil, err
	}
	dP, err := st.dev.QK(ctx, dO, st.device[2])
	if err != nil {
		return nil, err
	}
	st.release = append(st.release, dP)
	if g.dP, err = st.download(ctx, dP); err != nil {
		return nil, err
	}
	g.dots = matrix.Matrix{Batch: g.dO.Batch, Rows: g.dO.Rows, Cols: 1}
	for at := 0; at < len(g.dO.Data); at += g.dO.Cols {
		sum := float32(0)
		for c, y := range g.dO.Data[at : at+g.dO.Cols] {
			sum += y * st.output.Data[at+c]
		}
		g.dots.Data = append(g.dots.Data, sum)
	}
	g.dS = g.dP
	g.dS.Data = make([]float32, len(g.dP.Data))
	for i, p := range st.weights.Data {
		g.dS.Data[i] = p * (g.dP.Data[i] - g.dots.Data[i/g.dP.Cols])
	}
	g.dX = g.dS
	if wt.Softcap > 0 {
		g.dX.Data = slices.Clone(g.dS.Data)
		for i, s := range st.capped.Data {
			tanh := s / float32(wt.Softcap)
			g.dX.Data[i] *= (1 - tanh) * (1 + tanh)
		}
	}
	dX, err := st.upload(ctx, g.dX)
	if err != nil {
		return nil, err
	}
	if g.dQ, err = st.product(ctx, dX, st.device[1]); err != nil {
		return nil, err
	}
	if g.dK, err = st.transposedProduct(ctx, dX, st.device[0]); err != nil {
		return nil, err
	}
	for _, m := range []matrix.Matrix{g.dQ, g.dK} {
		for i := range m.Data {
			m.Data[i] *= float32(wt.scale())
		}
	}
	return g, nil
}

// transposedProduct computes aᵀ·b.
func (st *steps) transposedProduct(ctx context.Context, a, b kernels.Tensor) (matrix.Matrix, error) {
	turned, err := a.Swap(kernels.Seq, kernels.Dim)
	if err != nil {
		return matrix.Matrix{}, err
	}
	return st.product(ctx, turned, b)
}

// gradients prints the backward pass of one batch.
func (e explanation) gradients(b int) {
	g := e.grads
	tokens := e.wt.Labels
	fmt.Fprintf(e, "\nGradients of a loss: dY has its derivative with respect to each number of Y\n")
	from := "1, as the loss is the sum of the outputs"
	if e.wt.dOutputs != nil {
		from = "d_outputs of the file"
	}
	e.step(b, g.dO, nil, "dO = %s", from)
	e.step(b, g.dV, nil, "dV = Pᵀ·dO, with the weights P")
	e.step(b, g.dP, tokens, "dP = dO·Vᵀ")
	e.step(b, g.dots, nil, "D, for each query the sum of dO ∘ O")
	e.step(b, g.dS, tokens, "dS = P ∘ (dP - D), of the scores after the scale%s", map[bool]string{true: " and the softcap"}[e.wt.Softcap > 0])
	of, scale := "dS", float32(e.wt.scale())
	if e.wt.Softcap > 0 {
		of = "dX"
		e.step(b, g.dX, tokens, "dX = dS ∘ (1 - tanh²(scores/%v)), of the scores before the softcap", e.wt.Softcap)
	}
	e.step(b, g.dQ, nil, "dQ = %v · %s·K", scale, of)
	e.step(b, g.dK, nil, "dK = %v · %sᵀ·Q", scale, of)
}
