package gpu

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// turned returns a tensor of f(row, column) stored column by column, as the transposed
// operands of other libraries are.
func turned(t testing.TB, b *Backend, dtype backend.DType, shape backend.Shape, f func(i int) float32) backend.Tensor {
	t.Helper()
	stored := backend.Shape{shape[0], shape[1], shape[3], shape[2]}
	data := make([]float32, stored.Elements())
	for i := range data {
		column, row := i/stored[3]%stored[2], i%stored[3]
		data[i] = f(row*stored[2] + column)
	}
	return must.Get(filled(t, b, dtype, data, stored).Swap(backend.Seq, backend.Dim))(t)
}

// TestTransposedOperands has keys, values and the output with columns too far apart for a
// binding to hold a tile, in one buffer and in several. With odd lengths, 16-bit columns
// begin in the middle of a word.
func TestTransposedOperands(t *testing.T) {
	const sq, sk, d = 333, 1027, 40
	for _, dtype := range []backend.DType{backend.F32, backend.BF16} {
		run := func(opt Options) []uint32 {
			b := open(t, opt)
			defer b.Close() // before the next one is opened
			o := must.Get(alloc(t, b, dtype, backend.Shape{1, 1, d, sq}).Swap(backend.Seq, backend.Dim))(t)
			c := &backend.Call{
				Q: turned(t, b, dtype, backend.Shape{1, 1, sq, d}, wave),
				K: turned(t, b, dtype, backend.Shape{1, 1, sk, d}, wave),
				V: turned(t, b, dtype, backend.Shape{1, 1, sk, d}, func(i int) float32 { return wave(i + 1) }),
				O: o, Problem: backend.Problem{Scale: 0.1, Visible: backend.Everything()},
			}
			check(t, b.Attention(t.Context(), c))
			host := must.Get(backend.AllocHost(dtype, o.Shape()))(t)
			check(t, b.Download(t.Context(), host, o))
			var bits []uint32
			for i := range sq * d {
				if dtype == backend.F32 {
					data, _ := host.Float32s()
					bits = append(bits, math.Float32bits(data[i]))
				} else {
					data, _ := host.Bits()
					bits = append(bits, uint32(data[i]))
				}
			}
			return bits
		}
		want := run(Options{})
		for _, l := range []gputypes.Limits{
			{MaxStorageBufferBindingSize: 40 << 10},
			{MaxStorageBufferBindingSize: 40 << 10, MaxBufferSize: 64 << 10},
		} {
			t.Run(fmt.Sprintf("%v/buffers of %d KiB", dtype, l.MaxBufferSize>>10), func(t *testing.T) {
				if !slices.Equal(run(Options{Limits: l}), want) {
					t.Error("other bits than with large bindings")
				}
			})
		}
	}
}
