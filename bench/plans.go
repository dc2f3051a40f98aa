package bench

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/seed90331342/attn/backend"
)

// Plans reports how every case would run on every backend, without memory or work:
// rows of status [NotRun] with a Plan, or with the reason why there is none. Without
// lengths they are those of [Compare]. The error is that of [Config.Check].
func Plans(backends []backend.Backend, cfg Config) (*Report, error) {
	cfg, err := cfg.withLengths()
	if err != nil {
		return nil, err
	}
	report := newReport(cfg)
	r := runner{report: report, cfg: cfg}
	for _, be := range backends {
		info := be.Info()
		report.Environment.Backends = append(report.Environment.Backends, info)
		for i := range cfg.Series {
			r.enter(i)
			for _, seq := range r.series.Seqs {
				c := r.series.at(seq)
				m := r.row(info, c)
				if plan, err := c.plan(be); err != nil {
					m = failed(m, err)
				} else {
					m.planned(c, info, plan)
				}
				report.Cases = append(report.Cases, m)
			}
		}
	}
	return report, nil
}

// WritePlans writes the plans of a report's cases for people.
func (r *Report) WritePlans(w io.Writer) error {
	var b strings.Builder
	r.head(&b)
	for _, info := range r.Environment.Backends {
		fmt.Fprintf(&b, "\n%s · %s · %s\n", info.Name, info.Device, info.Provider)
		for _, c := range r.Cases {
			if c.on(info) {
				c.writePlan(&b)
			}
		}
	}
	for _, m := range r.Environment.Missing {
		fmt.Fprintf(&b, "\n%s\n", m)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (m *Measurement) writePlan(b *strings.Builder) {
	p := m.Plan
	name := ""
	if m.Series != "" {
		name = m.Series + ", "
	}
	if p == nil {
		fmt.Fprintf(b, "  %sS=%d   %s\n", name, m.SeqK, m.Note)
		return
	}
	fmt.Fprintf(b, "  %sS=%d   %s\n", name, m.SeqK, p.Path)
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "    %s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	line("why", "%s", p.Why)
	line("work", "%.4g GFLOP of %d visible pairs, %.4g a byte", float64(m.FLOPs)/1e9, m.Pairs, m.Intensity)
	line("moves", "%s at least", size(float64(m.Bytes)))
	line("memory", "%s of operands, %s beside them, %s that grow with S²",
		size(float64(m.Memory.Operands)), size(float64(m.Memory.Scratch)), size(float64(m.Memory.Square)))
	line("chunks", "%d (%s)", p.Chunks, p.Cut)
	for _, l := range p.Limits {
		line("limit", "%s %d", l.Name, l.Value)
	}
	w.Flush() // into a strings.Builder, which takes everything
}
