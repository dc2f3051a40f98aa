package turn

import (
	"context"
	"fmt"
	"math"
	"math/bits"

	"github.com/seed90331342/attn/kernels"
)

// mostHadamard bounds the memory of a Hadamard matrix to 64 MiB.
const mostHadamard = 4096

// addHadamard makes a Turner multiply rows of n elements, keys (i = 0) or values, by Sylvester's n x n matrix
// divided by √n, symmetric and its own inverse:
//
//	h_ij = (-1)^popcount(i & j) / √n
//
// It returns ErrOption unless n is a power of two up to 4096.
func (p *Turner) addHadamard(ctx context.Context, i, n int) (err error) {
	if n > mostHadamard || n&(n-1) != 0 {
		return fmt.Errorf("head size %d has no Hadamard matrix, it must be a power of two up to %d: %w", n, mostHadamard, kernels.ErrOption)
	}
	h, one := make([]float32, n*n), float32(1/math.Sqrt(float64(n)))
	for at := range h {
		h[at] = one - 2*one*float32(bits.OnesCount(uint(at/n&(at%n)))%2)
	}
	p.matrices[i], err = p.Dev.FromFloat32(ctx, kernels.F32, h, kernels.Shape{1, 1, n, n})
	return err
}
