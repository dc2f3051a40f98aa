// Package peak measures how many float32 operations a second a machine does in
// fused multiply-adds whose operands stay in registers:
//
//	c = c·x + y    in independent chains, 2 operations an element
//
// It is the ceiling that matrix products are compared with. On amd64 the loops
// are generated assembly (see _generate) for AVX-512F and for AVX2 with FMA; on
// other machines a plain Go loop gives a lower bound, as the compiler neither
// uses vectors nor, on some, fuses.
package peak

import (
	"context"
	"sync"
	"time"
)

//go:generate sh -c "cd _generate && go run . -out ../fma_amd64.s -stubs ../fma_amd64.go -pkg peak"

// kernel is one of the loops.
type kernel struct {
	name string
	// flops is how many operations one turn of the loop does.
	flops int
	// run takes n turns.
	run func(n int, x, y float32)
}

const (
	// turns of one call: 16 chains at one FMA a cycle take 32,000 cycles, some
	// 10 microseconds, half that on most machines. Assembly cannot be preempted,
	// so a longer call would hold the garbage collector up.
	turns = 2000
	// window is how long one measurement takes, and windows how many are taken:
	// the best counts, as nothing makes a core faster than it is.
	window  = 8 * time.Millisecond
	windows = 5
)

// Kernel names the loop that FLOPS runs: "AVX-512F", "AVX2", "Go".
func Kernel() string { return best.name }

// FLOPS measures the float32 operations a second of threads goroutines at once,
// the best of a few measurements; 40 milliseconds in all. It returns the
// context's error when that is cancelled.
func FLOPS(ctx context.Context, threads int) (float64, error) {
	var rate float64
	for range windows {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		rate = max(rate, measure(best, threads))
	}
	return rate, nil
}

// measure runs k on threads goroutines for one window and returns operations a
// second. Each counts its calls against the common start.
func measure(k kernel, threads int) float64 {
	rates := make([]float64, threads)
	var ready, done sync.WaitGroup
	ready.Add(threads)
	var start time.Time
	begin := make(chan struct{})
	for i := range threads {
		done.Go(func() {
			k.run(turns, 0.5, 1) // wakes the wide units up
			ready.Done()
			<-begin
			calls := 0
			for {
				for range 8 {
					k.run(turns, 0.5, 1)
				}
				calls += 8
				if took := time.Since(start); took >= window {
					rates[i] = float64(calls) * turns * float64(k.flops) / took.Seconds()
					return
				}
			}
		})
	}
	ready.Wait()
	start = time.Now()
	close(begin)
	done.Wait()
	var sum float64
	for _, r := range rates {
		sum += r
	}
	return sum
}
