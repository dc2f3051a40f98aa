package vec

import (
	"testing"
	"time"

	"github.com/seed90331342/attn/cpu/internal/peak"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// BenchmarkPrefill shows what binds prefill: it runs the kernels of wide tiles as package cpu
// calls them, but with all operands in the second-level cache, without edges and without the
// steps between them. %ofPeak counts the operations of visible pairs, and the FMA peak is
// measured in the same turn; the other figures are shares of the time. Medians of turns.
//
//	go test -run '^$' -bench Prefill -benchtime 9x ./cpu/internal/vec
func BenchmarkPrefill(b *testing.B) {
	for _, x := range assembly {
		for _, c := range []prefill{
			{"s256d64", 64, 256, 256, 256},
			{"s1024d64", 64, 1024, 1024, 1024},
			{"s4096d64", 64, 4096, 4096, 4096},
			{"s4096d128", 128, 4096, 4096, 4096},
			{"window256d64", 64, 8192, (255 + x.Width + 3) / 4 * 4, 256},
			{"causal1024d64", 64, 1024, 512 + x.Width/2, 512},
		} {
			b.Run(x.Tier+"/"+c.name, func(b *testing.B) { c.bench(b, x) })
		}
	}
}

// prefill is a call: keys is the mean number of them that a tile computes for each row.
type prefill struct {
	name            string
	dim, rows, keys int
	visible         int // of the keys
}

// bench measures c's tiles with the kernels x.
func (c prefill) bench(b *testing.B, x *Kernels) {
	const block = 128
	w, d, lanes := x.Width, c.dim, x.Lanes
	tiles, blocks := min(16, (c.rows+w-1)/w), min(4, c.keys/block)
	q, o := filled(tiles*w*d, 0.5), filled(tiles*w*d, 0.5)
	qt, ot, s := filled(tiles*d*w, 0), filled(tiles*d*w, 0), filled(block*w, 0)
	kv := filled((blocks+1)*2*block*d, 0.5)
	one, m, mx, l, alpha := filled(lanes, 1), filled(w, 0), filled(w, 0), filled(w, 0), filled(w, 0)
	run := make([]Run, 0, 1)
	transpose := func(dst []float32, ldd int, src []float32, lds, rows, columns int) {
		for r := 0; r < rows; r += lanes {
			x.Transpose(dst[r:], ldd, ldd, src[r*lds:], lds, 1, columns, one)
		}
	}
	task := func(spent *[3]time.Duration) { // of transposing, products and weights
		last := time.Now()
		step := func(n int) {
			now := time.Now()
			spent[n] += now.Sub(last)
			last = now
		}
		for t := 0; t < tiles*w*d; t += w * d {
			transpose(qt[t:], w, q[t:], d, w, d)
		}
		step(0)
		for key := 0; key < c.keys; key += block {
			n := min(block, c.keys-key)
			at := kv[key/block%blocks*2*block*d:]
			k, v, next := at, at[block*d:], at[2*block*d:]
			for t := 0; t < tiles*w*d; t += w * d {
				x.Scores(s, AppendRun(run, k, d, n, d, next), d, qt[t:], d, Stairs{}, mx)
				step(1)
				x.Weights(s, (n+3)/4, m, mx, l, alpha)
				step(2)
				x.Values(ot[t:], AppendRun(run, v, d, n, d, next), d, s, d, Stairs{}, alpha)
				step(1)
				next = k
			}
		}
		for t := 0; t < tiles*w*d; t += w * d {
			transpose(o[t:], d, ot[t:], w, d, w)
		}
		step(0)
	}
	rates, shares := []float64{}, [3][]float64{}
	for range b.N {
		fma := must.Get(peak.FLOPS(b.Context(), x, 1))(b)
		var spent [3]time.Duration
		tasks, start := 0, time.Now()
		for ; time.Since(start) < 20*time.Millisecond; tasks++ {
			task(&spent)
		}
		total := time.Since(start).Seconds()
		rows := float64(c.rows) / float64((c.rows+w-1)/w) * float64(tiles*tasks) // that count
		rates = append(rates, 100*rows*float64(c.visible)*4*float64(d)/total/fma)
		for n := range spent {
			shares[n] = append(shares[n], 100*spent[n].Seconds()/total)
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(rates), "%ofPeak")
	for n, name := range []string{"transposing", "products", "weights"} {
		b.ReportMetric(median(shares[n]), name+":%")
	}
}
