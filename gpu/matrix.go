package gpu

import (
	"errors"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// matricesOf returns those of a device's matrices that kernels use.
func matricesOf(f port.Features) tune.Matrices {
	m := tune.Matrices{LanesMin: int(f.SubgroupMin), LanesMax: int(f.SubgroupMax)}
	for _, x := range f.Matrices {
		if f.F16 && x.Component == port.F16 && x.Result == port.F32 {
			m.Sizes = append(m.Sizes, [3]int{int(x.M), int(x.N), int(x.K)})
		}
	}
	return m
}

// newMatrix returns c with the kernel on matrix units that choose picks, or the reason why it cannot run there.
func (b *Backend) newMatrix(c *backend.Call, choose func(s tune.Shape, dim int) (shaders.Matrix, string)) (x *prefill, whyNot string, err error) {
	t := c.V.DType()
	if !c.LowPrecision || t.Quantised() || c.Q.DType() != t || c.K.DType() != t {
		return nil, "products on matrix units need LowPrecision, with q, k and v of one type: f16, bf16 or f32", nil
	}
	a, err := b.newAttention(c)
	if err != nil {
		return nil, "", err
	}
	k, whyNot := choose(a.shape(), a.d.Dim)
	if whyNot != "" {
		return nil, whyNot, nil
	}
	x = &prefill{attention: a, path: "matrix units WGSL", matrices: fmt.Sprintf("f16 matrices of %dx%dx%d", k.M, k.N, k.K)}
	x.matrices += map[backend.DType]string{backend.BF16: ", to which bf16 is scaled exactly", backend.F32: ", three for one of f32"}[t]
	if err := x.newCutter(prefillBuffers); err != nil {
		return nil, "", err
	}
	k.Both, k.Paged, k.Listed, k.Paired = x.both, x.HasTable(), x.listed(), x.kinds != tune.Pairs{}
	x.kernel, x.rows, x.keys = x.modded(k, false), k.TY*k.M, k.Keys
	x.why = fmt.Sprintf("%d subgroups of %d lanes", k.TY, k.Lanes)
	cutter := x.cutter
	cutter.Granule = k.Keys
	cutter.AlignGranules()
	made := shaders.Describe(k).Constants
	loops := tune.MatrixLoops(k) + x.rounds(2*int(made["EACH"]*made["FOURS"]))
	cutter.Most[cut.Col] = cut.LongestChunk(k.Keys, loops, x.each*float64(x.rows*k.Keys), b.dev.ChunkWork(x.kernel))
	x.leave(16 * uint64(made["AREA"]))
	if cutter.Room == 0 {
		l := &b.dev.Limits
		cutter.MaxState = min(queue.MaxWindow(*l), l.MaxBufferSize, maxFlashState)
	}
	if err := cutter.Fits(x.all()); errors.Is(err, backend.ErrMemory) {
		return nil, "", err
	} else if err != nil {
		return nil, err.Error(), nil
	}
	return x, "", x.check(x.kernel)
}
