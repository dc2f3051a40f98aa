package bench

import (
	"context"
	"fmt"

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
	r.contenders = len(contenders)
	for _, c := range contenders {
		c.use()
		r.report.Environment.Backends = append(r.report.Environment.Backends, c.Device.Info())
	}
	for i := range cfg.Series {
		r.enter(i)
		if cfg.Budget > 0 {
			r.seriesEnd = r.runBegan.Add(cfg.Budget)
		}
		g := group{runner: r}
		for _, c := range contenders {
			g.entrants = append(g.entrants, entrant{Contender: c})
		}
		for _, seq := range r.series.Seqs {
			g.c = r.series.at(seq)
			g.enter()
			g.rounds()
			g.leave()
		}
	}
	return r.finish(), nil
}

// group is a case on all contenders.
type group struct {
	*runner
	c        Case
	entrants []entrant
}

// entrant is a contender of a group.
type entrant struct {
	Contender
	costs costs // of the series so far
	row   report.Measurement
	b     *bencher // nil when it does not run
	ready bool     // to run rounds
	err   error
}

// turn makes the i-th contender the one that runs.
func (g *group) turn(i int) *entrant {
	e := &g.entrants[i]
	e.use()
	g.costs = &e.costs
	return e
}

// enter prepares the contenders one after the other and warms them up.
func (g *group) enter() {
	g.passed(0)
	for i := range g.entrants {
		e := g.turn(i)
		e.row, e.b = g.prepare(e.Device, g.c)
		e.row.Contender, e.ready, e.err = e.Name, false, nil
		if e.b != nil {
			e.b.alone = true
			e.b.step = g.follow(e.Name, g.c)
			e.ready, e.err = e.b.begin()
		}
	}
}

// rounds gives each contender its turn in every round. Each round starts with another one:
// a call after a long one meets other clock rates and caches than a call after a short one.
func (g *group) rounds() {
	total, n := 0.0, len(g.entrants)
	for _, e := range g.entrants {
		if e.ready {
			total += ceilingSeconds + float64(perRound(e.b.t.warm))*e.b.t.warm
		}
	}
	if total == 0 {
		return
	}
	rounds := int(min(max(compareSeconds/total, minCompare), maxCompare))
	for r := range rounds {
		g.passed(float64(r) / float64(rounds))
		for i := range n {
			e := g.turn((r + i) % n)
			if !e.ready || g.stop() != "" {
				continue
			}
			e.b.step(fmt.Sprintf("round %d/%d", r+1, rounds))
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
		e := g.turn(i)
		if e.b != nil {
			free := func() {}
			if why != "" && e.b.note == "" {
				free = e.b.cut(why)
			}
			if e.ready {
				e.err = e.b.end()
			}
			free()
			g.record(&e.row, e.b, e.err)
			e.b.release()
		}
		g.add(e.row)
	}
}

// passed notes the fraction of the case that is done. All cases count alike.
func (g *group) passed(part float64) {
	g.done = max(g.done, (float64(g.completed())+part)/float64(g.cases()))
}
