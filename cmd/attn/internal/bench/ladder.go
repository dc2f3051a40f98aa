package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

var errLadder = errors.New("--ladder takes one case at any lengths: it excludes --preset, --resume, --variant, --low-precision and lists of other flags")

// rung is a kernel of a ladder. It adds one idea to the rung below it.
type rung struct {
	tier    string // of the CPU
	plain   bool   // the plain kernel of the GPU
	variant string
	low     bool
	path    string // part of its plan's path: devices with another path cannot run the rung
	name    string // with the idea
}

var ladders = map[string][]rung{
	"cpu": {
		{tier: "gonum", variant: report.Stages, name: "stages: all scores in memory"},
		{tier: "gonum", name: "gonum: online softmax over blocks of keys"},
		{tier: "neon", name: "neon: vectors of 4 numbers"},
		{tier: "avx2", name: "avx2: vectors of 8 numbers"},
		{tier: "avx512", name: "avx512: vectors of 16 numbers"},
	},
	"gpu": {
		{variant: report.Stages, name: "stages: all scores in memory"},
		{plain: true, path: "plain WGSL", name: "tiled: online softmax, 4x4 results a thread"},
		{path: "register-tiled WGSL", name: "registers: 8x8 results a thread, merged loads"},
		{low: true, path: "matrix units WGSL", name: "matrices: f16 products on matrix units"},
	},
}

// climb measures each rung, or plans it. A rung is a series of the report.
func (c *Command) climb(ctx context.Context, cfg bench.Config) (*report.Report, error) {
	name := append(c.Backend, "auto")[0]
	if name == "auto" {
		name, _ = kernels.Auto()
	}
	family, selector, _ := strings.Cut(name, ":")
	rungs := ladders[family]
	if rungs == nil {
		return nil, fmt.Errorf("--backend: %q has no ladder, cpu and gpu have one", name)
	}
	cfg.NoStages, cfg.Measured, cfg.Budget = true, nil, cfg.Budget/time.Duration(len(rungs)) // rungs are compared with each other
	all, below, base := &report.Report{}, map[int]*float64{}, cfg.Series[0]
	for _, g := range rungs {
		dev, err := c.openRung(family, selector, g)
		if errors.Is(err, cpu.ErrTier) {
			continue // of another processor
		}
		if err != nil {
			return nil, fmt.Errorf("--backend: %w", err)
		}
		base.Name, base.Variant, base.LowPrecision = g.name, g.variant, g.low
		cfg.Series = []bench.Series{base}
		r, err := g.measure(ctx, dev, cfg, c.Plan)
		dev.Close()
		if err != nil {
			return nil, err
		}
		for i := range r.Cases {
			m := &r.Cases[i]
			if last := below[m.SeqK]; last != nil && m.MedianS != nil {
				m.Note = strings.TrimPrefix(fmt.Sprintf("%s, %.2f times as fast as the rung below", m.Note, *last / *m.MedianS), ", ")
			}
			if m.MedianS != nil {
				below[m.SeqK] = m.MedianS
			}
		}
		r.Cases = append(all.Cases, r.Cases...)
		all = r
	}
	return all, nil
}

// openRung opens the device for a rung.
func (c *Command) openRung(family, selector string, g rung) (*kernels.Device, error) {
	if family == "gpu" {
		return openGPU(selector, int64(c.Memory), g.plain)
	}
	be, err := cpu.Open(cpu.Options{Tier: g.tier, Threads: append(c.Threads, 0)[0]})
	return kernels.NewDevice(be), err
}

// measure measures or plans a rung. It runs no case for which the device takes another path.
func (g rung) measure(ctx context.Context, dev *kernels.Device, cfg bench.Config, planOnly bool) (*report.Report, error) {
	r, err := bench.Plans(ctx, []*kernels.Device{dev}, cfg)
	if err != nil || planOnly {
		return r, err
	}
	for i := range r.Cases {
		m := &r.Cases[i]
		if m.Plan == nil || strings.Contains(m.Plan.Path, g.path) {
			return bench.Run(ctx, []*kernels.Device{dev}, cfg)
		}
		m.Note = "not run: the device takes " + m.Plan.Path
		if units, ok := dev.Backend().(backend.MatrixMeter); ok && g.low {
			if _, err := units.MatrixFLOPS(ctx); err != nil {
				m.Note = "not run: " + err.Error()
			}
		}
	}
	return r, nil
}
