package plan

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var causal = kernels.Options{Causal: true}

// sequence returns the cut of a sequence with 8 heads of 64, for so many workers.
func sequence(t *testing.T, s, workers int, o kernels.Options) *cut.Cut {
	t.Helper()
	return must.Get(cut.New(kernels.Dims{Batch: 1, Heads: 8, KVHeads: 8, SeqQ: s, SeqK: s, Dim: 64, ValueDim: 64}, o, cut.Config{Workers: workers}))(t)
}

// plans are those that planned has made.
var plans = map[string]*Plan{}

// planned returns the plan of sequence.
func planned(t *testing.T, s, workers int, o kernels.Options) *Plan {
	t.Helper()
	x := sequence(t, s, workers, o)
	key := fmt.Sprint(s, x.Config.Rows, x.Pairs) // all that differs in these tests
	if plans[key] == nil {
		plans[key] = New(x, 4, 4, 4)
	}
	return plans[key]
}

// node is a worker with one core, of 16 that share a network of 32 Gbit/s.
func node(workers int) Machine {
	return Machine{Workers: workers, Speed: 100e9, Bandwidth: 250e6, Overhead: 100 * time.Millisecond}
}

// TestBalance simulates 16 to 4,096 workers: the work of causal calls, and of those with a
// window, is within 5% of ideal.
func TestBalance(t *testing.T) {
	window := kernels.Options{Causal: true, Window: &kernels.Window{Left: 65535, Right: kernels.Unbounded}}
	for _, c := range []struct {
		what       string
		s, workers int
		o          kernels.Options
	}{
		{"causal", 1 << 18, 16, causal}, {"causal", 1 << 20, 256, causal}, {"causal", 1 << 20, 4096, causal}, {"causal", 10_000_000, 16, causal},
		{"causal", 10_000_000, 4096, causal}, {"causal", 100_000_000, 4096, causal}, {"window", 10_000_000, 256, window}, {"window", 100_000_000, 4096, window},
	} {
		p := planned(t, c.s, c.workers, c.o)
		// Operations alone: nothing but the cut decides.
		got := p.On(Machine{Workers: c.workers, Speed: 100e9, Bandwidth: math.Inf(1)})
		if got.Balance < 0.95 {
			t.Errorf("%s, %d rows on %d workers: balance %.3f, want at least 0.95 (%d units of %d rows)", c.what, c.s, c.workers, got.Balance, p.Units, p.Cut.Config.Rows)
		}
		if whole := p.On(node(c.workers)); whole.Balance < 0.95 {
			t.Errorf("%s, %d rows on %d workers that read and write: balance %.3f, want at least 0.95", c.what, c.s, c.workers, whole.Balance)
		}
	}
}

// TestCosts compares a small plan with sums over its units.
func TestCosts(t *testing.T) {
	d := kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 10, SeqK: 7, Dim: 3, ValueDim: 5}
	x := must.Get(cut.New(d, kernels.Options{Causal: true, KLen: []int{7, 4}}, cut.Config{Rows: 4, Split: 3}))(t)
	p := New(x, 2, 4, 2)
	var units, read, partials, output int64
	var longest, total, merges float64
	m := Machine{Workers: 1, Speed: 100, Bandwidth: 1000, Overhead: time.Second}
	for _, b := range x.Blocks {
		rows := int64(2 * b.Rows.Len())
		bytes := rows * (5*2 + 4)
		output += bytes
		for _, u := range b.Units() {
			in := rows*3*2 + int64(u.Keys.Len())*8*4
			units, read, partials, bytes = units+1, read+in, partials+rows*6*4, bytes+rows*6*4
			s := 1 + float64(u.Pairs)*16/100 + float64(in+rows*6*4)/1000
			longest, total = max(longest, s), total+s
		}
		merges += 1 + float64(bytes)/1000
	}
	if p.Units != units || p.Read != read || p.Partials != partials || p.Output != output || p.FLOPs != float64(16*x.Pairs) {
		t.Errorf("%+v, want %d units, %d bytes read, %d of partials, %d of output", p, units, read, partials, output)
	}
	near := func(d time.Duration, s float64) bool { return math.Abs(d.Seconds()-s) < 1e-6*s }
	if one := p.On(m); !near(one.Units, total) || !near(one.Merge, merges) || math.Abs(one.Balance-1) > 1e-9 {
		t.Errorf("one worker: %+v, want %v and %v", one, total, merges)
	}
	m.Workers = int(units)
	if each := p.On(m); !near(each.Units, longest) || math.Abs(each.Balance-total/longest/float64(units)) > 1e-9 {
		t.Errorf("a worker for each unit: %+v, want %v", each, longest)
	}
}

// TestSchedule: the longest tasks first, each to the worker that is free first.
func TestSchedule(t *testing.T) {
	// Worker 1 takes 7, 4; worker 2 takes 7, 3 and, as it is free first, 3; worker 3 takes 6, 5.
	end, sum := schedule(map[float64]int64{7: 2, 6: 1, 5: 1, 4: 1, 3: 2}, 3)
	if end != 13 || sum != 35 {
		t.Errorf("end %v, sum %v, want 13 and 35", end, sum)
	}
	if end, sum := schedule(map[float64]int64{2: 10, 1: 1}, 4); end != 6 || sum != 21 {
		t.Errorf("end %v, sum %v, want 6 and 21", end, sum)
	}
	if end, sum := schedule(nil, 2); end != 0 || sum != 0 {
		t.Errorf("nothing: %v, %v", end, sum)
	}
}
