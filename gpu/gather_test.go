package gpu

import (
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// turned returns a tensor of f(row, column) stored column by column, as the transposed operands of other libraries are.
func turned(t testing.TB, b *Backend, dtype backend.DType, shape backend.Shape, f func(i int) float32) backend.Tensor {
	t.Helper()
	stored := backend.Shape{shape[0], shape[1], shape[3], shape[2]}
	x := tensor(t, b, dtype, stored, func(i int) float32 {
		column, row := i/stored[3]%stored[2], i%stored[3]
		return f(row*stored[2] + column)
	})
	return must.Get(x.Swap(backend.Seq, backend.Dim))(t)
}

// TestTransposedOperands has keys, values and the output with columns too far apart for a binding to hold a tile, in
// one buffer and in several. With odd lengths, 16-bit columns begin in the middle of a word.
func TestTransposedOperands(t *testing.T) {
	const sq, sk, d = 333, 1027, 40
	ways := []way{
		{name: "bindings of 40 KiB", opt: Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 40 << 10}}},
		{name: "buffers of 64 KiB", opt: Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 40 << 10, MaxBufferSize: 64 << 10}}},
	}
	for _, dtype := range []backend.DType{backend.F32, backend.BF16} {
		sameOn(t, dtype.String(), ways, func(b *Backend, _ way) [][]float32 {
			c := &backend.Call{
				Q:       turned(t, b, dtype, backend.Shape{1, 1, sq, d}, wave),
				K:       turned(t, b, dtype, backend.Shape{1, 1, sk, d}, wave),
				V:       turned(t, b, dtype, backend.Shape{1, 1, sk, d}, func(i int) float32 { return wave(i + 1) }),
				O:       must.Get(alloc(t, b, dtype, backend.Shape{1, 1, d, sq}).Swap(backend.Seq, backend.Dim))(t),
				Problem: backend.Problem{Scale: 0.1, Visible: backend.Everything()},
			}
			check(t, b.Attention(t.Context(), c))
			return [][]float32{floats(t, b, c.O)}
		})
	}
}
