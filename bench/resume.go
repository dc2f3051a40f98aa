package bench

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// resumable returns ErrOption unless r.cfg.Resume was measured on this machine with this
// version and seed, as other figures do not belong into one report, and each case that it measured is
// one of this run, which would drop it otherwise.
func (r *runner) resumable(devices []*kernels.Device) error {
	if r.cfg.Resume == nil {
		return nil
	}
	was, now := r.cfg.Resume.Environment, r.report.Environment
	if was.Version != now.Version {
		return fmt.Errorf("bench: the report to resume has version %q, this run has %q: start a new one: %w", was.Version, now.Version, kernels.ErrOption)
	}
	now.Variables = was.Variables // they may differ
	if d := was.Differences(&now); len(d) > 0 {
		return fmt.Errorf("bench: the report to resume has %s %q, this run has %q: start a new one: %w", d[0].Name, d[0].Old, d[0].New, kernels.ErrOption)
	}
	for _, m := range r.cfg.Resume.Cases {
		if d := r.differences(&m, devices); measured(&m) && len(d) > 0 {
			return fmt.Errorf("bench: the report to resume has %s %s, which this run would drop: %s: give the flags of that run (attn %.500s) or start a new report: %w",
				m.Backend, m.Name, strings.Join(d, ", "), strings.Join(was.Args, " "), kernels.ErrOption)
		}
	}
	return nil
}

// measured reports whether a case of a report was measured completely.
func measured(m *report.Measurement) bool {
	return (m.Status == report.OK || m.Status == report.Wrong) && !strings.Contains(m.Note, interrupted)
}

// same reports whether two rows are of one case. The only series of a run may have no name.
func same(m, o *report.Measurement) bool {
	return m.SameCase(o) && (m.Series == o.Series || m.Series == "" || o.Series == "")
}

// differences returns the settings in which a row differs from the case of this run that is most like it.
func (r *runner) differences(m *report.Measurement, devices []*kernels.Device) (least []string) {
	least = []string{"this run has no case"}
	first := true
	for _, dev := range devices {
		for _, s := range r.cfg.Series {
			seq := sweepStart
			switch {
			case slices.Contains(s.Seqs, m.SeqK) || len(s.Seqs) == 0 && m.SeqK >= sweepStart && m.SeqK&(m.SeqK-1) == 0:
				seq = m.SeqK
			case len(s.Seqs) > 0:
				seq = s.Seqs[0]
			}
			o := s.at(seq).row(s.Name, dev.Info())
			if same(m, &o) {
				return nil
			}
			if d := settings(m, &o); first || len(d) < len(least) {
				least, first = d, false
			}
		}
	}
	return least
}

// settings returns the flags of attn bench whose values differ between a row of the report to resume and
// one of this run.
func settings(was, now *report.Measurement) (differ []string) {
	unless := func(n, of int, same string) any {
		if n == of {
			return same
		}
		return n
	}
	flags := func(m *report.Measurement) [][2]any {
		return [][2]any{
			{"series", m.Series}, {"--backend", m.Backend}, {"--threads", m.Threads}, {"--variant", m.Variant}, {"--dtype", m.DType}, {"--cache", cmp.Or(m.Cache, "none")}, {"--batch", m.Batch},
			{"--heads", m.Heads}, {"--kv-heads", unless(m.KVHeads, m.Heads, "that of --heads")}, {"--dim", m.Dim}, {"--seq", m.SeqK},
			{"--seq-q", unless(m.SeqQ, m.SeqK, "that of --seq")}, {"--causal", m.Causal},
			{"--window", m.Window()}, {"--softcap", m.Softcap}, {"--low-precision", m.LowPrecision}, {"--mask", m.Mask != ""},
		}
	}
	for i, f := range flags(was) {
		if is := flags(now)[i][1]; f[1] != is && f[1] != "" && is != "" {
			differ = append(differ, fmt.Sprintf("%s was %v and is %v now", f[0], f[1], is))
		}
	}
	return differ
}

// resumed replaces a row by that of the report to resume, if it is measured completely
// there, and reports whether it did.
func (r *runner) resumed(row *report.Measurement) bool {
	if r.cfg.Resume == nil {
		return false
	}
	for _, m := range r.cfg.Resume.Cases {
		if !measured(&m) || !same(&m, row) {
			continue
		}
		m.Series, m.Resumed = row.Series, true
		*row = m
		r.learn(row, 0)
		return true
	}
	return false
}

// whole returns the report with the measured cases of the report to resume that the run has not
// reached, so that the report that replaces it lacks none of them.
func (r *runner) whole() *report.Report {
	if r.cfg.Resume == nil {
		return r.report
	}
	all := *r.report
	all.Cases = slices.Clone(all.Cases)
	for _, m := range r.cfg.Resume.Cases {
		if measured(&m) && !slices.ContainsFunc(r.report.Cases, func(o report.Measurement) bool { return same(&m, &o) }) {
			m.Resumed = true
			all.Cases = append(all.Cases, m)
		}
	}
	return &all
}
