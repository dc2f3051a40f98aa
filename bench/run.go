package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// Run measures every series on every backend, one after the other, and reports. Results
// that are wrong, calls that fail and a budget that ends are in the report, not
// errors; see [Report.Err]. When ctx is cancelled the repetition that runs may
// end, and the report holds what was measured until then. The error is that of
// [Config.Check], or says that Config.Resume is of something else (ErrOption).
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
	if err := r.resumable(backends); err != nil {
		return nil, err
	}
	for i, be := range backends {
		r.report.Environment.Backends = append(r.report.Environment.Backends, be.Info())
		r.backend(be, i)
	}
	r.finished()
	return r.report, nil
}

// finished ends the report.
func (r *runner) finished() {
	r.report.Interrupted = r.ctx.Err() != nil
	r.report.Growth = growth(r.report.Cases)
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
	env.Args = append(env.Args, cfg.Args...)
	return &Report{Schema: Schema, Environment: env, Cases: []Measurement{}, Ceilings: []Ceiling{}, Growth: []Growth{}}
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

	// Of the backend that is measured, and of its series:
	index   int
	began   time.Time
	series  *Series
	nth     int // of the series
	entered time.Time
	end     time.Time // of its share of the budget; zero without one
	call    cost
	stage   cost // in weights, as the stages compute every pair
	seq     int  // length of the last call timed
}

// left returns what is left of the series' share; negative without a budget.
func (r *runner) left() time.Duration {
	if r.end.IsZero() {
		return -1
	}
	return max(time.Until(r.end), 0)
}

// interrupted is why a run stops on Ctrl-C.
const interrupted = "interrupted"

// stop says why to end between repetitions; "" to go on.
func (r *runner) stop() string {
	switch {
	case r.ctx.Err() != nil:
		return interrupted
	case r.left() == 0:
		return "the budget is spent"
	}
	return ""
}

// limit returns the longest call in seconds; 0 for none.
func (r *runner) limit() float64 {
	if len(r.series.Seqs) > 0 {
		return 0
	}
	return sweepCall
}

// backend measures all series on be, the index-th.
func (r *runner) backend(be backend.Backend, index int) {
	r.index, r.began = index, time.Now()
	end := r.began
	if r.cfg.Budget > 0 {
		end = r.began.Add(share(max(time.Until(r.begin.Add(r.cfg.Budget)), 0), r.backends-index))
	}
	for i := range r.cfg.Series {
		r.enter(i)
		if r.cfg.Budget > 0 {
			r.end = time.Now().Add(share(max(time.Until(end), 0), len(r.cfg.Series)-i))
		}
		r.measureSeries(be)
	}
}

// enter begins the i-th series, of whose costs nothing is known.
func (r *runner) enter(i int) {
	r.series, r.nth, r.entered, r.end = &r.cfg.Series[i], i, time.Now(), time.Time{}
	r.call, r.stage, r.seq = cost{}, cost{}, 0
}

// measureSeries measures the series on be.
func (r *runner) measureSeries(be backend.Backend) {
	if len(r.series.Seqs) > 0 {
		for _, seq := range r.series.Seqs {
			r.add(r.measure(be, r.series.at(seq)))
		}
		return
	}
	for seq := sweepStart; seq <= maxSeq; seq *= 2 {
		m := r.measure(be, r.series.at(seq))
		r.add(m)
		if m.Status != OK && m.Status != Wrong {
			return // a longer one would not do better
		}
	}
}

// add puts a row into the report.
func (r *runner) add(m Measurement) {
	r.report.Cases = append(r.report.Cases, m)
	if r.cfg.Measured != nil {
		r.report.Growth = growth(r.report.Cases)
		r.cfg.Measured(r.report)
	}
}

// measure runs one case and puts its figures in a row.
func (r *runner) measure(be backend.Backend, c Case) Measurement {
	if m, ok := r.resumed(be.Info(), c); ok {
		return m
	}
	m, b := r.prepare(be, c)
	if b == nil {
		return m
	}
	b.step = r.follow(m.Backend, c)
	b.warmed = func(seconds float64) { r.call, r.seq = cost{seconds, m.weight()}, c.Dims.SeqK }
	t, note, err := b.run()
	return r.finish(m, c, t, note, err)
}

// finish puts the figures of a case in its row.
func (r *runner) finish(m Measurement, c Case, t timing, note string, err error) Measurement {
	if err != nil {
		return failed(m, err)
	}
	r.learn(c, m.weight(), t)
	if t.plan != nil {
		m.Path, m.Plan = t.plan.Path, t.plan
		m.Memory.Scratch = t.plan.Scratch
	}
	m.Note = note
	m.figures(t)
	if m.Status == NotRun && m.PredictedS != nil && r.ctx.Err() == nil {
		m.Status, m.Note = Predicted, strings.TrimPrefix(m.Note, "not run: ") // the budget ended before its first round
	}
	return m
}

