package cpu

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
)

// smallCases are the shapes of BenchmarkSmall.
var smallCases = []struct{ batch, seq, dim int }{{100000, 1, 8}, {100000, 4, 8}, {100000, 8, 16}}

// BenchmarkSmall measures many problems so small that the work around the kernels counts:
// one call with a batch of them, against a loop in plain Go over the same memory. The two
// take turns. It reports the median of the ratios of their processor time, in percent of
// that of the loop.
//
//	go test -run '^$' -bench Small -benchtime 9x ./cpu
func BenchmarkSmall(b *testing.B) {
	for _, c := range smallCases {
		b.Run(fmt.Sprintf("b%ds%dd%d", c.batch, c.seq, c.dim), func(b *testing.B) {
			be := open(b, Options{Threads: 1})
			shape := backend.Shape{c.batch, 1, c.seq, c.dim}
			call := &backend.Call{Q: random(b, 1, shape), K: random(b, 2, shape), V: random(b, 3, shape), O: alloc(b, shape),
				Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}
			var host [4][]float32
			for i, t := range [4]backend.Tensor{call.Q, call.K, call.V, alloc(b, shape)} {
				host[i], _ = t.Float32s()
			}
			scores := make([]float32, c.seq)
			run := func() {
				if err := be.Attention(b.Context(), call); err != nil {
					b.Fatal(err)
				}
			}
			run()
			var ratios, times []float64
			for b.Loop() {
				loop := processorTime(b, func() {
					n := c.seq * c.dim
					for i := range c.batch {
						plainLoop(host[3][i*n:], host[0][i*n:], host[1][i*n:], host[2][i*n:], scores, c.seq, c.dim, 0.125)
					}
				})
				own := processorTime(b, run)
				ratios, times = append(ratios, 100*own/loop), append(times, own*1e9/float64(c.batch))
			}
			slices.Sort(ratios)
			slices.Sort(times)
			b.ReportMetric(ratios[len(ratios)/2], "%ofLoop")
			b.ReportMetric(times[len(times)/2], "ns/problem")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkDecodeOptions is BenchmarkOptions for one row over 32,768 keys, in processor time.
//
//	go test -run '^$' -bench DecodeOptions -benchtime 15x ./cpu
func BenchmarkDecodeOptions(b *testing.B) {
	const keys = 32768
	for _, v := range []vectorCase{
		{name: "d64", heads: 8, sq: 1, sk: keys, dim: 64},
		{name: "d128", heads: 8, sq: 1, sk: keys, dim: 128},
		{name: "d64/8to1", heads: 8, kv: 1, sq: 1, sk: keys, dim: 64},
	} {
		for _, o := range optionCases(1, keys) {
			if strings.HasPrefix(o.say, "causal") || strings.HasPrefix(o.say, "window") || strings.HasPrefix(o.say, "klen") || strings.Contains(o.say, "16") {
				continue
			}
			b.Run(v.name+"/"+o.say, func(b *testing.B) {
				be := open(b, Options{Threads: 1})
				base := v.call(b)
				with := *base
				c := &with
				o.do(b, c)
				timed := func(c *backend.Call) float64 {
					return processorTime(b, func() {
						if err := be.Attention(b.Context(), c); err != nil {
							b.Fatal(err)
						}
					})
				}
				timed(c)
				var ratios []float64
				for b.Loop() {
					ratios = append(ratios, 100*timed(base)/timed(c))
				}
				slices.Sort(ratios)
				b.ReportMetric(ratios[len(ratios)/2], "%ofPlain")
				b.ReportMetric(80, "%wanted")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// plainLoop is attention as a program would write it.
func plainLoop(o, q, k, v, s []float32, seq, dim int, scale float32) {
	for i := range seq {
		row, m := q[i*dim:(i+1)*dim], float32(math.Inf(-1))
		for j := range s {
			key, sum := k[j*dim:(j+1)*dim], float32(0)
			for c, x := range row {
				sum += x * key[c]
			}
			s[j] = scale * sum
			m = max(m, s[j])
		}
		sum := float32(0)
		for j, x := range s {
			s[j] = float32(math.Exp(float64(x - m)))
			sum += s[j]
		}
		out := o[i*dim : (i+1)*dim]
		clear(out)
		for j, w := range s {
			w /= sum
			for c, x := range v[j*dim : (j+1)*dim] {
				out[c] += w * x
			}
		}
	}
}

// processorTime returns the seconds of processor time that f takes.
func processorTime(tb testing.TB, f func()) float64 {
	tb.Helper()
	var usage [2]syscall.Rusage
	for i := range usage {
		if i > 0 {
			f()
		}
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage[i]); err != nil {
			tb.Fatal(err)
		}
	}
	of := func(u *syscall.Rusage) time.Duration { return time.Duration(u.Utime.Nano() + u.Stime.Nano()) }
	return (of(&usage[1]) - of(&usage[0])).Seconds()
}
