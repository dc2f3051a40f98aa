package op

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/seed90331342/attn/backend"
)

// mostHadamard bounds the memory of a Hadamard matrix to 64 MiB.
const mostHadamard = 4096

// Hadamard returns Sylvester's n x n matrix divided by √n, symmetric and its own inverse:
//
//	h_ij = (-1)^popcount(i & j) / √n
//
// It returns ErrOption unless n is a power of two up to 4096.
func Hadamard(n int) ([]float32, error) {
	if n > mostHadamard || n&(n-1) != 0 {
		return nil, fmt.Errorf("head size %d has no Hadamard matrix, it must be a power of two up to %d: %w", n, mostHadamard, backend.ErrOption)
	}
	h, one := make([]float32, n*n), float32(1/math.Sqrt(float64(n)))
	for i := range h {
		h[i] = one - 2*one*float32(bits.OnesCount(uint(i/n&(i%n)))%2)
	}
	return h, nil
}
