package turn

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"

	"github.com/seed90331342/attn/kernels"
)

// Factors multiply stored rows when they are read: those of keys multiply queries, and those of values outputs.
type Factors struct {
	host    []float32      // [Hkv, D]
	inverse kernels.Tensor // [1, Hkv, 1, D]
	dim     int

	mu     sync.Mutex
	byHead map[int]kernels.Tensor // [1, H, 1, D] for H query heads
}

// Turn multiplies stored rows of dim elements, keys (i = 0) or values, by a Hadamard matrix if it is set, and divides
// them by f, KScale or VScale [1, Hkv or 1, 1, dim or 1], unless that is zero.
func (t *Turner) Turn(ctx context.Context, i int, hadamard bool, f kernels.Tensor, kvHeads, dim int) error {
	if hadamard {
		if err := t.addHadamard(ctx, i, dim); err != nil {
			return err
		}
	}
	if f.IsZero() {
		return nil
	}
	name := [2]string{"KScale", "VScale"}[i]
	want := kernels.Shape{1, kvHeads, 1, dim}
	for axis, n := range f.Shape() {
		if n == 1 {
			want[axis] = 1
		}
	}
	if err := f.CheckShape(name, want, "[1, Hkv or 1, 1, D or 1]", kernels.F32, kernels.F16, kernels.BF16); err != nil {
		return err
	}
	given, err := t.Dev.ToFloat32(ctx, f)
	if err != nil {
		return err
	}
	of := &t.factors[i]
	of.dim, of.host, of.byHead = dim, make([]float32, kvHeads*dim), map[int]kernels.Tensor{}
	over := make([]float32, len(of.host))
	for n := range over {
		x := given[(n/dim%want[kernels.Heads])*want[kernels.Dim]+n%dim%want[kernels.Dim]]
		if !(x >= 0x1p-100 && x <= 0x1p100) { // or NaN
			return fmt.Errorf("%s has a factor of %v, it must be from 2^-100 to 2^100: %w", name, x, kernels.ErrOption)
		}
		of.host[n], over[n] = x, 1/x
	}
	of.inverse, err = t.Dev.FromFloat32(ctx, kernels.F32, over, kernels.Shape{1, kvHeads, 1, dim})
	return err
}

// mostHadamard bounds the memory of a Hadamard matrix to 64 MiB.
const mostHadamard = 4096

// addHadamard makes a Turner multiply rows of n elements, keys (i = 0) or values, by Sylvester's n x n matrix
// divided by √n, symmetric and its own inverse:
//
//	h_ij = (-1)^popcount(i & j) / √n
//
// It returns ErrOption unless n is a power of two up to 4096.
func (t *Turner) addHadamard(ctx context.Context, i, n int) (err error) {
	if n > mostHadamard || n&(n-1) != 0 {
		return fmt.Errorf("head size %d has no Hadamard matrix, it must be a power of two up to %d: %w", n, mostHadamard, kernels.ErrOption)
	}
	h, one := make([]float32, n*n), float32(1/math.Sqrt(float64(n)))
	for at := range h {
		h[at] = one - 2*one*float32(bits.OnesCount(uint(at/n&(at%n)))%2)
	}
	t.matrices[i], err = t.Dev.FromFloat32(ctx, kernels.F32, h, kernels.Shape{1, 1, n, n})
	return err
}

// of returns the factors of so many query heads, which the Factors keep.
func (f *Factors) of(ctx context.Context, dev *kernels.Device, heads int) (kernels.Tensor, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if x, ok := f.byHead[heads]; ok {
		return x, nil
	}
	kvHeads := len(f.host) / f.dim
	if heads < 1 || heads%kvHeads != 0 {
		return kernels.Tensor{}, fmt.Errorf("q has %d heads, they must be a multiple of the cache's %d: %w", heads, kvHeads, kernels.ErrShape)
	}
	var all []float32
	for row := range slices.Chunk(f.host, f.dim) {
		all = append(all, slices.Repeat(row, heads/kvHeads)...)
	}
	x, err := dev.FromFloat32(ctx, kernels.F32, all, kernels.Shape{1, heads, 1, f.dim})
	if err == nil {
		f.byHead[heads] = x
	}
	return x, err
}

func (f *Factors) release() {
	f.inverse.Release()
	for _, x := range f.byHead {
		x.Release()
	}
	f.inverse, f.byHead = kernels.Tensor{}, nil
}

// times returns x·f as dtype, in memory. Without f it returns x.
func (t *Turner) times(ctx context.Context, x, f kernels.Tensor, dtype kernels.DType, memory *kernels.Tensor) (kernels.Tensor, error) {
	if f.IsZero() {
		return x, nil
	}
	if err := t.fit(ctx, memory, dtype, x.Shape()); err != nil {
		return x, err
	}
	return *memory, t.multiply(ctx, *memory, x, f)
}

// multiply computes y = x·f, with y as x or elsewhere.
func (t *Turner) multiply(ctx context.Context, y, x, f kernels.Tensor) error {
	f, err := f.Broadcast(x.Shape())
	if err != nil {
		return err
	}
	return t.Dev.Gate(ctx, y, x, f, kernels.Identity)
}
