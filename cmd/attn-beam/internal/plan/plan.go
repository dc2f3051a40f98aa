// Package plan predicts what a cut call costs: operations, bytes and time on many workers.
//
//	unit      Overhead + FLOPs/Speed + (q, k and v read + partial results written)/Bandwidth
//	merge     Overhead + (partial results read + output written)/Bandwidth, for each block
//
// Units are given to workers in the order of their time, the longest first, each to the worker that is free first.
// Merges begin when all units have ended, as the engine groups the partial results of a block in between, and are given
// out in the same way. Start-up of the engine, and failures, are not in it.
package plan

import (
	"cmp"
	"container/heap"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/cmd/internal/cli"
)

// Machine describes workers that are all alike.
type Machine struct {
	Workers   int
	Speed     float64 // of a worker, in FLOP/s
	Bandwidth float64 // of a worker to and from the files, in bytes/s
	// Overhead is the time that a unit or a merge takes without computing and without
	// moving data: engine, opening files.
	Overhead time.Duration
}

// Plan is the cost of a cut.
type Plan struct {
	Cut   *cut.Cut
	Units int64
	FLOPs float64
	// Read are the bytes of q, k and v that units read, in total.
	Read int64
	// Partials are the bytes of partial results, which are written once and read once.
	Partials int64
	// Output are the bytes of the results, LSE included.
	Output int64

	units  map[unit]int64 // how many there are
	merges map[merge]int64
}

// unit and merge are what the time of one depends on.
type unit struct {
	pairs int64
	bytes int64
}
type merge struct{ bytes int64 }

// New returns the plan of x for elements of so many bytes in q, in k and v, and in o.
func New(x *cut.Cut, sizeQ, sizeKV, sizeO int) *Plan {
	p := &Plan{Cut: x, FLOPs: 2 * float64(x.Dims.Dim+x.Dims.ValueDim) * float64(x.Pairs), units: map[unit]int64{}, merges: map[merge]int64{}}
	same := map[cut.Block]int64{} // all heads are cut alike
	for _, b := range x.Blocks {
		b.ID, b.KVHead, b.Heads, b.Batch = 0, 0, cut.Span{Hi: b.Heads.Len()}, 0
		same[b]++
	}
	for b, count := range same {
		rows := int64(b.Heads.Len() * b.Rows.Len())
		partial, n := rows*int64(x.Dims.ValueDim+1)*4, int64(0)
		for _, u := range b.Units() {
			n++
			read := rows*int64(x.Dims.Dim*sizeQ) + int64(u.Keys.Len()*(x.Dims.Dim+x.Dims.ValueDim)*sizeKV)
			p.Read += count * read
			p.units[unit{u.Pairs, read + partial}] += count
		}
		output := rows * int64(x.Dims.ValueDim*sizeO+4)
		p.Units += count * n
		p.Partials += count * n * partial
		p.Output += count * output
		p.merges[merge{n*partial + output}] += count
	}
	return p
}

// Time is a predicted time.
type Time struct {
	Units, Merge time.Duration
	// Balance is the time of the units if all workers ended at once, divided by Units.
	Balance float64
	// Efficiency is the time of the operations alone on all workers, divided by the sum of Units and Merge.
	Efficiency float64
}

// On returns the time that p takes.
func (p *Plan) On(m Machine) Time {
	over := m.Overhead.Seconds()
	units, merges := map[float64]int64{}, map[float64]int64{}
	for u, n := range p.units {
		flops := 2 * float64(p.Cut.Dims.Dim+p.Cut.Dims.ValueDim) * float64(u.pairs)
		units[over+flops/m.Speed+float64(u.bytes)/m.Bandwidth] += n
	}
	for g, n := range p.merges {
		merges[over+float64(g.bytes)/m.Bandwidth] += n
	}
	end, sum := schedule(units, m.Workers)
	merged, _ := schedule(merges, m.Workers)
	t := Time{Units: seconds(end), Merge: seconds(merged), Balance: 1, Efficiency: 1}
	if end > 0 {
		t.Balance = sum / float64(m.Workers) / end
		t.Efficiency = p.FLOPs / m.Speed / float64(m.Workers) / (end + merged)
	}
	return t
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// schedule gives tasks to workers, the longest first, each to the worker that is free first. It returns when the last
// one ends, and the sum of all. tasks has how many there are of each length.
func schedule(tasks map[float64]int64, workers int) (end, sum float64) {
	busy := make(loads, workers)
	for n, length := range slices.SortedFunc(maps.Keys(tasks), func(a, b float64) int { return cmp.Compare(b, a) }) {
		count := tasks[length]
		sum += length * float64(count)
		if n == 0 { // all workers are free: they take turns
			for i := range busy {
				busy[i] = length * float64(count/int64(workers))
			}
			count %= int64(workers)
		}
		for range count {
			busy[0] += length
			heap.Fix(&busy, 0)
		}
	}
	return slices.Max(busy), sum
}

// loads is a heap of the times at which workers are free.
type loads []float64

func (l loads) Len() int           { return len(l) }
func (l loads) Less(i, j int) bool { return l[i] < l[j] }
func (l loads) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }
func (l loads) Push(any)           {}
func (l loads) Pop() any           { return nil }

// Print writes the plan and its time on m.
func (p *Plan) Print(w io.Writer, m Machine) error {
	x, t := p.Cut, p.On(m)
	all := float64(x.Dims.Batch) * float64(x.Dims.Heads) * float64(x.Dims.SeqQ) * float64(x.Dims.SeqK)
	share := 0.0
	if all > 0 {
		share = 100 * float64(x.Pairs) / all
	}
	_, err := fmt.Fprintf(w, `blocks      %s of up to %s rows
units       %s of up to %s keys
pairs       %s visible, %.3g%% of all
operations  %s
read        %s of q, k and v
partials    %s, written and read once
output      %s
time        %v for the units, %v for the merge
            on %s of %s/s and %s/s, %v a unit
balance     %.1f%%: the workers' mean time, of the time of the last one
efficiency  %.1f%%: the time of the operations alone, of the whole
`,
		thousands(int64(len(x.Blocks))), thousands(int64(x.Config.Rows)), thousands(p.Units), thousands(int64(x.Config.Split)),
		cli.SI(float64(x.Pairs), ""), share, cli.SI(p.FLOPs, "FLOP"), cli.SI(float64(p.Read), "B"), cli.SI(float64(p.Partials), "B"), cli.SI(float64(p.Output), "B"),
		short(t.Units), short(t.Merge), workers(m.Workers), cli.SI(m.Speed, "FLOP"), cli.SI(m.Bandwidth, "B"), m.Overhead, 100*t.Balance, 100*t.Efficiency)
	return err
}

func workers(n int) string {
	if n == 1 {
		return "1 worker"
	}
	return thousands(int64(n)) + " workers"
}

// thousands returns n with a comma before each group of three digits.
func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// short returns d with about three digits.
func short(d time.Duration) string {
	switch {
	case d >= 1000*time.Hour:
		return thousands(int64(math.Round(d.Hours()/24))) + " days"
	case d >= 100*time.Hour:
		return fmt.Sprintf("%.1f days", d.Hours()/24)
	case d >= 100*time.Minute:
		return fmt.Sprintf("%.1f h", d.Hours())
	case d >= 100*time.Second:
		return fmt.Sprintf("%.1f min", d.Minutes())
	}
	return fmt.Sprintf("%.2g s", d.Seconds())
}