// prepare returns the row of a case that has not run yet, and what measures it;
// nil when it does not run, for the reason that the row notes.
func (r *runner) prepare(be backend.Backend, c Case) (Measurement, *bencher) {
	m := r.row(be.Info(), c)
	plan, err := c.plan(be)
	if err != nil {
		return failed(m, err), nil
	}
	m.planned(c, be.Info(), plan)
	if r.call.known() {
		m.PredictedS = figure(r.call.predict(m.weight()))
	}
	if why := r.stop(); why != "" {
		return m.skipped(why), nil
	}
	need := c.bytes()
	if free := freeMemory(); need < 0 || free > 0 && need > free {
		return m.skipped(fmt.Sprintf("needs %s, %s are free", size(float64(uint64(need))), size(float64(free)))), nil
	}
	if len(r.series.Seqs) == 0 && need > sweepBytes {
		return m.skipped(fmt.Sprintf("takes %s, a sweep ends at %s (give --seq for more)", size(float64(need)), size(sweepBytes))), nil
	}
	approached := r.approach(be, c)
	predicted := r.call.predict(m.weight())
	if r.call.known() {
		m.PredictedS = figure(predicted)
	}
	if why := admit(predicted, r.limit(), r.left()); why != "" {
		m.Status, m.Note = Predicted, why
		return m, nil
	}
	return m, &bencher{be: be, c: c, work: r.work, stop: r.stop, seed: r.cfg.Seed, rows: r.cfg.Rows, left: r.left, limit: r.patience(c.Dims.SeqK),
		stageTime: r.stage.predict(int64(product(c.weightsShape()))), t: approached}
}

// patience returns how long, in seconds, the rounds of a case may take that only make
// its median more precise: where the lengths of a series and its budget are known an
// even part of what the lengths that still fit leave of it, else caseSeconds.
func (r *runner) patience(seq int) float64 {
	left := r.left()
	if left < 0 || len(r.series.Seqs) == 0 {
		return caseSeconds
	}
	later, spare := r.later(seq), left.Seconds()
	for _, s := range later {
		need := 0.0
		if r.seq > 0 {
			need = leastSeconds(r.predict(s))
		}
		if need > spare {
			break
		}
		spare -= need
	}
	return spare / float64(len(later)+2)
}

// row returns what is known of a case before it runs.
func (r *runner) row(info backend.Info, c Case) Measurement {
	d := c.Dims
	m := Measurement{
		Backend: info.Name, Provider: info.Provider, Series: r.series.Name, Name: c.String(), Variant: c.Variant, DType: c.DType.String(),
		Batch: d.Batch, Heads: d.Heads, KVHeads: d.KVHeads, SeqQ: d.SeqQ, SeqK: d.SeqK, Dim: d.Dim,
		Causal: c.Causal, Softcap: c.Softcap, Threads: info.Threads, Status: NotRun, Rounds: []Round{},
	}
	if c.Mask {
		m.Mask = backend.F32.String()
	}
	if w := c.Window; w != nil {
		m.WindowLeft, m.WindowRight = bounded(w.Left), bounded(w.Right)
	}
	return m
}

// planned fills in what follows from a case and its plan.
func (m *Measurement) planned(c Case, info backend.Info, plan backend.Plan) {
	w := c.work(plan.Pairs)
	m.Pairs, m.FLOPs, m.FLOPsFull, m.Bytes = w.pairs, w.flops, w.full, w.bytes
	m.Intensity = float64(w.flops) / float64(w.bytes)
	m.Memory = c.memory(plan.Scratch, info.Type != backend.CPU)
	m.Path, m.Plan = plan.Path, &plan
}

// weight is what a call's time is taken to grow with: operations, or bytes where there
// are none.
func (m *Measurement) weight() int64 { return max(m.FLOPs, m.Bytes/8) }

// skipped says why a case does not run, and that there is a prediction where there
// is one.
func (m Measurement) skipped(why string) Measurement {
	if m.PredictedS != nil && why != interrupted {
		m.Status, m.Note = Predicted, "predicted "+duration(*m.PredictedS)+" each, "+why
		return m
	}
	m.Status, m.Note = NotRun, "not run: "+why
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

// learn remembers what t cost, of so much weight.
func (r *runner) learn(c Case, weight int64, t timing) {
	seconds := t.warm
	if len(t.rounds) > 0 {
		seconds = median(t.medians())
	}
	if seconds > 0 {
		r.call, r.seq = cost{seconds, weight}, c.Dims.SeqK
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
		short := r.series.at(max(sweepStart, 2*r.seq))
		if short.Dims.SeqK >= c.Dims.SeqK {
			break
		}
		plan, err := short.plan(be)
		if err != nil {
			break // the case itself says so
		}
		var m Measurement
		m.planned(short, be.Info(), plan)
		if admit(r.call.predict(m.weight()), 0, r.left()) != "" {
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
		r.learn(short, m.weight(), t)
	}
	return first
}
