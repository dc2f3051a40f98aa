package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/seed90331342/attn/backend"
)

// Contender is one of several ways to compute the same call.
type Contender struct {
	// Name tells it from the others in a report.
	Name string
	// Backend computes.
	Backend backend.Backend
	// Use, when not nil, is called before anything runs on Backend, to put in
	// place what is global to the program and differs between contenders, such
	// as the BLAS behind gonum.
	Use func()
}

const (
	// compareSeconds is what the rounds of a case add up to, minCompare to
	// maxCompare of them: a machine that others share moves by several percent, and only
	// the median of many close pairs shows less than that.
	compareSeconds = 4.0
	minCompare     = 3
	maxCompare     = 15
)

// compareSeqs are the lengths of a comparison that names none.
var compareSeqs = []int{256, 1024, 4096}

// Compare measures every case on all contenders at once: each in turn does a few
// calls, with its ceilings beside them, and so on round after round, so that the
// drift of a busy machine meets all alike. It is [Run] otherwise, without the
// three stages; the first contender is what the table compares the others with.
// Without lengths it measures 256, 1024 and 4096.
func Compare(ctx context.Context, contenders []Contender, cfg Config) (*Report, error) {
	cfg, err := cfg.withLengths()
	if err != nil {
		return nil, err
	}
	r, free := newRunner(ctx, cfg, 1)
	defer free()
	if cfg.Budget > 0 {
		r.end = r.begin.Add(cfg.Budget)
	}
	// Each has costs of its own, from which its calls are predicted.
	runners := make([]runner, len(contenders))
	for i, c := range contenders {
		runners[i] = *r
		c.use()
		r.report.Environment.Backends = append(r.report.Environment.Backends, c.Backend.Info())
	}
	total, n := 0, 0
	for _, s := range cfg.Series {
		total += len(s.Seqs)
	}
	for i := range cfg.Series {
		end := r.end
		r.enter(i)
		r.end = end
		for k := range runners {
			runners[k].enter(i)
			runners[k].end = end
		}
		for _, seq := range r.series.Seqs {
			g := group{runner: r, c: r.series.at(seq), index: n, of: total}
			g.enter(contenders, runners)
			g.rounds()
			g.leave()
			g.release()
			n++
		}
	}
	r.finished()
	return r.report, nil
}

func (c *Contender) use() {
	if c.Use != nil {
		c.Use()
	}
}

// group is a case on all contenders.
type group struct {
	*runner
	c        Case
	index    int // among the cases
	of       int // that many
	entrants []entrant
}

// entrant is a contender on a case.
type entrant struct {
	Contender
	runner *runner
	row    Measurement
	b      *bencher // nil when it does not run
	each   int      // calls of a round; 0 when it takes no part in rounds
	err    error
}

// enter prepares the contenders one after the other and warms them up.
func (g *group) enter(contenders []Contender, runners []runner) {
	for i, c := range contenders {
		c.use()
		e := entrant{Contender: c, runner: &runners[i]}
		// Approaching a case, which short ones need not, tells no progress.
		e.runner.cfg.Progress = nil
		e.row, e.b = e.runner.prepare(c.Backend, g.c)
		e.row.Contender = c.Name
		if e.b != nil {
			e.b.alone = true
			e.b.step = g.follow(c.Name, 0)
			var more bool
			if more, e.err = e.b.begin(); more {
				e.each = perRound(e.b.t.warm)
			}
		}
		g.entrants = append(g.entrants, e)
	}
}

// rounds lets each have its turn until there are enough, beginning with another
// one each time: what comes after a long call finds other clocks and caches than
// what comes after a short one.
func (g *group) rounds() {
	total, n := 0.0, len(g.entrants)
	for i := range g.entrants {
		if e := &g.entrants[i]; e.each > 0 {
			total += ceilingSeconds + float64(e.each)*e.b.t.warm
		}
	}
	if total == 0 {
		return
	}
	rounds := int(min(max(compareSeconds/total, minCompare), maxCompare))
	for r := range rounds {
		for i := range n {
			e := &g.entrants[(r+i)%n]
			if e.each == 0 || g.stop() != "" {
				continue
			}
			g.follow(e.Name, float64(r)/float64(rounds))(fmt.Sprintf("round %d/%d", r+1, rounds))
			e.use()
			if err := e.b.round(&e.b.t, e.each); err != nil {
				e.each, e.err = 0, e.b.stopped(err)
			}
		}
	}
}

// leave checks what the contenders wrote and reports their rows.
func (g *group) leave() {
	why := g.stop()
	for i := range g.entrants {
		e := &g.entrants[i]
		if e.b != nil {
			e.use()
			e.b.t.others = -1 // the others' turns are in between
			free := func() {}
			if why != "" && e.b.note == "" {
				free = e.b.cut(why)
			}
			if e.each > 0 {
				e.err = e.b.end()
			}
			free()
			e.row = e.runner.finish(e.row, g.c, e.b.t, e.b.note, e.err)
		}
		g.add(e.row)
	}
}

// release gives the tensors of all contenders back.
func (g *group) release() {
	for _, e := range g.entrants {
		if e.b != nil {
			e.b.release()
		}
	}
}

// follow returns what tells the progress of the case, of which a part is done.
// Cases count alike, as costs are known only once they ran.
func (g *group) follow(name string, part float64) func(step string) {
	return func(step string) {
		if g.cfg.Progress == nil {
			return
		}
		g.done = max(g.done, (float64(g.index)+part)/float64(g.of))
		rest := time.Duration(0)
		if g.done > 0 {
			rest = time.Duration(float64(time.Since(g.begin)) * (1/g.done - 1))
		}
		g.cfg.Progress(Progress{Backend: name, Case: g.c, Step: step, Done: g.done,
			Cases: g.index, Of: g.of, Elapsed: time.Since(g.begin), Remaining: rest})
	}
}
