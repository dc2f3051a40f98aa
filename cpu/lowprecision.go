package cpu

import (
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// roundings are the functions that round weights to nearest even in a type of
// backend.Call.WeightType. Weights are not negative and a multiple of the lanes of k. A NaN may
// become 0: the sum of its row, which divides the outputs, is NaN.
var roundings = map[backend.DType]func(k *vec.Kernels, weights []float32, half []uint16){
	backend.F16: func(k *vec.Kernels, weights []float32, half []uint16) {
		for len(weights) > 0 {
			n := min(len(weights), len(half))
			k.StoreF16(half, weights[:n])
			k.LoadF16(weights, n, half, n, 1, n)
			weights = weights[n:]
		}
	},
	// Two numbers at a time: without their signs, neither carries into the other.
	backend.BF16: func(_ *vec.Kernels, weights []float32, _ []uint16) {
		pairs := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(weights))), len(weights)/2)
		for i, x := range pairs {
			x &= 0x7fffffff_7fffffff
			pairs[i] = (x + 0x7fff_00007fff + x>>16&0x1_00000001) & 0xffff0000_ffff0000
		}
	},
}
