package cpu

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// guarded returns memory for n elements with a page before and one behind it
// that may not be touched: against the one behind, or else against the one
// before.
func guarded[T any](t *testing.T, n int, atEnd bool) []T {
	t.Helper()
	page := os.Getpagesize()
	bytes := n * int(unsafe.Sizeof(*new(T)))
	inner := (bytes + page - 1) / page * page
	mem, err := unix.Mmap(-1, 0, inner+2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Skipf("mmap: %v", err)
	}
	t.Cleanup(func() {
		must.Do(t, unix.Munmap(mem))
	})
	for _, guard := range [][]byte{mem[:page], mem[page+inner:]} {
		if err := unix.Mprotect(guard, unix.PROT_NONE); err != nil {
			t.Skipf("mprotect: %v", err)
		}
	}
	at := page
	if atEnd {
		at += inner - bytes
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&mem[at])), n)
}

// guardedTensor returns a tensor of drawn elements in such memory.
func guardedTensor[T float32 | uint16 | bool](t *testing.T, dtype backend.DType, atEnd bool, shape backend.Shape, draw func() T) backend.Tensor {
	data := guarded[T](t, shape.Elements(), atEnd)
	for i := range data {
		data[i] = draw()
	}
	return must.Get(backend.Host(data, dtype, shape))(t)
}

// TestGuardPages runs calls whose every operand lies against memory that may not
// be touched: one element read or written outside ends the test's process. The
// shapes are one off the edges of tiles, vectors and key blocks.
func TestGuardPages(t *testing.T) {
	skipWithRace(t)
	eachTier(t, testGuardPages)
}

func testGuardPages(t *testing.T, tier string) {
	rng := rand.New(rand.NewPCG(5, 6))
	tensor := func(dtype backend.DType, atEnd bool, shape backend.Shape) backend.Tensor {
		switch dtype {
		case backend.F32:
			return guardedTensor(t, dtype, atEnd, shape, func() float32 { return rng.Float32() - 0.5 })
		case backend.Bool:
			return guardedTensor(t, dtype, atEnd, shape, func() bool { return rng.IntN(3) > 0 })
		}
		return guardedTensor(t, dtype, atEnd, shape, func() uint16 { return uint16(rng.IntN(0x3800)) })
	}
	for threads := 1; threads <= 3; threads++ {
		x := []backend.Tensor{tensor(backend.F32, false, backend.Shape{1, 1, 256, 64}), tensor(backend.F32, true, backend.Shape{1, 1, 257, 63})}
		must.Get(open(t, Options{Tier: tier, Threads: threads}).ReadBandwidth(t.Context(), x...))(t)
	}
	be := open(t, Options{Tier: tier})
	for _, n := range []struct{ heads, sq, sk, dim, dv int }{
		{2, 1, 1, 1, 1}, {2, 1, 131, 17, 33}, {2, 1, 127, 16, 16}, {2, 1, 129, 64, 128}, {2, 7, 45, 31, 1}, {2, 65, 66, 20, 19}, {2, 63, 130, 16, 40},
		{2, 66, 127, 3, 5}, {2, 130, 259, 64, 64}, {2, 24, 25, 24, 8}, {2, 2, 1030, 48, 15}, {2, 3, 131, 17, 35}, {16, 1, 144, 16, 9}, {2, 2, 131, 24, 40},
	} {
		for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			for _, atEnd := range []bool{false, true} {
				for _, what := range []string{"plain", "causal", "slopes", "bias", "mask", "blocks", "relative", "relative and bias"} {
					shape := func(heads, seq, dim int) backend.Shape { return backend.Shape{1, heads, seq, dim} }
					c := backend.Call{Q: tensor(dtype, atEnd, shape(n.heads, n.sq, n.dim)), K: tensor(dtype, atEnd, shape(1, n.sk, n.dim)), V: tensor(dtype, atEnd, shape(1, n.sk, n.dv)),
						O: tensor(dtype, atEnd, shape(n.heads, n.sq, n.dv)), LSE: tensor(backend.F32, atEnd, shape(n.heads, n.sq, 1)),
						Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
					switch what {
					case "causal":
						c.Visible = backend.Visibility{Left: 40, Offset: n.sk - n.sq}
					case "slopes":
						c.Slopes = make([]float32, n.heads)
					case "bias":
						c.Bias = tensor(dtype, atEnd, shape(n.heads, n.sq, n.sk))
					case "relative", "relative and bias":
						c.Relative = tensor(dtype, atEnd, shape(n.heads, 1, n.sq+n.sk-1))
						if what != "relative" {
							c.Bias = tensor(dtype, atEnd, shape(n.heads, n.sq, n.sk))
						}
					case "blocks":
						c.BlockQ, c.BlockK = 16, 8
						c.Blocks = tensor(backend.Bool, atEnd, shape(n.heads, tile.CeilDiv(n.sq, 16), tile.CeilDiv(n.sk, 8)))
					case "mask":
						c.Mask = tensor(backend.Bool, atEnd, shape(n.heads, n.sq, n.sk))
					}
					if err := be.Attention(t.Context(), &c); err != nil {
						t.Fatal(fmt.Errorf("%+v %v %s: %w", n, dtype, what, err))
					}
				}
				s := tensor(backend.F32, atEnd, backend.Shape{1, 2, n.sq, n.sk})
				q, k, v := tensor(dtype, atEnd, backend.Shape{1, 2, n.sq, n.dim}), tensor(dtype, atEnd, backend.Shape{1, 1, n.sk, n.dim}), tensor(dtype, atEnd, backend.Shape{1, 1, n.sk, n.dv})
				o := tensor(dtype, atEnd, backend.Shape{1, 2, n.sq, n.dv})
				p := backend.Problem{Scale: 1, Visible: backend.Visibility{Left: 30, Right: 10}}
				for _, err := range []error{be.QK(t.Context(), s, q, k), be.Softmax(t.Context(), s, backend.Tensor{}, &p), be.PV(t.Context(), o, s, v)} {
					must.Do(t, err)
				}
			}
		}
	}
}
