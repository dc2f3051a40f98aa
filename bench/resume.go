package bench

import (
	"fmt"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// resumable returns ErrOption unless r.cfg.Resume was measured on this machine with this
// version and seed: other figures do not belong into one report.
func (r *runner) resumable(devices []*kernels.Device) error {
	if r.cfg.Resume == nil {
		return nil
	}
	was, now := r.cfg.Resume.Environment, r.report.Environment
	if was.Commit != now.Commit {
		return fmt.Errorf("bench: the report to resume has commit %q, this run has %q: start a new one: %w", was.Commit, now.Commit, backend.ErrOption)
	}
	for _, dev := range devices {
		now.Backends = append(now.Backends, dev.Info())
	}
	now.Variables = was.Variables // they may differ
	if d := was.Differences(&now); len(d) > 0 {
		return fmt.Errorf("bench: the report to resume has %s %q, this run has %q: start a new one: %w", d[0].Name, d[0].Old, d[0].New, backend.ErrOption)
	}
	return nil
}

// resumed returns the row of a case that the report to resume has measured completely.
func (r *runner) resumed(info backend.Info, c Case) (report.Measurement, bool) {
	if r.cfg.Resume == nil {
		return report.Measurement{}, false
	}
	want := newRow(info, c)
	for _, m := range r.cfg.Resume.Cases {
		if !m.SameCase(&want) || m.Series != want.Series || m.Status != report.OK && m.Status != report.Wrong || strings.Contains(m.Note, interrupted) {
			continue
		}
		m.Resumed = true
		if m.MedianS != nil {
			r.call, r.seq = cost{*m.MedianS, m.Weight()}, c.SeqK
		}
		if m.StagesS != nil {
			r.stage = cost{*m.StagesS, int64(c.weights())}
		}
		return m, true
	}
	return report.Measurement{}, false
}
