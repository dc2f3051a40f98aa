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
	r := newReport(cfg)
	for _, dev := range devices {
		r.Environment.Backends = append(r.Environment.Backends, dev.Info())
		for _, s := range cfg.Series {
			for _, seq := range s.Seqs {
				m, _ := planned(ctx, dev, s.at(seq))
				r.Cases = append(r.Cases, m)
			}
		}
	}
	return r, nil
}
