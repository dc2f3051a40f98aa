package bench

import (
	"context"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// planSeqs are the lengths that are planned of a series without lengths.
var planSeqs = []int{256, 1024, 4096}

// Plans returns how every case would run on every device, without allocating tensors: rows
// of status report.NotRun with a Plan, or with the reason why there is none. Without
// lengths it plans planSeqs. The error is that of [Config.Check].
func Plans(ctx context.Context, devices []*kernels.Device, cfg Config) (*report.Report, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r := newReport(cfg)
	for _, dev := range devices {
		r.Environment.Backends = append(r.Environment.Backends, dev.Info())
		for _, s := range cfg.Series {
			if len(s.Seqs) == 0 {
				s.Seqs = planSeqs
			}
			for _, seq := range s.Seqs {
				m, _ := planned(ctx, dev, s.at(seq))
				r.Cases = append(r.Cases, m)
			}
		}
	}
	return r, nil
}
