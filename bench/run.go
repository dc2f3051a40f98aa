package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/internal/budget"
	"github.com/seed90331342/attn/kernels"
)

// grace is how long a running call may continue after Ctrl-C: the longest call of a sweep,
// with a margin.
const grace = 2 * time.Second

// Run measures every series on every device, one after the other. Wrong results, failing
// calls and a spent budget are in the report and not errors, see [report.Report.Err]. When
// ctx is cancelled the running repetition may end, and the report has what was measured
// until then. The error is that of [Config.Check], or ErrOption for a Config.Resume of
// another machine or version.
//
// A device that computes on the machine's own processors should not be used elsewhere
// meanwhile.
func Run(ctx context.Context, devices []*kernels.Device, cfg Config) (*report.Report, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r, free := newRunner(ctx, cfg, len(devices))
	defer free()
	if err := r.resumable(devices); err != nil {
		return nil, err
	}
	for i, dev := range devices {
		r.report.Environment.Backends = append(r.report.Environment.Backends, dev.Info())
		r.device(dev, i)
	}
	return r.finish(), nil
}

// runner is the state of a run.
type runner struct {
	ctx      context.Context // ends on Ctrl-C
	work     context.Context // ends calls: grace later, or when the budget is spent
	cfg      Config
	runBegan time.Time
	report   *report.Report
	devices  int // in all
	// contenders is the number of them in a comparison, else 0.
	contenders int
	done       float64 // see Progress

	// State of the current device and series:
	deviceIndex int
	deviceBegan time.Time
	series      *Series
	seriesIndex int
	seriesBegan time.Time
	seriesEnd   time.Time // of the series' share of the budget; zero without one
	*costs
}

// newRunner begins a run. The caller calls free at its end.
func newRunner(ctx context.Context, cfg Config, devices int) (r *runner, free func()) {
	r = &runner{ctx: ctx, cfg: cfg, runBegan: time.Now(), devices: devices, report: newReport(cfg)}
	budget, spent := context.WithoutCancel(ctx), func() {}
	if cfg.Budget > 0 {
		budget, spent = context.WithDeadline(budget, r.runBegan.Add(cfg.Budget))
	}
	work, cancel := context.WithCancel(budget)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(grace, cancel) })
	r.work = work
	return r, func() { stop(); cancel(); spent() }
}

// newReport returns an empty report of this machine.
func newReport(cfg Config) *report.Report {
	env := report.ThisMachine(time.Now())
	env.Seed, env.CheckedRows, env.BudgetS = cfg.Seed, cfg.Rows, cfg.Budget.Seconds()
	env.Missing = append(env.Missing, cfg.Missing...)
	env.Args = append(env.Args, cfg.Args...)
	return &report.Report{Schema: report.Schema, Environment: env, Cases: []report.Measurement{}, Ceilings: []report.Ceiling{}, Growth: []report.Growth{}}
}

// finish completes the report.
func (r *runner) finish() *report.Report {
	r.report.Interrupted = r.ctx.Err() != nil
	r.report.FitGrowth()
	return r.report
}

// left returns what is left of the series' share of the budget; negative without a budget.
func (r *runner) left() time.Duration {
	if r.seriesEnd.IsZero() {
		return -1
	}
	return max(time.Until(r.seriesEnd), 0)
}

// interrupted is the reason to stop after Ctrl-C.
const interrupted = "interrupted"

// stop returns the reason to end between repetitions; "" to continue.
func (r *runner) stop() string {
	switch {
	case r.ctx.Err() != nil:
		return interrupted
	case r.left() == 0:
		return "the budget is spent"
	}
	return ""
}

// device measures all series on a device. Each gets an even share of the device's budget
// that is left, as each device does of the run's.
func (r *runner) device(dev *kernels.Device, index int) {
	r.deviceIndex, r.deviceBegan = index, time.Now()
	end := r.deviceBegan.Add(share(time.Until(r.runBegan.Add(r.cfg.Budget)), r.devices-index))
	for i := range r.cfg.Series {
		r.enter(i)
		if r.cfg.Budget > 0 {
			r.seriesEnd = time.Now().Add(share(time.Until(end), len(r.cfg.Series)-i))
		}
		r.measureSeries(dev)
	}
}

// enter begins the i-th series. The cost of its calls is unknown.
func (r *runner) enter(i int) {
	r.series, r.seriesIndex, r.seriesBegan, r.seriesEnd = &r.cfg.Series[i], i, time.Now(), time.Time{}
	r.costs = new(costs)
}

// measureSeries measures the lengths of the series, or doubles the length until a case does
// not run.
func (r *runner) measureSeries(dev *kernels.Device) {
	for _, seq := range r.series.Seqs {
		r.add(r.measure(dev, r.series.at(seq)))
	}
	if len(r.series.Seqs) > 0 {
		return
	}
	for seq := sweepStart; seq <= maxSeq; seq *= 2 {
		m := r.measure(dev, r.series.at(seq))
		r.add(m)
		if m.Status != report.OK && m.Status != report.Wrong {
			return
		}
	}
}

// add puts a row into the report.
func (r *runner) add(m report.Measurement) {
	r.report.Cases = append(r.report.Cases, m)
	if r.cfg.Measured != nil {
		r.report.FitGrowth()
		r.cfg.Measured(r.report)
	}
}

