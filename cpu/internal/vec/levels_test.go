package vec

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/peak"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// BenchmarkLevels shows what binds the products of few query rows with keys or values of 128 elements: the rate at
// which a kernel reads them from the second-level cache, where its arithmetic binds, from 32 MiB, which large
// last-level caches hold, and from 512 MiB. GB/s is next to readGB/s, that of a loop that reads the same memory and
// computes nothing. %ofBoth is the rate in percent of the smaller one of readGB/s and the kernel's rate from the
// second-level cache: 100 if reads and arithmetic overlap completely. Medians of turns.
//
//	go test -run '^$' -bench Levels -benchtime 5x ./cpu/internal/vec
func BenchmarkLevels(b *testing.B) {
	const keys, d = 128, 128
	memory := make([]float32, 512<<20/4)
	for i := range memory {
		memory[i] = 0.5
	}
	for _, x := range assembly {
		kernels, run := []levelsKernel{}, make([]Run, 0, 1)
		for _, heads := range []int{1, 4, 8} {
			q, s, o, alpha := filled(heads*d, 0.5), filled(heads*keys, 0.5), filled(heads*d, 0), filled(heads, 1)
			for _, e := range []backend.DType{F32, F16, BF16, Q8, Q4, F8} {
				name, ld := strings.TrimPrefix(e.String(), "f32"), d
				if e.Quantised() {
					if !x.Reads(e) {
						continue // its rows are converted first
					}
					ld = e.Row(d)
				}
				rows := func(at, next []float32) []Run {
					switch e {
					case F32:
						return AppendRun(run, at, ld, keys, d, next)
					case Q8, Q4, F8:
						return AppendRun(run, reinterpret[byte](at), ld, keys, ld, reinterpret[byte](next))
					}
					return AppendRun(run, reinterpret[uint16](at), ld, keys, d, reinterpret[uint16](next))
				}
				block := keys * ld * e.Size() / 4
				kernels = append(kernels,
					levelsKernel{fmt.Sprintf("dots%d%s", heads, name), block, func(k, next []float32) { x.Dots(e, s, keys, rows(k, next), ld, q, d, heads, d) }},
					levelsKernel{fmt.Sprintf("mix%d%s", heads, name), block, func(v, next []float32) { x.Mix(e, o, d, rows(v, next), ld, s, keys, alpha, heads, d) }})
			}
		}
		for _, rows := range []int{8, 16} {
			y := x.Narrow(rows)
			if y.Width != rows {
				continue
			}
			q, s, o, m := filled(rows*d, 0.5), filled(rows*keys, 0.5), filled(rows*d, 0), filled(rows, 1)
			kernels = append(kernels,
				levelsKernel{fmt.Sprintf("scores%d", rows), keys * d, func(k, next []float32) { y.Scores(s, AppendRun(run, k, d, keys, d, next), d, q, d, Stairs{}, m) }},
				levelsKernel{fmt.Sprintf("values%d", rows), keys * d, func(v, next []float32) { valuesByLane(y, o, AppendRun(run, v, d, keys, d, next), d, s, d, Stairs{}, m) }})
		}
		for _, k := range kernels {
			b.Run(x.Tier+"/"+k.name, func(b *testing.B) { k.bench(b, x, memory) })
		}
	}
}

// levelsKernel is a kernel on a block of rows. It prefetches the next one.
type levelsKernel struct {
	name  string
	block int // floats
	do    func(rows, next []float32)
}

// reinterpret returns the memory of s as elements of another type.
func reinterpret[T uint16 | byte](s []float32) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(s))), uintptr(len(s))*unsafe.Sizeof(s[0])/unsafe.Sizeof(T(0)))
}

// bench measures k on blocks of memory.
func (k levelsKernel) bench(b *testing.B, loops peak.Loops, memory []float32) {
	levels := []struct {
		name   string
		floats int
	}{{"L2", 512 << 10 / 4}, {"32MiB", 32 << 20 / 4}, {"512MiB", len(memory)}}
	rates, reads := make([][]float64, len(levels)), make([][]float64, len(levels))
	for range b.N {
		for i, l := range levels {
			from := memory[:l.floats]
			bytes := unsafe.Slice((*byte)(unsafe.Pointer(&from[0])), 4*len(from))
			read := must.Get(peak.Bandwidth(b.Context(), loops, [][]byte{bytes}, 1))(b)
			reads[i] = append(reads[i], read/1e9)
			blocks := len(from) / k.block
			pass := func() {
				for n := range blocks {
					k.do(from[n*k.block:], from[(n+1)%blocks*k.block:])
				}
			}
			pass()
			n, start := 0, time.Now()
			for ; time.Since(start) < 20*time.Millisecond; n++ {
				pass()
			}
			rates[i] = append(rates[i], float64(n*blocks*4*k.block)/time.Since(start).Seconds()/1e9)
		}
	}
	own := median(rates[0])
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(own, "L2:GB/s")
	for i, l := range levels[1:] {
		rate, read := median(rates[i+1]), median(reads[i+1])
		b.ReportMetric(rate, l.name+":GB/s")
		b.ReportMetric(read, l.name+":readGB/s")
		b.ReportMetric(100*rate/min(own, read), l.name+":%ofBoth")
	}
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}
