package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// Contender is one of several ways to compute the same call.
type Contender struct {
	// Name identifies it in a report.
	Name string
	// Device computes.
	Device *kernels.Device
	// Use, unless nil, is called before anything runs on Device. It sets what is global to
	// the program and differs between contenders, such as the BLAS of gonum.
	Use func()
}

func (c *Contender) use() {
	if c.Use != nil {
		c.Use()
	}
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
	r, free := newRunner(ctx, cfg, 1)
	defer free()
	end := time.Time{}
	if cfg.Budget > 0 {
		end = r.begin.Add(cfg.Budget)
	}
	// Each contender has its own costs, which predict its calls.
	runners := make([]runner, len(contenders))
	for i, c := range contenders {
		runners[i] = *r
		runners[i].cfg.Progress = nil // only the comparison as a whole reports progress
		c.use()
		r.report.Environment.Backends = append(r.report.Environment.Backends, c.Device.Info())
	}
	n := 0
	for i := range cfg.Series {
		r.enter(i)
		r.end = end
		for k := range runners {
			runners[k].enter(i)
			runners[k].end = end
		}
		for _, seq := range r.series.Seqs {
			g := group{runner: r, c: r.series.at(seq), index: n}
			g.enter(contenders, runners)
			g.rounds()
			g.leave()
			n++
		}
	}
	return r.finish(), nil
}

// group is a case on all contenders.
type group struct {
	*runner
	c        Case
	index    int // among the cases
	entrants []entrant
}

// entrant is a contender of a group.
type entrant struct {
	Contender
	runner *runner
	row    report.Measurement
	b      *bencher // nil when it does not run
	ready  bool     // to run rounds
	err    error
}

// enter prepares the contenders one after the other and warms them up.
func (g *group) enter(contenders []Contender, runners []runner) {
	for i, c := range contenders {
		c.use()
		e := entrant{Contender: c, runner: &runners[i]}
		e.row, e.b = e.runner.prepare(c.Device, g.c)
		e.row.Contender = c.Name
		if e.b != nil {
			e.b.alone = true
			e.b.step = g.follow(c.Name, 0)
			e.ready, e.err = e.b.begin()
		}
		g.entrants = append(g.entrants, e)
	}
}

// rounds gives each contender its turn in every round. Each round starts with another one:
// a call after a long one meets other clock rates and caches than a call after a short one.
func (g *group) rounds() {
	total, n := 0.0, len(g.entrants)
	for i := range g.entrants {
		if e := &g.entrants[i]; e.ready {
			total += ceilingSeconds + float64(perRound(e.b.t.warm))*e.b.t.warm
		}
	}
	if total == 0 {
		return
	}
	rounds := int(min(max(compareSeconds/total, minCompare), maxCompare))
	for r := range rounds {
		for i := range n {
			e := &g.entrants[(r+i)%n]
			if !e.ready || g.stop() != "" {
				continue
			}
			g.follow(e.Name, float64(r)/float64(rounds))(fmt.Sprintf("round %d/%d", r+1, rounds))
			e.use()
			if err := e.b.round(); err != nil {
				e.ready, e.err = false, e.b.stopped(err)
			}
		}
	}
}

// leave checks the contenders' results, adds their rows and releases their tensors.
func (g *group) leave() {
	why := g.stop()
	for i := range g.entrants {
		e := &g.entrants[i]
		if e.b != nil {
			e.use()
			free := func() {}
			if why != "" && e.b.note == "" {
				free = e.b.cut(why)
			}
			if e.ready {
				e.err = e.b.end()
			}
			free()
			e.runner.record(&e.row, e.b, e.err)
			e.b.release()
		}
		g.add(e.row)
	}
}

// follow returns a function that reports the steps of the case, of which a part is done.
// All cases count alike.
func (g *group) follow(name string, part float64) func(step string) {
	return func(step string) {
		if g.cfg.Progress == nil {
			return
		}
		g.done = max(g.done, (float64(g.index)+part)/float64(g.cases()))
		elapsed, rest := time.Since(g.begin), time.Duration(0)
		if g.done > 0 {
			rest = time.Duration(float64(elapsed) * (1/g.done - 1))
		}
		g.cfg.Progress(Progress{Backend: name, Case: g.c, Step: step, Done: g.done, Cases: g.index, Of: g.cases(), Elapsed: elapsed, Remaining: rest})
	}
}
