package vec

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// BenchmarkCall measures how long one call of assembly holds up whoever wants to
// stop the goroutine, for the kernels that do most: the operands are the largest
// that package cpu hands over (128 keys, head size 512), the calls those that
// the methods cut them into. It reports the median and the longest call; the
// longest takes in what else the system did meanwhile.
func BenchmarkCall(b *testing.B) {
	const keys, d, heads = 128, 512, 32
	for _, x := range Tiers() {
		w := x.Width
		k, qt, s, o := filled(keys*d, 0.5), filled(d*w, 0.5), filled(keys*max(w, heads), 0), filled(d*w, 0)
		m := [4][]float32{filled(w, 0), filled(w, 0), filled(w, 0), filled(w, 0)}
		q := filled(heads*d, 0.5)
		// Each method once, with what it calls replaced by a clock around it.
		timed := *x
		var calls []time.Duration
		clock := func(f func()) {
			start := time.Now()
			f()
			calls = append(calls, time.Since(start))
		}
		timed.scores4 = func(s, k *float32, ldk int, qt *float32, d, groups int, mx *float32) {
			clock(func() { x.scores4(s, k, ldk, qt, d, groups, mx) })
		}
		timed.values4 = func(o, v *float32, ldv int, p *float32, keys, groups int, alpha *float32) {
			clock(func() { x.values4(o, v, ldv, p, keys, groups, alpha) })
		}
		timed.weights = func(s *float32, fours int, m, mx, l, alpha *float32) {
			clock(func() { x.weights(s, fours, m, mx, l, alpha) })
		}
		timed.softcap = func(s *float32, vectors int, c float32) { clock(func() { x.softcap(s, vectors, c) }) }
		timed.dots = func(s *float32, lds int, k *float32, ldk int, q *float32, ldq, heads, chunks, groups int) {
			clock(func() { x.dots(s, lds, k, ldk, q, ldq, heads, chunks, groups) })
		}
		timed.mix[1][1] = func(o *float32, ldo int, v *float32, ldv int, p *float32, ldp, keys int, alpha *float32, strips int) {
			clock(func() { x.mix[1][1](o, ldo, v, ldv, p, ldp, keys, alpha, strips) })
		}
		for _, c := range []struct {
			name string
			do   func()
		}{
			{"scores", func() { timed.Scores(s, k, d, keys, qt, d, m[0]) }},
			{"weights", func() { timed.Weights(s, keys/4, m[0], m[1], m[2], m[3]) }},
			{"values", func() { timed.Values(o, k, d, s, keys, d, m[3]) }},
			{"softcap", func() { timed.Softcap(s[:keys*w], 2) }},
			{"dots", func() { timed.Dots(s, keys, k, d, keys, q, d, heads, d) }},
			{"mix", func() { timed.Mix(o, d, k, d, s, keys, keys, m[3], 4, d) }},
		} {
			b.Run(fmt.Sprintf("%s/%s", x.Tier, c.name), func(b *testing.B) {
				calls = calls[:0]
				for b.Loop() {
					c.do()
				}
				slices.Sort(calls)
				b.ReportMetric(float64(calls[len(calls)/2].Nanoseconds())/1e3, "µs/median")
				b.ReportMetric(float64(calls[len(calls)-1].Nanoseconds())/1e3, "µs/longest")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
