package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/seed90331342/attn/bench/internal/machine"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// Contender is one of several ways to compute the same call.
type Contender struct {
	// Name identifies it in a report.
	Name string
	// Device computes.
	Device *kernels.Device
}

const (
	// compareSeconds is the total time of a case's rounds, minCompare to maxCompare of
	// them: shared machines vary by several percent, and only the median of many adjacent
	// pairs shows smaller differences.
	compareSeconds = 4.0
	minCompare     = 3
	maxCompare     = 15
)

// compareSeqs are the lengths of a comparison that has none.
var compareSeqs = []int{256, 1024, 4096}

// Compare measures every case on all contenders in turns: in each round, each contender
// does a few calls, with its ceilings next to them, so that the drift of a busy machine
// affects all of them alike. Otherwise it is like [Run] without the three stages. The table
// compares the other contenders with the first. Without lengths it measures 256, 1024 and
// 4096.
func Compare(ctx context.Context, contenders []Contender, cfg Config) (*report.Report, error) {
	cfg, err := cfg.withLengths()
	if err != nil {
		return nil, err
	}
	return run(ctx, [][]Contender{contenders}, cfg)
}

// entrant is a contender with the bencher of the current case.
type entrant struct {
	Contender
	costs costs // of the series so far
	b     *bencher
}

// turn makes the i-th entrant the one that runs.
func (r *runner) turn(i int) *bencher {
	e := &r.entrants[i]
	r.costs = &e.costs
	return e.b
}

// measure runs a case on all contenders and adds their rows. It reports whether one of them
// has measured it.
func (r *runner) measure(c Case) (measured bool) {
	r.passed(0)
	for i := range r.entrants {
		r.turn(i)
		e := &r.entrants[i]
		if e.b = r.prepare(&e.Contender, c); e.b.runs {
			e.b.begin()
		}
	}
	r.rounds()
	for i := range r.entrants {
		b := r.turn(i)
		b.finish()
		r.report.Cases = append(r.report.Cases, b.row)
		if r.cfg.Measured != nil {
			r.report.FitGrowth()
			r.cfg.Measured(r.report)
		}
		measured = measured || b.row.Status == report.OK || b.row.Status == report.Wrong
	}
	return measured
}

// rounds gives each contender its turn in every round. Each round starts with another one:
// a call after a long one meets other clock rates and caches than a call after a short one.
func (r *runner) rounds() {
	total, n := 0.0, len(r.entrants)
	for _, e := range r.entrants {
		if e.b.ready {
			total += ceilingSeconds + float64(perRound(e.b.warm))*e.b.warm
		}
		e.b.roundsBegan = time.Now()
	}
	load := machine.ReadLoad()
	if n > 1 && total > 0 {
		fixed := int(min(max(compareSeconds/total, minCompare), maxCompare))
		for _, e := range r.entrants {
			e.b.fixed = fixed
		}
	}
	for round, going := 0, true; going; round++ {
		going = false
		for i := range n {
			b := r.turn((round + i) % n)
			if !b.ready || b.enough() || r.stop() != "" {
				continue
			}
			going = true
			step := fmt.Sprintf("round %d", round+1)
			if b.fixed > 0 {
				step += fmt.Sprintf("/%d", b.fixed)
				r.passed(float64(round) / float64(b.fixed))
			}
			b.step(step)
			if err := b.round(); err != nil {
				b.fail(err) // the output of a cancelled call cannot be checked
			}
		}
	}
	now := machine.ReadLoad()
	for _, e := range r.entrants {
		if others := load.Others(now, e.Device.Info().Threads); others >= 0 {
			e.b.row.OthersPercent = report.Figure(100 * others)
		}
	}
}

// passed notes the fraction of a comparison's case that is done. All cases count alike.
func (r *runner) passed(part float64) {
	if len(r.entrants) > 1 {
		r.done = max(r.done, (float64(r.completed())+part)/float64(r.cases()))
	}
}
