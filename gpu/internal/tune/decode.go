package tune

import (
	"fmt"

	"github.com/seed90331342/attn/shaders"
)

// Decode completes k, a kernel of decoding that has the types and options of a call and the rows of a
// workgroup, for queries of dim columns. Where Q takes too much workgroup memory, a workgroup has
// fewer rows. If nothing fits the limits, bad is what one row takes.
func (t Tiling) Decode(k shaders.Decode, dim int, software bool, l Limits) (_ shaders.Decode, bad string) {
	k.Expand, k.Sides = shaders.Full, 1
	if software {
		k.Expand = shaders.Registers // compiles in less time
	}
	if k.KV == shaders.Q4 && t.Width == 128 {
		k.Rows = min(k.Rows, 4) // 8 would take more than 96 registers
	}
	// A thread has a key of a tile and so many columns of the output.
	threads := (t.Keys + 31) &^ 31
	for k.Rows*t.Lanes > threads { // a thread sums one class of one row
		k.Rows /= 2
	}
	el := [...]int{shaders.F32: 4, shaders.F16: 8, shaders.BF16: 8, shaders.Q8: 16, shaders.Q4: 16, shaders.F8: 16}[k.KV] // elements in 16 bytes
	if k.Wide && el == 8 {
		k.Sides = min(k.Rows, 2) // a thread has half of the rows and twice the columns
	}
	columns := (t.Width*k.Sides + threads - 1) / threads
	k.Ahead = 16 // keys, in at most as many registers
	for k.Ahead*columns > 16 {
		k.Ahead /= 2
	}
	k.Full = dim%(4*el) == 0 && (k.Wide || k.KV >= shaders.Q8)
	k.Split, k.BC, k.TX, k.Stages, k.Quads = t.Split, t.Keys, t.Lanes, (dim+4*el-1)/(4*el), t.Width/4
	// Values of q8, q4, f8 and of aligned 16-bit elements go through workgroup memory. More than 8
	// words of them in registers would exceed 96 registers where the head size is 64.
	if k.KV >= shaders.Q8 || k.Wide && el == 8 {
		pack, loads, words := 4, t.Width/4, 4 // keys of a word, loads of a row, words of a thread's load
		if k.Wide {
			pack = 2
		}
		if k.Wide || k.KV == shaders.Q4 {
			loads, words = t.Width/8, 8
		}
		for k.Ahead = 32; ; k.Ahead /= 2 {
			// Every thread loads into registers without a branch: RADV delays loads behind one.
			// With one load a thread, fewer keys would not save registers.
			fits := words*((k.Ahead/pack*loads+threads-1)/threads) <= 8 && shaders.Describe(k).WorkgroupMemory <= safeMemory
			if t.Keys%k.Ahead == 0 && (fits || k.Ahead/pack*loads <= threads) {
				break
			}
		}
	}
	memory := shaders.Describe(k).WorkgroupMemory
	switch {
	case threads <= l.Threads && memory <= l.Memory:
		return k, ""
	case threads <= l.Threads && k.Rows > 1:
		k.Rows /= 2
		return t.Decode(k, dim, software, l)
	}
	return k, fmt.Sprintf("%d threads and %d bytes of workgroup memory", threads, memory)
}
