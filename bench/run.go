package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// grace is how long a running call may continue after Ctrl-C, and then the check of the output:
// longer than a round of short calls, whose figures count.
const grace = 200 * time.Millisecond

// Run measures every series on every device, one after the other. Wrong results, failing calls and a spent budget are
// in the report and not errors, see [report.Report.Err]. When ctx is cancelled the running repetition may end, and the
// report has what was measured until then. The error is that of [Config.Check], or ErrOption for a Config.Resume of
// another machine or version, or with a case that is not one of cfg.
//
// A device that computes on the machine's own processors should not be used elsewhere meanwhile.
func Run(ctx context.Context, devices []*kernels.Device, cfg Config) (*report.Report, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r, free := newRunner(ctx, cfg, len(devices))
	defer free()
	for _, dev := range devices {
		r.report.Environment.Backends = append(r.report.Environment.Backends, dev.Info())
	}
	if err := r.resumable(devices); err != nil {
		return nil, err
	}
	r.report.Interrupted = true // in reports that Measured saves: the program may end at any time
	for i, dev := range devices {
		r.device(dev, i)
	}
	r.report.Interrupted = ctx.Err() != nil
	return r.whole(), nil
}

// runner is the state of a run.
type runner struct {
	ctx      context.Context // ends on Ctrl-C
	work     context.Context // ends calls: grace later, or when the budget is spent
	cfg      Config
	runBegan time.Time
	report   *report.Report
	devices  int // in all

	// State of the current device and series:
	dev       *kernels.Device
	series    *Series
	seriesEnd time.Time // of the series' share of the budget; zero without one
	costs
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
	env.Seed, env.CheckedRows, env.BudgetS = cfg.Seed, checkedRows, cfg.Budget.Seconds()
	env.Missing = append(env.Missing, cfg.Missing...)
	env.Args = append(env.Args, cfg.Args...)
	return &report.Report{Schema: report.Schema, Environment: env, Cases: []report.Measurement{}}
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

// device measures all series on a device. Each gets an even share of the device's budget that
// is left, as each device does of the run's.
func (r *runner) device(dev *kernels.Device, index int) {
	r.dev = dev
	end := time.Now().Add(share(time.Until(r.runBegan.Add(r.cfg.Budget)), r.devices-index))
	for i := range r.cfg.Series {
		r.series, r.seriesEnd, r.costs = &r.cfg.Series[i], time.Time{}, costs{} // what its calls cost is unknown
		if r.cfg.Budget > 0 {
			r.seriesEnd = time.Now().Add(share(time.Until(end), len(r.cfg.Series)-i))
		}
		for _, seq := range r.series.Seqs {
			r.measure(r.series.at(seq))
		}
		if len(r.series.Seqs) > 0 {
			continue
		}
		for seq := sweepStart; seq <= maxSeq && r.measure(r.series.at(seq)); seq *= 2 {
		}
	}
}

// measure runs a case and adds its row. It reports whether it has measured the case.
func (r *runner) measure(c call) bool {
	b := r.prepare(c)
	if b.runs {
		b.run()
	}
	r.report.Cases = append(r.report.Cases, b.row)
	if r.cfg.Measured != nil {
		r.cfg.Measured(r.whole())
	}
	return b.row.Status == report.OK || b.row.Status == report.Wrong
}

// prepare returns a case with its plan. A case that does not run has the reason as its note, or
// its figures from the report to resume.
func (r *runner) prepare(c call) *bencher {
	m, err := planned(context.WithoutCancel(r.ctx), r.dev, r.series.Name, c) // a spent budget is no failure
	b := &bencher{runner: r, c: c, row: m, step: r.follow(c)}
	if r.resumed(&b.row) || err != nil {
		return b
	}
	b.row.PredictedS = report.Positive(r.call.predict(m.Weight()))
	if why := r.stop(); why != "" {
		skip(&b.row, why)
		return b
	}
	need := c.hostBytes()
	if free, _ := backend.HostMemory(); need < 0 || need > free {
		skip(&b.row, fmt.Sprintf("needs %s, %s are free", format.Size(float64(uint64(need))), format.Size(float64(free))))
		return b
	}
	limit := 0.0
	if len(r.series.Seqs) == 0 {
		limit = sweepCall
		if need > sweepBytes {
			skip(&b.row, fmt.Sprintf("takes %s, a sweep ends at %s (give --seq for more)", format.Size(float64(need)), format.Size(sweepBytes)))
			return b
		}
	}
	if why := admit(r.call.predict(m.Weight()), limit, r.left()); why != "" {
		b.row.Status, b.row.Note = report.Predicted, why
		return b
	}
	b.limit, b.runs = r.patience(c.SeqK), true
	return b
}

// planned returns the row of a case with its plan. With an error it has the reason.
func planned(ctx context.Context, dev *kernels.Device, series string, c call) (report.Measurement, error) {
	m := c.row(series, dev.Info())
	plan, err := c.plan(ctx, dev)
	if err != nil {
		fail(&m, err)
		return m, err
	}
	m.Plan = &plan
	m.Derive()
	return m, nil
}

// skip notes the reason why a case does not run. With a prediction it is Predicted.
func skip(m *report.Measurement, why string) {
	if m.PredictedS != nil && !strings.HasSuffix(why, interrupted) {
		m.Status, m.Note = report.Predicted, "predicted "+format.Duration(*m.PredictedS)+" each, "+why
		return
	}
	m.Status, m.Note = report.NotRun, "not run: "+why
}

// fail notes an error. A case that the backend does not support is not a failure.
func fail(m *report.Measurement, err error) {
	m.Status, m.Note = report.Failed, "failed: "+err.Error()
	if errors.Is(err, kernels.ErrUnsupported) {
		m.Status, m.Note = report.NotRun, "not run: "+err.Error()
	}
}
