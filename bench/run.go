package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seed90331342/attn/backend"
)

const (
	// grace is how long a call that runs on Ctrl-C may take to end by itself:
	// a sweep's longest, with a margin.
	grace = 2 * time.Second
	// probeSeconds is how long a call must take before it predicts others that
	// are far longer: until then overhead is a good part of it.
	probeSeconds = 0.05
)

// Run measures every case on every backend, in that order, and reports. Results
// that are wrong, calls that fail and a budget that ends are in the report, not
// errors; see [Report.Err]. When ctx is cancelled the repetition that runs may
// end, and the report holds what was measured until then. The error is that of
// [Config.Check].
//
// A backend that computes in parallel on the machine that is timed should not
// be in use elsewhere meanwhile.
func Run(ctx context.Context, backends []backend.Backend, cfg Config) (*Report, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r, free := newRunner(ctx, cfg, len(backends))
	defer free()
	for i, be := range backends {
		r.report.Environment.Backends = append(r.report.Environment.Backends, be.Info())
		r.backend(be, i)
	}
	r.report.Interrupted = ctx.Err() != nil
	return r.report, nil
}

// newRunner begins a run. The caller calls free at its end.
func newRunner(ctx context.Context, cfg Config, backends int) (r *runner, free func()) {
	r = &runner{ctx: ctx, cfg: cfg, begin: time.Now(), backends: backends}
	r.report = newReport(cfg)

	budget, spent := context.WithoutCancel(ctx), func() {}
	if cfg.Budget > 0 {
		budget, spent = context.WithDeadline(budget, r.begin.Add(cfg.Budget))
	}
	work, cancel := context.WithCancel(budget)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(grace, cancel) })
	r.work = work
	return r, func() { stop(); cancel(); spent() }
}

// newReport begins a report.
func newReport(cfg Config) *Report {
	env := environment(time.Now())
	env.Seed, env.CheckedRows, env.BudgetS = cfg.Seed, cfg.Rows, cfg.Budget.Seconds()
	env.Missing = append(env.Missing, cfg.Missing...)
	return &Report{Schema: Schema, Environment: env, Cases: []Measurement{}, Ceilings: []Ceiling{}}
}

// runner is a run under way.
type runner struct {
	ctx      context.Context // ends on Ctrl-C
	work     context.Context // ends calls: grace later, or with the budget
	cfg      Config
	begin    time.Time
	report   *Report
	backends int     // in all
	done     float64 // of Progress

	// Of the backend that is measured:
	index int
	began time.Time
	end   time.Time // of its share of the budget; zero without one
	call  cost
	stage cost // in weights, as the stages compute every pair
	seq   int  // length of the last call timed
}

// left returns what is left of the backend's share; negative without a budget.
func (r *runner) left() time.Duration {
	if r.end.IsZero() {
		return -1
	}
	return max(time.Until(r.end), 0)
}

// stop says why to end between repetitions; "" to go on.
func (r *runner) stop() string {
	switch {
	case r.ctx.Err() != nil:
		return "interrupted"
	case r.left() == 0:
		return "the budget is spent"
	}
	return ""
}

// limit returns the longest call in seconds; 0 for none.
func (r *runner) limit() float64 {
	if len(r.cfg.Seqs) > 0 {
		return 0
	}
	return sweepCall
}

// backend measures all cases on be, the index-th.
func (r *runner) backend(be backend.Backend, index int) {
	r.index, r.began, r.end = index, time.Now(), time.Time{}
	r.call, r.stage, r.seq = cost{}, cost{}, 0
	if r.cfg.Budget > 0 {
		left := max(time.Until(r.begin.Add(r.cfg.Budget)), 0)
		r.end = r.began.Add(share(left, r.backends-index))
	}
	if len(r.cfg.Seqs) > 0 {
		for _, seq := range r.cfg.Seqs {
			r.report.Cases = append(r.report.Cases, r.measure(be, r.cfg.at(seq)))
		}
		return
	}
	for seq := sweepStart; seq <= maxSeq; seq *= 2 {
		m := r.measure(be, r.cfg.at(seq))
		r.report.Cases = append(r.report.Cases, m)
		if m.Status == NotRun || m.Status == Failed {
			return // a longer one would not do better
		}
	}
}

// measure runs one case and puts its figures in a row.
func (r *runner) measure(be backend.Backend, c Case) Measurement {
	m, b := r.prepare(be, c)
	if b == nil {
		return m
	}
	b.step = r.follow(m.Backend, c)
	t, note, err := b.run()
	return r.finish(m, c, t, note, err)
}

