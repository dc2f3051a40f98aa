package bench

import (
	"fmt"
	"strings"

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
	if was.Version != now.Version {
		return fmt.Errorf("bench: the report to resume has version %q, this run has %q: start a new one: %w", was.Version, now.Version, kernels.ErrOption)
	}
	for _, dev := range devices {
		now.Backends = append(now.Backends, dev.Info())
	}
	now.Variables = was.Variables // they may differ
	if d := was.Differences(&now); len(d) > 0 {
		return fmt.Errorf("bench: the report to resume has %s %q, this run has %q: start a new one: %w", d[0].Name, d[0].Old, d[0].New, kernels.ErrOption)
	}
	return nil
}

// resumed replaces a row by that of the report to resume, if it is measured completely
// there, and reports whether it did.
func (r *runner) resumed(row *report.Measurement) bool {
	if r.cfg.Resume == nil {
		return false
	}
	for _, m := range r.cfg.Resume.Cases {
		if !m.SameCase(row) || m.Series != row.Series || m.Status != report.OK && m.Status != report.Wrong || strings.Contains(m.Note, interrupted) {
			continue
		}
		*row = m
		row.Resumed = true
		r.learn(row, 0)
		return true
	}
	return false
}
