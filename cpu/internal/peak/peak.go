// Package peak measures two ceilings of a machine:
//
//	FLOPS        c = c·x + y in independent chains of registers: float32 operations a
//	             second, 2 for each element. Matrix products approach this rate.
//	Bandwidth    loads from memory, from its start to its end: bytes a second. Calls that
//	             read more than they compute approach this rate.
//
// On amd64 the loops are generated assembly (see _generate) for AVX-512F and for AVX2
// with FMA. Elsewhere they are plain Go and yield a lower bound, because the compiler
// does not use vectors.
package peak

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

//go:generate sh -c "cd _generate && GOWORK=off go run . -kernels fma -out ../fma_amd64.s -stubs ../fma_amd64.go -pkg peak"
//go:generate sh -c "cd _generate && GOWORK=off go run . -kernels read -out ../read_amd64.s -stubs ../read_amd64.go -pkg peak"

// kernel is the pair of loops in one tier of instructions.
type kernel struct {
	tier  string // "avx512", "avx2", "neon", "go"
	flops int    // operations in one turn of fma
	// fma takes n turns.
	fma func(n int, x, y float32)
	// read loads n·turnBytes bytes from each of p, p+apart, p+2·apart and p+3·apart on.
	read func(p *byte, apart, n int)
}

const (
	// fmaTurns is the number of turns in one call of fma. At one FMA a cycle, 16 chains
	// take 32,000 cycles, about 10 microseconds. Assembly cannot be preempted, so a
	// longer call would delay the garbage collector.
	fmaTurns = 2000
	// window is the length of one measurement, fmaWindows and readWindows are the numbers
	// of measurements. The best one counts: noise only lowers a rate.
	window      = 8 * time.Millisecond
	fmaWindows  = 5
	readWindows = 3
)

// ErrTier reports a tier that the machine does not have.
var ErrTier = errors.New("this machine has no such instructions")

// find returns the loops of a tier, "" for the widest.
func find(tier string) (kernel, error) {
	var names []string
	for _, k := range kernels() {
		if tier == "" || k.tier == tier {
			return k, nil
		}
		names = append(names, k.tier)
	}
	return kernel{}, fmt.Errorf("tier is %q, there are %v: %w", tier, names, ErrTier)
}

// FLOPS returns the float32 operations a second of threads concurrent goroutines, in the
// instructions of tier ("" for the widest): "avx512", "avx2" or "neon" where the machine has
// them, and always "go". It takes 40 milliseconds. Errors: ErrTier, and the context's.
func FLOPS(ctx context.Context, tier string, threads int) (float64, error) {
	k, err := find(tier)
	if err != nil {
		return 0, err
	}
	return best(ctx, fmaWindows, slices.Repeat([]work{k.operations}, threads))
}

// operations is the work that FLOPS measures.
func (k kernel) operations() float64 {
	const calls = 8 // between two readings of the clock
	for range calls {
		k.fma(fmaTurns, 0.5, 1)
	}
	return calls * fmaTurns * float64(k.flops)
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
