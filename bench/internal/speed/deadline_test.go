package speed

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// The calls that 50 goroutines make at once: half of them long, half of them short.
var (
	longCall  = row{sq: 4096, dim: 64}
	shortCall = row{sq: 256, dim: 64}
)

const callers = 50

// BenchmarkDeadline runs 50 calls at once. "late" gives each a deadline of 5 to 250 milliseconds and reports how late
// calls that it ends return, and how late a goroutine wakes that only sleeps, in milliseconds. "throughput" runs the
// same calls without deadlines: 25 long ones next to 25 times 40 short ones.
//
//	go test -run '^$' -bench Deadline -benchtime 5x ./bench/internal/speed
func BenchmarkDeadline(b *testing.B) {
	b.Run("late", func(b *testing.B) {
		var late, sleeps []float64
		for b.Loop() {
			l, s := deadlines(b)
			late, sleeps = append(late, l...), append(sleeps, s...)
		}
		for name, x := range map[string][]float64{"late": late, "sleep": sleeps} {
			slices.Sort(x)
			b.ReportMetric(x[len(x)/2], "ms/"+name+"-p50")
			b.ReportMetric(x[len(x)*99/100], "ms/"+name+"-p99")
			b.ReportMetric(x[len(x)-1], "ms/"+name+"-max")
		}
		b.ReportMetric(float64(len(late)), "deadlines")
	})
	b.Run("throughput", func(b *testing.B) {
		be := must(cpu.Open(cpu.Options{}))
		defer be.Close()
		long, short := longCall.job(b, be), shortCall.job(b, be)
		const times = 40 // short calls of a goroutine
		for b.Loop() {
			var all sync.WaitGroup
			for n := range callers {
				all.Go(func() {
					if n%2 == 0 {
						check(long.run())
						return
					}
					for range times {
						check(short.run())
					}
				})
			}
			all.Wait()
		}
		flops := callers / 2 * (long.flops + times*short.flops)
		b.ReportMetric(flops*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
	})
}

// deadlines makes calls with deadlines from 50 goroutines for two seconds. It returns how
// late those that a deadline ended returned, and how late a goroutine woke that sleeps.
func deadlines(b *testing.B) (late, sleeps []float64) {
	be := must(cpu.Open(cpu.Options{}))
	defer be.Close()
	long, short := longCall.call(b, be), shortCall.call(b, be)
	end := time.Now().Add(2 * time.Second)
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	var mu sync.Mutex
	var all sync.WaitGroup
	for n := range callers {
		c := *long
		if n%2 == 1 {
			c = *short
		}
		c.O = must(kernels.AllocHost(kernels.F32, c.O.Shape()))
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(n), 1))
			for time.Now().Before(end) {
				deadline := time.Now().Add(time.Duration(5+rng.IntN(246)) * time.Millisecond)
				ctx, cancel := context.WithDeadline(b.Context(), deadline)
				err := be.Attention(ctx, &c)
				over := time.Since(deadline)
				cancel()
				if err == nil {
					continue
				}
				if !errors.Is(err, context.DeadlineExceeded) {
					check(err)
				}
				mu.Lock()
				late = append(late, ms(over))
				mu.Unlock()
			}
		})
	}
	all.Go(func() {
		for time.Now().Before(end) {
			start := time.Now()
			time.Sleep(time.Millisecond)
			sleeps = append(sleeps, ms(time.Since(start)-time.Millisecond))
		}
	})
	all.Wait()
	return late, sleeps
}
