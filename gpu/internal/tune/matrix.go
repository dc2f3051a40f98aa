package tune

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// Matrices is the largest product of f16 matrices with float32 sums that a device offers. The zero value is none.
type Matrices struct {
	largest  shaders.MatrixPeak
	lanesMax int // of a subgroup
}

// MatricesOf returns the matrices of a device that kernels use.
func MatricesOf(f port.Features) Matrices {
	k := shaders.MatrixPeak{Lanes: int(f.SubgroupMin)}
	for _, x := range f.Matrices {
		if f.F16 && x.Component == port.F16 && x.Result == port.F32 && int(x.M*x.N*x.K) > k.M*k.N*k.K {
			k.M, k.N, k.K = int(x.M), int(x.N), int(x.K)
		}
	}
	return Matrices{k, int(f.SubgroupMax)}
}

const (
	maxMatrixDim = 256
	// matrixWords is the most 32-bit registers of a thread that queries and output take where two workgroups of 256
	// threads run at once: 128 registers less those for scores, loads and addresses.
	matrixWords = 48
	matrixRows  = 128 // query rows of a workgroup, which share its keys and values, at most
)

// Largest returns the largest product, or why there is none.
func (m Matrices) Largest() (k shaders.MatrixPeak, whyNot string) {
	switch k = m.largest; {
	case k.M == 0:
		whyNot = "the device lists no products of f16 matrices with float32 sums"
	case k.Lanes != m.lanesMax:
		whyNot = fmt.Sprintf("subgroups have %d to %d lanes, matrices need one size", k.Lanes, m.lanesMax)
	}
	return k, whyNot
}

// Kernel returns the kernel on matrix units for calls of shape s with heads of dim elements, by rule, without what depends
// on options. It returns the reason when there is none. Rows, heads and batches have no influence on M, N, K and Keys, on
// which bits depend.
func (m Matrices) Kernel(s Shape, dim int) (k shaders.Matrix, whyNot string) {
	x, whyNot := m.Largest()
	most := maxMatrixDim
	if s.In == backend.F32 { // two numbers of f16 for each element
		most /= 2
	}
	if whyNot == "" && max(dim, s.ValueDim) > most {
		whyNot = fmt.Sprintf("matrices hold heads of up to %d elements of %v", most, s.In)
	}
	if whyNot != "" {
		return k, whyNot
	}
	k.M, k.N, k.K = x.M, x.N, x.K
	k.In, k.KV, k.Out16 = shaders.Type(s.In), shaders.Type(s.KV), s.Half
	k.Lanes, k.Ahead = x.Lanes, !s.Software
	k.Depth, k.Columns = roundUp(dim, k.K), roundUp(s.ValueDim, k.N)
	if s.Wide {
		k.Vec = 1
	}
	if s.Eights && s.In != backend.F32 && s.KV == s.In {
		k.Vec = 2
	}
	k.Full = s.Wide && k.Depth == dim && k.Columns == s.ValueDim
	sizes, busy := []int{32, 16, 8}, Busy/2
	if s.In == backend.F32 || k.M*(k.Depth/2+k.Columns) <= k.Lanes*matrixWords { // with 16 keys, two workgroups run where one does with 32
		sizes = []int{16, 32, 8}
	}
	if s.Software { // whose compilers take a second for a product of matrices
		sizes, busy = []int{8, 16, 32}, softwareBusy
	}
	for _, least := range []int{matrixRows / 2, 1} { // fewer rows share keys and values only where memory is scarce
		for _, k.Keys = range sizes {
			if step := 4 * max(k.Lanes/k.M, 1); k.Keys%k.N != 0 || k.Keys%k.K != 0 || k.Keys%step != 0 || max(k.M, k.Lanes)%min(k.M, k.Lanes) != 0 {
				continue
			}
			for k.TY = max(matrixRows/k.M, 1); k.TY*k.M >= least && k.TY > 0; k.TY /= 2 {
				if k.TY*k.Lanes <= s.Limits.Threads && shaders.Describe(k).WorkgroupMemory <= s.Limits.Memory {
					for k.TY > 1 && (k.TY*k.M >= 2*s.SeqQ || s.Heads*((s.SeqQ+k.TY*k.M-1)/(k.TY*k.M)) < busy) {
						k.TY /= 2 // idle rows, or too few workgroups to keep the device busy
					}
					return k, ""
				}
			}
		}
	}
	return k, fmt.Sprintf("matrices of %dx%dx%d for heads of %d and %d elements fit no workgroup of up to %d threads and %d bytes",
		k.M, k.N, k.K, dim, s.ValueDim, s.Limits.Threads, s.Limits.Memory)
}

