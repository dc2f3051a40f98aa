package bench

import (
	"context"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// Plans returns how every case would run on every device, without allocating tensors: rows
// of status report.NotRun with a Plan, or with the reason why there is none. Without
// lengths it plans those of [Compare]. The error is that of [Config.Check].
func Plans(ctx context.Context, devices []*kernels.Device, cfg Config) (*report.Report, error) {
	cfg, err := cfg.withLengths()
	if err != nil {
		return nil, err
	}
	r := runner{report: newReport(cfg), cfg: cfg}
	for _, dev := range devices {
		info := dev.Info()
		r.report.Environment.Backends = append(r.report.Environment.Backends, info)
		for i := range cfg.Series {
			r.enter(i)
			for _, seq := range r.series.Seqs {
				c := r.series.at(seq)
				m := newRow(info, c)
				if plan, err := c.plan(ctx, dev); err != nil {
					fail(&m, err)
				} else {
					c.count(&m, info, plan)
				}
				r.report.Cases = append(r.report.Cases, m)
			}
		}
	}
	return r.report, nil
}
