package vec

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// BenchmarkCall measures the length of one call of assembly, which delays the preemption
// of its goroutine, for the longest kernels. The operands are the largest that package cpu
// passes (128 keys, head size 512), in the calls into which the methods cut them. It reports
// the median, the 99.9th percentile and the longest. These include interruptions by the
// system, so a loop of the same length that touches no memory takes turns with the calls:
// its longest run, in system-µs, is the share of the system.
func BenchmarkCall(b *testing.B) {
	const keys, d, heads = 128, 512, 32
	for _, x := range assembly {
		w := x.Width
		k, qt, s, o := filled(keys*d, 0.5), filled(d*w, 0.5), filled(keys*max(w, heads), 0), filled(d*w, 0)
		m := [4][]float32{filled(w, 0), filled(w, 0), filled(w, 0), filled(w, 0)}
		q := filled(heads*d, 0.5)
		// The kernels with a clock around each.
		timed := *x
		var calls []time.Duration
		clock := func(f func()) {
			start := time.Now()
			f()
			calls = append(calls, time.Since(start))
		}
		timed.tile.tiles = slices.Clone(x.tile.tiles)
		for i, tile := range x.tile.tiles {
			timed.tile.tiles[i].scores = func(s, k *float32, ldk int, run *uintptr, qt *float32, d, groups int, mx *float32) {
				clock(func() { tile.scores(s, k, ldk, run, qt, d, groups, mx) })
			}
			timed.tile.tiles[i].values = func(o *float32, runs *uintptr, n, ldv int, p *float32, first, groups int, alpha *float32) {
				clock(func() { tile.values(o, runs, n, ldv, p, first, groups, alpha) })
			}
		}
		timed.tile.weights = func(s *float32, fours int, m, mx, l, alpha *float32) {
			clock(func() { x.tile.weights(s, fours, m, mx, l, alpha) })
		}
		timed.softcap = func(s *float32, vectors int, c float32) { clock(func() { x.softcap(s, vectors, c) }) }
		timed.dots[F32] = func(s *float32, lds int, k *byte, ldk int, run *uintptr, q *float32, ldq, heads, chunks, groups int) {
			clock(func() { x.dots[F32](s, lds, k, ldk, run, q, ldq, heads, chunks, groups) })
		}
		timed.mix[F32][1][1] = func(o *float32, ldo int, runs *uintptr, n, ldv int, p *float32, ldp int, alpha *float32, first, strips int) {
			clock(func() { x.mix[F32][1][1](o, ldo, runs, n, ldv, p, ldp, alpha, first, strips) })
		}
		run := AppendRun(nil, k, d, keys, d, nil)
		for _, c := range []struct {
			name string
			do   func()
		}{
			{"scores", func() { timed.Scores(s, run, d, qt, d, m[0]) }},
			{"weights", func() { timed.Weights(s, keys/4, m[0], m[1], m[2], m[3]) }},
			{"values", func() { timed.Values(o, run, d, s, d, m[3]) }},
			{"softcap", func() { timed.Softcap(s[:keys*w], 2) }},
			{"dots", func() { timed.Dots(F32, s, keys, run, d, q, d, heads, d) }},
			{"mix", func() { timed.Mix(F32, o, d, run, d, s, keys, m[3], 4, d) }},
		} {
			b.Run(fmt.Sprintf("%s/%s", x.Tier, c.name), func(b *testing.B) {
				calls = calls[:0]
				for range 9 {
					c.do()
				}
				slices.Sort(calls)
				length := calls[len(calls)/2]
				var waits []time.Duration
				calls = calls[:0]
				for b.Loop() {
					n := len(calls)
					c.do()
					for range len(calls) - n {
						waits = append(waits, spin(length))
					}
				}
				slices.Sort(calls)
				report := func(d time.Duration, unit string) { b.ReportMetric(float64(d.Nanoseconds())/1e3, unit) }
				report(calls[len(calls)/2], "µs/median")
				report(calls[len(calls)*999/1000], "µs/p99.9")
				report(calls[len(calls)-1], "µs/longest")
				report(slices.Max(waits), "system-µs/longest")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// spin computes in registers for about d, of which it reads the clock only before
// and after, and returns how long that took.
func spin(d time.Duration) time.Duration {
	start := time.Now()
	x := uint64(start.Nanosecond()) | 1
	for range d.Nanoseconds() { // a multiplication takes about a nanosecond
		x *= x
	}
	took := time.Since(start)
	if x == 0 { // odd numbers stay odd: only the compiler does not know
		return 0
	}
	return took
}
