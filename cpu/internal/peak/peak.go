// Package peak measures the two ceilings of a machine, each by a loop that does
// nothing else:
//
//	c = c·x + y    in independent chains that stay in registers: float32 operations
//	               a second, 2 for each element; what matrix products come near
//	load p[i]      over memory from its start to its end: bytes a second; what a
//	               call comes near that reads more than it computes
//
// On amd64 the loops are generated assembly (see _generate) for AVX-512F and for
// AVX2 with FMA; on other machines plain Go loops give a lower bound, as the
// compiler neither uses vectors nor, on some, fuses.
package peak

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

//go:generate sh -c "cd _generate && go run . -kernels fma -out ../fma_amd64.s -stubs ../fma_amd64.go -pkg peak"
//go:generate sh -c "cd _generate && go run . -kernels read -out ../read_amd64.s -stubs ../read_amd64.go -pkg peak"

// kernel is the loops of one tier of instructions.
type kernel struct {
	// tier is its name: "avx512", "avx2", "go".
	tier string
	// flops is how many operations one turn of fma does.
	flops int
	// fma takes n turns.
	fma func(n int, x, y float32)
	// read loads n*turnBytes bytes at each of p, p+apart, p+2*apart, p+3*apart.
	read func(p *byte, apart, n int)
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

// ErrTier reports a tier that the machine does not have.
var ErrTier = errors.New("no such instructions here")

// Tiers returns the names of the tiers that this machine has, the widest first:
// of "avx512", "avx2" and, always and last, "go".
func Tiers() []string {
	var names []string
	for _, k := range kernels() {
		names = append(names, k.tier)
	}
	return names
}

// find returns the loops of a tier, "" for the widest.
func find(tier string) (kernel, error) {
	list := kernels()
	if tier == "" {
		return list[0], nil
	}
	i := slices.IndexFunc(list, func(k kernel) bool { return k.tier == tier })
	if i < 0 {
		return kernel{}, fmt.Errorf("tier is %q, there are %v: %w", tier, Tiers(), ErrTier)
	}
	return list[i], nil
}

// FLOPS measures the float32 operations a second of threads goroutines at once in
// the instructions of tier ("" for the widest), the best of a few measurements;
// 40 milliseconds in all. It returns ErrTier for a tier that is not there, and
// the context's error when that is cancelled.
func FLOPS(ctx context.Context, tier string, threads int) (float64, error) {
	k, err := find(tier)
	if err != nil {
		return 0, err
	}
	var rate float64
	for range windows {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		rate = max(rate, measure(threads, k.fmaWork()))
	}
	return rate, nil
}

// fmaWork returns the work that FLOPS measures, in operations.
func (k kernel) fmaWork() func(int) float64 {
	return func(int) float64 {
		const calls = 8 // between two looks at the clock
		for range calls {
			k.fma(turns, 0.5, 1)
		}
		return calls * turns * float64(k.flops)
	}
}

// measure does work on threads goroutines for one window and returns how much a
// second. work is given the number of its goroutine and returns how much it did.
// Each counts against the common start.
func measure(threads int, work func(thread int) float64) float64 {
	rates := make([]float64, threads)
	var ready, done sync.WaitGroup
	ready.Add(threads)
	var start time.Time
	begin := make(chan struct{})
	for i := range threads {
		done.Go(func() {
			work(i) // wakes the wide units up
			ready.Done()
			<-begin
			did := 0.0
			for {
				did += work(i)
				if took := time.Since(start); took >= window {
					rates[i] = did / took.Seconds()
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
