package bench

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// planSeqs are the lengths that are planned of a series without lengths.
var planSeqs = []int{256, 1024, 4096}

// Plans returns how every case would run on every device, without allocating tensors: rows
// of status report.NotRun with a Plan, which the note describes, or with the reason why there
// is none. Without lengths it plans planSeqs. The error is that of [Config.Check].
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
				m, err := planned(ctx, dev, s.Name, s.at(seq))
				if err == nil {
					m.Note = describe(m.Plan, m.Memory)
				}
				r.Cases = append(r.Cases, m)
			}
		}
	}
	return r, nil
}

// describe writes a plan; the text table starts a line after each semicolon.
func describe(p *kernels.Plan, memory report.Memory) string {
	size := func(bytes int64) string { return format.Size(float64(bytes)) }
	text := fmt.Sprintf("%s; %s; %d visible pairs, moves at least %s; %d chunks (%s); %s of operands, %s of scratch memory, %s that grow with S²",
		p.Path, p.Why, p.Pairs, size(p.Bytes), p.Chunks, p.Cut, size(memory.Operands), size(memory.Scratch), size(memory.Square))
	for _, l := range p.Limits {
		text += fmt.Sprintf("; limit %s %d", l.Name, l.Value)
	}
	return text
}
