package cpu

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestBatchIsDivided shows that a long call among short ones is divided for all threads, that
// short ones are a task each, and that equal calls share the threads.
func TestBatchIsDivided(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		be := open(t, Options{Threads: 4, Tier: tier})
		for _, c := range []struct {
			name         string
			seqs         []int
			first, least int // most tasks of the first call, and least of the last
		}{
			{"one long among short ones", []int{16, 16, 16, 16, 16, 16, 16, 16, 16, 2048}, 1, 16},
			{"many short ones", []int{64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64}, 1, 1},
			{"two long ones", []int{2048, 2048}, 16, 8},
		} {
			var calls []*backend.Call
			for _, n := range c.seqs {
				calls = append(calls, plain(t, 1, n, 16))
			}
			var j jointCalls
			must.Do(t, j.open(be, calls))
			last := j.tasks - j.calls[len(calls)-1].first
			if first := j.calls[1].first; first > c.first || last < c.least {
				t.Errorf("%s: the shortest call has %d tasks, the longest %d", c.name, first, last)
			}
			j.close()
		}
	})
}

// TestBatchAllocates shows that the allocations of a batch depend on its calls, not on their tasks.
func TestBatchAllocates(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	be := open(t, Options{Threads: 2})
	per := func(seq int) float64 {
		var calls []*backend.Call
		for range 8 {
			calls = append(calls, plain(t, 1, seq, 16))
		}
		return testing.AllocsPerRun(5, func() {
			must.Do(t, be.Attention(t.Context(), calls...))
		})
	}
	if short, long := per(16), per(2000); long > short+4 || long > 8*4 {
		t.Errorf("8 short calls allocate %v times, 8 long ones %v times", short, long)
	}
}
