package gpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

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
			return queue.Step{Kernel: kernel, Groups: ceil(p.All, each), Each: float64(each * p.Dim * normOps), Params: &p}
		}), nil
	})
}