const (
	maxDecodeDim = 128 // of decoding: a subgroup has no registers for more
	matrixSplit  = 256 // keys of a workgroup of decoding
	// loadWords is the most registers of a thread of decoding that hold keys and values on their way.
	loadWords = 64
)

// Decode returns the kernel of a split of the keys, whose workgroups are one subgroup: many run at once. It has as many keys a tile as
// loads ahead have registers. Bits depend on heads, the type and the device alone.
func (m Matrices) Decode(s Shape, dim int) (k shaders.Matrix, whyNot string) {
	s.SeqQ = 1
	if k, whyNot = m.Kernel(s, dim); whyNot != "" {
		return k, whyNot
	}
	if s.In == backend.F32 || max(dim, s.ValueDim) > maxDecodeDim {
		return k, fmt.Sprintf("matrices decode heads of up to %d elements of f16, bf16 and f8", maxDecodeDim)
	}
	k.Split, k.Out16 = matrixSplit, false // splitmerge.wgsl writes o
	least, words := max(k.N, k.K, 4*max(k.Lanes/k.M, 1)), (k.Depth+k.Columns)*s.KV.Size()/4
	for k.Keys = 32; k.Keys > least && (s.Software || k.Keys*words > loadWords*k.Lanes || shaders.Describe(k).WorkgroupMemory > s.Limits.Memory); {
		k.Keys /= 2
	}
	k.Ahead = k.Ahead && k.Keys*words <= loadWords*k.Lanes
	return k, ""
}

const maxGradientDim = 128 // of gradients on matrix units

// Gradient returns the kernel of gradients on matrix units for heads of dim and valueDim elements of f16 or bf16, without what depends on
// options, or the reason when there is none.
func (m Matrices) Gradient(of shaders.Result, t shaders.Type, dim, valueDim int, l Limits) (k shaders.MatrixGradient, whyNot string) {
	x, whyNot := m.Largest()
	if whyNot == "" && max(dim, valueDim) > maxGradientDim {
		whyNot = fmt.Sprintf("gradients on matrices take heads of up to %d elements", maxGradientDim)
	}
	if whyNot != "" {
		return k, whyNot
	}
	k = shaders.MatrixGradient{In: t, KV: t, DO: t, Of: shaders.DKV, M: x.M, N: x.N, K: x.K, Lanes: x.Lanes}
	k.Depth, k.Columns = roundUp(dim, max(k.N, k.K)), roundUp(valueDim, max(k.N, k.K))
	k.Others = max(k.M, k.N, k.K, 4*k.Lanes/k.M)
	for k.TY = max(matrixRows/k.M, 1); k.TY > 0 && k.Others <= 32 && k.Others%max(k.N, k.K) == 0 && k.Lanes%k.M == 0 && k.M%4 == 0; k.TY /= 2 {
		if k.TY*k.Lanes <= l.Threads && shaders.Describe(k).WorkgroupMemory <= l.Memory { // where dK and dV fit, dQ does
			k.Of = of
			return k, ""
		}
	}
	return k, fmt.Sprintf("gradients on matrices of %dx%dx%d for heads of %d and %d elements fit no workgroup of up to %d threads and %d bytes",
		k.M, k.N, k.K, dim, valueDim, l.Threads, l.Memory)
}

// MatrixLoops returns a bound on the rounds of loops that a thread makes for one tile of k.
func MatrixLoops(k shaders.Matrix) int {
	c := shaders.Describe(k).Constants
	turns := int(c["TURNS"] * c["EACH"] * c["FOURS"])
	return 1 + int(c["KN"]+c["VN"]) + int(c["TURNS"]) + turns*(1+k.Keys) + 8
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }
