// Package peak measures two ceilings of a machine:
//
//	FLOPS        c = c·x + y in independent chains of registers: float32 operations a
//	             second, 2 for each element. Matrix products approach this rate.
//	Bandwidth    loads from memory, from its start to its end: bytes a second. Calls that
//	             read more than they compute approach this rate.
//
// The loops are kernels of package vec, one pair for each tier.
package peak

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Loops are the loops of one tier, for example *vec.Kernels. Package vec is not imported, because
// its benchmarks import this package.
type Loops interface {
	// FMA computes c = c·x + y, n times in each of some registers, and returns the operations.
	FMA(n int, x, y float32) (operations int)
	// Read loads 256·n bytes from each of s[0], s[apart], s[2·apart] and s[3·apart] on.
	Read(s []byte, apart, n int)
}

const (
	// fmaTurns is the number of turns in one call of FMA. At one FMA a cycle, 16 chains take 32,000 cycles, about 10
	// microseconds. Assembly cannot be preempted, so a longer call would delay the garbage collector.
	fmaTurns = 2000
	// window is the length of one measurement, fmaWindows and readWindows are the numbers
	// of measurements. The best one counts: noise only lowers a rate.
	window      = 8 * time.Millisecond
	fmaWindows  = 5
	readWindows = 3
)

// FLOPS returns the float32 operations a second of threads concurrent goroutines with the
// FMAs of k. It takes 40 milliseconds. The error is that of the context.
func FLOPS(ctx context.Context, k Loops, threads int) (float64, error) {
	return best(ctx, fmaWindows, slices.Repeat([]work{operations(k)}, threads))
}

// operations returns the work that FLOPS measures.
func operations(k Loops) work {
	return func() (sum float64) {
		for range 8 { // between two readings of the clock
			sum += float64(k.FMA(fmaTurns, 0.5, 1))
		}
		return sum
	}
}

// work does some work of one goroutine and returns how much.
type work func() float64

// best returns the highest rate of n windows, or the context's error. In each, a goroutine does
// each of the works. Their rates, each counted from the common start, are added.
func best(ctx context.Context, n int, works []work) (rate float64, err error) {
	for range n {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		rates := make([]float64, len(works))
		var ready, done sync.WaitGroup
		ready.Add(len(works))
		var start time.Time
		begin := make(chan struct{})
		for i, do := range works {
			done.Go(func() {
				do() // the processor powers wide units up on first use
				ready.Done()
				<-begin
				did, took := 0.0, time.Duration(0)
				for took < window {
					did += do()
					took = time.Since(start)
				}
				rates[i] = did / took.Seconds()
			})
		}
		ready.Wait()
		start = time.Now()
		close(begin)
		done.Wait()
		sum := 0.0
		for _, r := range rates {
			sum += r
		}
		rate = max(rate, sum)
	}
	return rate, nil
}