// measure runs one case and returns its row.
func (r *runner) measure(dev *kernels.Device, c Case) report.Measurement {
	if m, ok := r.resumed(dev.Info(), c); ok {
		return m
	}
	m, b := r.prepare(dev, c)
	if b == nil {
		return m
	}
	b.step = r.follow(m.Backend, c)
	err := b.run()
	r.record(&m, b, err)
	return m
}

// record puts the figures of a case into its row and remembers its cost.
func (r *runner) record(m *report.Measurement, b *bencher, err error) {
	if err != nil {
		fail(m, err)
		return
	}
	b.learn()
	if b.t.plan != nil {
		m.Path, m.Plan = b.t.plan.Path, b.t.plan
		m.Memory.Scratch = b.t.plan.Scratch
	}
	m.Note = b.note
	b.t.figures(m)
	if m.Status == report.NotRun && m.PredictedS != nil && r.ctx.Err() == nil {
		m.Status, m.Note = report.Predicted, strings.TrimPrefix(m.Note, "not run: ") // the budget ended before the first round
	}
}

// prepare returns the row of a case that has not run yet with its bencher, or without one
// when it does not run, for the reason in the note.
func (r *runner) prepare(dev *kernels.Device, c Case) (report.Measurement, *bencher) {
	m, err := planned(r.work, dev, c)
	if err != nil {
		return m, nil
	}
	m.PredictedS = report.Positive(r.call.predict(m.Weight()))
	if why := r.stop(); why != "" {
		skip(&m, why)
		return m, nil
	}
	need := c.hostBytes()
	if free := budget.Free(); need < 0 || need > free {
		skip(&m, fmt.Sprintf("needs %s, %s are free", format.Size(float64(uint64(need))), format.Size(float64(free))))
		return m, nil
	}
	limit := 0.0
	if len(r.series.Seqs) == 0 {
		limit = sweepCall
		if need > sweepBytes {
			skip(&m, fmt.Sprintf("takes %s, a sweep ends at %s (give --seq for more)", format.Size(float64(need)), format.Size(sweepBytes)))
			return m, nil
		}
	}
	compiled := r.approach(dev, c)
	seconds := r.call.predict(m.Weight())
	m.PredictedS = report.Positive(seconds)
	if why := admit(seconds, limit, r.left()); why != "" {
		m.Status, m.Note = report.Predicted, why
		return m, nil
	}
	b := r.bencher(dev, c, m.Weight())
	b.trace.traced = compiled
	return m, b
}

// bencher returns what measures a case of some weight.
func (r *runner) bencher(dev *kernels.Device, c Case, weight int64) *bencher {
	return &bencher{runner: r, dev: dev, c: c, weight: weight, limit: r.patience(c.SeqK)}
}

// planned returns the row of a case with its plan. With an error it has the reason.
func planned(ctx context.Context, dev *kernels.Device, c Case) (report.Measurement, error) {
	m := newRow(dev.Info(), c)
	plan, err := c.plan(ctx, dev)
	if err != nil {
		fail(&m, err)
		return m, err
	}
	c.count(&m, dev.Info(), plan)
	return m, nil
}

// newRow returns what is known of a case before it runs.
func newRow(info backend.Info, c Case) report.Measurement {
	d := c.Dims()
	m := report.Measurement{
		Backend: info.Name, Provider: info.Provider, Series: c.Name, Name: c.String(), Variant: c.Variant, DType: c.DType.String(),
		Batch: d.Batch, Heads: d.Heads, KVHeads: d.KVHeads, SeqQ: d.SeqQ, SeqK: d.SeqK, Dim: d.Dim,
		Causal: c.Causal, Softcap: c.Softcap, Threads: info.Threads, Status: report.NotRun, Rounds: []report.Round{},
	}
	if c.Mask {
		m.Mask = backend.F32.String()
	}
	if w := c.Window; w != nil {
		limited := func(n int) *int {
			if n == kernels.Unbounded {
				return nil
			}
			return &n
		}
		m.WindowLeft, m.WindowRight = limited(w.Left), limited(w.Right)
	}
	return m
}

// skip notes the reason why a case does not run. With a prediction it is Predicted.
func skip(m *report.Measurement, why string) {
	if m.PredictedS != nil && why != interrupted {
		m.Status, m.Note = report.Predicted, "predicted "+format.Duration(*m.PredictedS)+" each, "+why
		return
	}
	m.Status, m.Note = report.NotRun, "not run: "+why
}

// fail notes an error. A case that the backend does not support is not a failure.
func fail(m *report.Measurement, err error) {
	m.Status, m.Note = report.Failed, "failed: "+err.Error()
	if errors.Is(err, backend.ErrUnsupported) {
		m.Status, m.Note = report.NotRun, "not run: "+err.Error()
	}
}

// learn remembers what the case cost.
func (b *bencher) learn() {
	seconds := b.t.warm
	if len(b.t.rounds) > 0 {
		seconds = stats.Median(b.t.medians())
	}
	if seconds > 0 {
		b.call, b.seq = cost{seconds, b.weight}, b.c.SeqK
	}
	if len(b.t.stages) > 0 {
		b.stage = cost{stats.Median(b.t.stages), int64(b.c.weights())}
	}
}
