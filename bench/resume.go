package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
)

// ReadFile reads a report that [Report.WriteFile] wrote. A file that is none, damaged or of
// another schema is backend.ErrOption.
func ReadFile(path string) (*Report, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("report: %s is not a report of attn bench: %v: %w", path, err, backend.ErrOption)
	}
	if r.Schema != Schema {
		return nil, fmt.Errorf("report: %s has schema %d, this program reads %d, measure again: %w", path, r.Schema, Schema, backend.ErrOption)
	}
	for i := range r.Cases {
		if !r.Cases[i].whole() {
			return nil, fmt.Errorf("report: %s is damaged: case %d (%s) is %q and lacks figures: %w", path, i, r.Cases[i].Name, r.Cases[i].Status, backend.ErrOption)
		}
	}
	return &r, nil
}

// whole reports whether a row has the figures that others follow from.
func (m *Measurement) whole() bool {
	if m.Status != OK {
		return true
	}
	ok := m.MedianS != nil && *m.MedianS > 0 && len(m.Rounds) > 0
	for _, r := range m.Rounds {
		ok = ok && len(r.TimesS) > 0 && slices.Min(r.TimesS) > 0 && (len(r.PaceS) == 0 || slices.Min(r.PaceS) > 0)
	}
	return ok
}

// resumable reports what keeps a run from going on from r.cfg.Resume: figures of two
// machines, or of two versions, do not belong into one report. Backends are the
// run's own.
func (r *runner) resumable(backends []backend.Backend) error {
	if r.cfg.Resume == nil {
		return nil
	}
	was, now := &r.cfg.Resume.Environment, &r.report.Environment
	for _, f := range []struct{ what, was, now string }{
		{"CPU", was.CPU, now.CPU},
		{"Go version", was.GoVersion, now.GoVersion},
		{"commit", was.Commit, now.Commit},
		{"seed", fmt.Sprint(was.Seed), fmt.Sprint(now.Seed)},
	} {
		if f.was != f.now {
			return fmt.Errorf("bench: the report to go on from has %s %q, this run has %q: start a new one: %w", f.what, f.was, f.now, backend.ErrOption)
		}
	}
	for _, be := range backends {
		info := be.Info()
		i := slices.IndexFunc(was.Backends, func(b backend.Info) bool { return b.Name == info.Name && b.Threads == info.Threads })
		if i < 0 {
			continue
		}
		if b := was.Backends[i]; b.Device != info.Device || b.Provider != info.Provider || b.Driver != info.Driver {
			return fmt.Errorf("bench: %s was %s · %s · %s in the report to go on from, it is %s · %s · %s now: start a new one: %w",
				info.Name, b.Device, b.Provider, b.Driver, info.Device, info.Provider, info.Driver, backend.ErrOption)
		}
	}
	return nil
}

// resumed returns the row of a case that the report to go on from has measured to its
// end.
func (r *runner) resumed(info backend.Info, c Case) (Measurement, bool) {
	if r.cfg.Resume == nil {
		return Measurement{}, false
	}
	for _, m := range r.cfg.Resume.Cases {
		if m.Backend != info.Name || m.Threads != info.Threads || m.Contender != "" || m.Series != r.series.Name || m.Variant != c.Variant || m.Name != c.String() || m.Status != OK && m.Status != Wrong ||
			strings.Contains(m.Note, interrupted) {
			continue
		}
		m.Resumed = true
		if m.MedianS != nil { // what it cost tells what the next ones will
			r.call, r.seq = cost{*m.MedianS, m.weight()}, c.Dims.SeqK
		}
		if m.StagesS != nil {
			r.stage = cost{*m.StagesS, int64(product(c.weightsShape()))}
		}
		return m, true
	}
	return Measurement{}, false
}