// finish puts the figures of a case in its row.
func (r *runner) finish(m Measurement, c Case, t timing, note string, err error) Measurement {
	if err != nil {
		return failed(m, err)
	}
	r.learn(c, m.FLOPs, t)
	if t.plan != nil {
		m.Path, m.Plan = t.plan.Path, t.plan
	}
	m.Note = note
	m.figures(t)
	return m
}

// prepare returns the row of a case that has not run yet, and what measures it;
// nil when it does not run, for the reason that the row notes.
func (r *runner) prepare(be backend.Backend, c Case) (Measurement, *bencher) {
	m := row(be.Info(), c)
	if m.Note = r.stop(); m.Note != "" {
		m.Note = "not run: " + m.Note
		return m, nil
	}
	plan, err := c.plan(be)
	if err != nil {
		return failed(m, err), nil
	}
	m.FLOPs, m.Bytes, m.Path, m.Plan = plan.FLOPs, c.moved(plan), plan.Path, &plan
	need := c.bytes()
	if free := freeMemory(); need < 0 || free > 0 && need > free {
		m.Note = fmt.Sprintf("not run: needs %s, %s are free", size(float64(uint64(need))), size(float64(free)))
		return m, nil
	}
	if len(r.cfg.Seqs) == 0 && need > sweepBytes {
		m.Note = fmt.Sprintf("not run: takes %s, a sweep ends at %s (give --seq for more)", size(float64(need)), size(sweepBytes))
		return m, nil
	}
	approached := r.approach(be, c)
	predicted := r.call.predict(plan.FLOPs)
	if r.call.known() {
		m.PredictedS = &predicted
	}
	if m.Note = admit(predicted, r.limit(), r.left()); m.Note != "" {
		return m, nil
	}
	return m, &bencher{be: be, c: c, work: r.work, stop: r.stop, seed: r.cfg.Seed, rows: r.cfg.Rows, left: r.left,
		stageTime: r.stage.predict(int64(product(c.weightsShape()))), t: approached}
}

// row returns what is known of a case before it runs.
func row(info backend.Info, c Case) Measurement {
	d := c.Dims
	m := Measurement{
		Backend: info.Name, Provider: info.Provider, Variant: c.Variant, DType: c.DType.String(),
		Batch: d.Batch, Heads: d.Heads, KVHeads: d.KVHeads, SeqQ: d.SeqQ, SeqK: d.SeqK, Dim: d.Dim,
		Causal: c.Causal, Softcap: c.Softcap, Threads: info.Threads, Status: NotRun,
	}
	if c.Mask {
		m.Mask = backend.F32.String()
	}
	if w := c.Window; w != nil {
		m.WindowLeft, m.WindowRight = bounded(w.Left), bounded(w.Right)
	}
	return m
}

// failed notes an error on m. What a backend does not do is no failure.
func failed(m Measurement, err error) Measurement {
	m.Status, m.Note = Failed, "failed: "+err.Error()
	if errors.Is(err, backend.ErrUnsupported) {
		m.Status, m.Note = NotRun, "not run: "+err.Error()
	}
	return m
}

// learn remembers what t cost.
func (r *runner) learn(c Case, flops int64, t timing) {
	seconds := t.warm
	if len(t.calls) > 0 {
		seconds = median(t.calls)
	}
	if seconds > 0 {
		r.call, r.seq = cost{seconds, flops}, c.Dims.SeqK
	}
	if len(t.stages) > 0 {
		r.stage = cost{median(t.stages), int64(product(c.weightsShape()))}
	}
}

// approach times shorter calls, doubling, until one takes long enough to predict
// c, which may be thousands of times the case before it. It returns what they
// compiled, which c need not.
func (r *runner) approach(be backend.Backend, c Case) (first timing) {
	for r.stop() == "" && r.call.seconds < probeSeconds {
		short := r.cfg.at(max(sweepStart, 2*r.seq))
		if short.Dims.SeqK >= c.Dims.SeqK {
			break
		}
		plan, err := short.plan(be)
		if err != nil {
			break // the case itself says so
		}
		if admit(r.call.predict(plan.FLOPs), 0, r.left()) != "" {
			break // the case is even longer
		}
		b := bencher{be: be, c: short, work: r.work, stop: r.stop, seed: r.cfg.Seed, left: r.left}
		b.step = r.follow(be.Info().Name, short)
		t, err := b.probe()
		if err != nil {
			break
		}
		first.compile += t.compile
		first.compiled += t.compiled
		r.learn(short, plan.FLOPs, t)
	}
	return first
}
