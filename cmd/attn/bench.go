package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu"
)

// sweepBudget bounds a sweep, in which nothing says how long to measure: it ends
// within a minute, the start of the program and the last call included.
const sweepBudget = 48 * time.Second

// benchCmd is attn bench. Flags of what is measured that were not given are zero, so
// that a preset can tell.
type benchCmd struct {
	Preset  string        `name:"preset" placeholder:"NAME" help:"A set of cases: ${presets}. Instead of the flags of lengths, heads and options."`
	Seq     string        `name:"seq" help:"Sequence lengths: 256,1k,4096 or 256..4k doubling. Default: 256, 512, ... up to about a second a call." placeholder:"LIST"`
	SeqQ    *int          `name:"seq-q" help:"Queries, the last on the last key; 1 is decoding. Default: as many as keys." placeholder:"N"`
	Batch   []int         `name:"batch" placeholder:"N" help:"Batches. This and the flags down to --variant take lists: each combination is a series. Default: 1."`
	Heads   []int         `name:"heads" placeholder:"N" help:"Query heads. Default: 8."`
	KVHeads []int         `name:"kv-heads" help:"Key and value heads, which divide --heads. Default: as many." placeholder:"N"`
	Dim     []int         `name:"dim" placeholder:"N" help:"Head size. Default: 64."`
	DType   []string      `name:"dtype" placeholder:"TYPE" help:"Element type: f32, f16 or bf16. Default: f32."`
	Variant []string      `name:"variant" placeholder:"WHAT" help:"What runs: fused, stages (all three with the weights in memory), qk, softmax or pv. Default: fused."`
	Causal  bool          `name:"causal" help:"Hide later keys from a row."`
	Window  window        `name:"window" placeholder:"L,R" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	Softcap number        `name:"softcap" placeholder:"C" help:"Bound scores to (-C, C). Default: off."`
	Mask    bool          `name:"mask" help:"Add a random f32 mask [Sq, Sk] to the scores, the same for all heads."`
	Backend []string      `name:"backend" help:"Backends: cpu, gpu, gpu:1, ...; repeat or list with commas. Default: each that there is." placeholder:"NAME"`
	Compare bool          `name:"compare" help:"With --backend cpu: measure its vector tiers, the gonum path, and another BLAS where built with one, in turns."`
	Ceiling bool          `name:"ceilings" help:"Measure only what the backends reach at most; the CPU's tiers on 1, 2, 4, ... threads up to --threads."`
	Plan    bool          `name:"plan" help:"Print how each case would run (path, chunks, limits in play), and run none."`
	Threads []int         `name:"threads" help:"Threads of the CPU backend and of its ceiling; a list measures each. Default: GOMAXPROCS." placeholder:"N"`
	Memory  byteCount     `name:"device-memory" placeholder:"SIZE" help:"Device memory that a GPU may take: 256M, 2G. Tensors that do not fit stay in host memory and are streamed. Default: all that there is."`
	Budget  time.Duration `name:"budget" help:"Time for the whole run, shared among backends and series; what does not fit is predicted. Default: 48s without --seq, no limit with it." placeholder:"DURATION"`
	Seed    uint64        `name:"seed" default:"1" help:"Seed of the inputs and of the rows that are checked."`
	Resume  string        `name:"resume" placeholder:"FILE" type:"path" help:"Go on where the report FILE of --json ended, with the flags that it was made with, and write it again."`
	JSON    string        `name:"json" help:"Write the report to this file, after each case." placeholder:"FILE"`
	CSV     string        `name:"csv" help:"Write the figures to this file, a line a case." placeholder:"FILE"`
	GoBench string        `name:"gobench" help:"Write the rounds as Go benchmark lines to this file, for benchstat." placeholder:"FILE"`
	HTML    string        `name:"html" help:"Write the report as a page with pictures and tables that sort; it needs no network." placeholder:"FILE"`
	Plot    string        `name:"plot" help:"Draw the report into this folder as PNG and SVG: throughput, time, memory, percent of the ceiling, roofline." placeholder:"DIR"`
}

// Run measures and prints the table. Everything that can be wrong with the flags
// is said before anything is measured.
func (c *benchCmd) Run(ctx context.Context, out *streams) error {
	var before *bench.Report
	if c.Resume != "" {
		var err error
		if before, err = c.resume(out); err != nil {
			return err
		}
	}
	cfg, err := c.config()
	if err != nil {
		return err
	}
	cfg.Resume, cfg.Args = before, measuring(out.args)
	for _, path := range []string{c.JSON, c.CSV, c.GoBench, c.HTML} {
		if path == "" {
			continue
		}
		if err := bench.CheckFile(path); err != nil {
			return err
		}
	}
	bar := newBenchBar(out.err)
	cfg.Progress = bar.show
	if c.JSON != "" {
		// What was measured survives whatever ends the program. A file that cannot be
		// written says so at the end.
		cfg.Measured = func(r *bench.Report) { _ = r.WriteFile(c.JSON) }
	}
	measure := c.run
	switch {
	case c.Ceiling:
		measure = c.ceilings
	case c.Compare:
		measure = c.compare
	}
	if c.Plan {
		return c.plans(cfg, out.out)
	}
	report, err := measure(ctx, cfg)
	bar.clear()
	if err != nil {
		return err
	}
	// What was measured is written even when it was interrupted or is wrong;
	// one output that fails must not lose the others.
	if err := errors.Join(report.WriteTable(out.out), c.write(report)); err != nil {
		return err
	}
	return report.Err()
}

// write writes the report's files.
func (c *benchCmd) write(r *bench.Report) error {
	var errs []error
	for _, f := range []struct {
		path  string
		write func(path string) error
	}{{c.JSON, r.WriteFile}, {c.CSV, r.WriteCSVFile}, {c.GoBench, r.WriteGoBenchFile}, {c.HTML, r.WritePageFile},
		{c.Plot, func(folder string) error { _, err := r.WritePictures(folder); return err }}} {
		if f.path != "" {
			errs = append(errs, f.write(f.path))
		}
	}
	return errors.Join(errs...)
}

// run measures each backend.
func (c *benchCmd) run(ctx context.Context, cfg bench.Config) (*bench.Report, error) {
	backends, missing, err := c.open()
	defer func() {
		for _, be := range backends {
			be.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	cfg.Missing = missing
	return bench.Run(ctx, backends, cfg)
}

// compare measures the ways in which the CPU backend computes, in turns.
func (c *benchCmd) compare(ctx context.Context, cfg bench.Config) (*bench.Report, error) {
	list := contenders(c.threads())
	defer closeAll(list)
	return bench.Compare(ctx, list, cfg)
}

// ceilings measures what the backends reach at most: the CPU by tier and number of
// threads.
func (c *benchCmd) ceilings(ctx context.Context, _ bench.Config) (*bench.Report, error) {
	backends, missing, err := c.open()
	var list []bench.Contender
	defer func() { closeAll(list) }()
	for _, be := range backends {
		name := be.Info().Name
		if name != "cpu" {
			list = append(list, bench.Contender{Name: name, Backend: be})
			continue
		}
		be.Close()
		list = append(list, tiersAndThreads(c.threads())...)
	}
	if err != nil {
		return nil, err
	}
	return bench.Ceilings(ctx, list, missing...)
}

// tiersAndThreads returns the tiers of the CPU backend on 1, 2, 4, ... and last
// threads; 0 is GOMAXPROCS.
func tiersAndThreads(last int) []bench.Contender {
	if last == 0 {
		last = runtime.GOMAXPROCS(0)
	}
	var list []bench.Contender
	for n := 1; ; n = min(2*n, last) {
		list = append(list, tiers(n)...)
		if n == last {
			return list
		}
	}
}

// plans prints how each case would run.
func (c *benchCmd) plans(cfg bench.Config, out io.Writer) error {
	backends, missing, err := c.open()
	defer func() {
		for _, be := range backends {
			be.Close()
		}
	}()
	if err != nil {
		return err
	}
	cfg.Missing = missing
	report, err := bench.Plans(backends, cfg)
	if err != nil {
		return err
	}
	err = report.WritePlans(out)
	if c.JSON != "" {
		err = errors.Join(err, report.WriteFile(c.JSON))
	}
	return err
}

// threads returns the only number of threads; 0 for GOMAXPROCS.
func (c *benchCmd) threads() int {
	if len(c.Threads) == 0 {
		return 0
	}
	return c.Threads[0]
}

// config translates the flags.
func (c *benchCmd) config() (bench.Config, error) {
	cfg := bench.Config{Budget: c.Budget, Seed: c.Seed}
	if c.Compare && !slices.Equal(c.Backend, []string{"cpu"}) {
		return cfg, fmt.Errorf("--compare is of what the CPU backend computes with, give --backend cpu with it: %w", backend.ErrOption)
	}
	if c.Compare && c.Ceiling || c.Compare && c.Plan || c.Ceiling && c.Plan {
		return cfg, fmt.Errorf("--compare, --ceilings and --plan each print a table of their own, give one of them: %w", backend.ErrOption)
	}
	for _, n := range c.Threads {
		if n < 0 {
			return cfg, fmt.Errorf("--threads is %d, it must be at least 1, or 0 for GOMAXPROCS: %w", n, backend.ErrOption)
		}
	}
	if len(c.Threads) > 1 && (c.Compare || c.Ceiling) {
		return cfg, fmt.Errorf("--threads is a list, --compare and --ceilings take one number: %w", backend.ErrOption)
	}
	if c.Plan && c.CSV+c.GoBench+c.HTML+c.Plot != "" || c.Ceiling && c.Plot != "" {
		return cfg, fmt.Errorf("--plan is written as --json only, and of --ceilings there are no pictures: %w", backend.ErrOption)
	}
	if c.Resume != "" && (c.Compare || c.Ceiling || c.Plan) {
		return cfg, fmt.Errorf("--resume goes on with a sweep, not with --compare, --ceilings or --plan: %w", backend.ErrOption)
	}
	if c.Preset != "" {
		return c.preset(cfg)
	}
	var err error
	if cfg.Series, err = c.series(); err != nil {
		return cfg, err
	}
	if c.Seq == "" && cfg.Budget == 0 && !c.Compare {
		cfg.Budget = sweepBudget
	}
	return cfg, cfg.Check()
}

// preset fills in what a preset says.
func (c *benchCmd) preset(cfg bench.Config) (bench.Config, error) {
	if c.Seq != "" || c.SeqQ != nil || len(c.Batch)+len(c.Heads)+len(c.KVHeads)+len(c.Dim)+len(c.DType)+len(c.Variant) > 0 ||
		c.Causal || c.Window.set || c.Softcap.set || c.Mask {
		return cfg, fmt.Errorf("--preset says what is measured, leave out the flags of lengths, heads and options: %w", backend.ErrOption)
	}
	presets := bench.Presets()
	i := slices.IndexFunc(presets, func(p bench.Preset) bool { return p.Name == c.Preset })
	if i < 0 {
		return cfg, fmt.Errorf("--preset is %q, there are %s: %w", c.Preset, presetNames(), backend.ErrOption)
	}
	cfg.Series = presets[i].Series
	if cfg.Budget == 0 {
		cfg.Budget = presets[i].Budget
	}
	if len(c.Backend) == 0 {
		c.Backend = presets[i].Backends
	}
	if len(c.Threads) == 0 && presets[i].Threads > 0 {
		c.Threads = []int{presets[i].Threads}
	}
	return cfg, cfg.Check()
}

// presetNames lists the presets.
func presetNames() string {
	var names []string
	for _, p := range bench.Presets() {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// presetHelp says what is in each preset.
func presetHelp() string {
	var all []string
	for _, p := range bench.Presets() {
		all = append(all, fmt.Sprintf("%s (%s)", p.Name, p.About))
	}
	return strings.Join(all, "; ")
}

// series returns each combination of what is a list.
func (c *benchCmd) series() ([]bench.Series, error) {
	one := bench.Series{Causal: c.Causal, Softcap: c.Softcap.value, Mask: c.Mask}
	if c.Window.set {
		one.Window = &c.Window.Window
	}
	if c.SeqQ != nil {
		if one.SeqQ = *c.SeqQ; one.SeqQ < 1 { // 0 means 'as many as keys' to package bench
			return nil, fmt.Errorf("--seq-q is %d, it must be at least 1: %w", one.SeqQ, backend.ErrOption)
		}
	}
	if c.Seq != "" {
		var err error
		if one.Seqs, err = bench.ParseSeqs(c.Seq); err != nil {
			return nil, fmt.Errorf("--seq: %w", err)
		}
	}
	all := []bench.Series{one}
	for _, f := range []struct {
		name   string
		values []int
		set    func(s *bench.Series, n int)
	}{
		{"batch", c.Batch, func(s *bench.Series, n int) { s.Batch = n }},
		{"heads", c.Heads, func(s *bench.Series, n int) { s.Heads = n }},
		{"kv-heads", c.KVHeads, func(s *bench.Series, n int) { s.KVHeads = n }},
		{"dim", c.Dim, func(s *bench.Series, n int) { s.Dim = n }},
	} {
		for _, n := range f.values {
			if n < 1 { // 0 means 'the default' to package bench
				return nil, fmt.Errorf("--%s is %d, it must be at least 1: %w", f.name, n, backend.ErrOption)
			}
		}
		all = combined(all, f.values, f.set)
	}
	var dtypes []backend.DType
	for _, name := range c.DType {
		known := []backend.DType{backend.F32, backend.F16, backend.BF16}
		i := slices.IndexFunc(known, func(d backend.DType) bool { return d.String() == name })
		if i < 0 {
			return nil, fmt.Errorf("--dtype is %q, it must be f32, f16 or bf16: %w", name, backend.ErrOption)
		}
		dtypes = append(dtypes, known[i])
	}
	all = combined(all, dtypes, func(s *bench.Series, d backend.DType) { s.DType = d })
	for _, v := range c.Variant {
		if !slices.Contains(bench.Variants, v) {
			return nil, fmt.Errorf("--variant is %q, it must be one of %s: %w", v, strings.Join(bench.Variants, ", "), backend.ErrOption)
		}
	}
	return combined(all, c.Variant, func(s *bench.Series, v string) { s.Variant = v }), nil
}

// combined returns each series with each of values, or the series where there are none.
func combined[T any](all []bench.Series, values []T, set func(s *bench.Series, v T)) []bench.Series {
	if len(values) == 0 {
		return all
	}
	var out []bench.Series
	for _, s := range all {
		for _, v := range values {
			set(&s, v)
			out = append(out, s)
		}
	}
	return out
}

// open opens the backends that were named, else each that there is; missing says
// what there is not. The caller closes them, also beside an error.
func (c *benchCmd) open() (backends []backend.Backend, missing []string, err error) {
	names := c.Backend
	if len(names) == 0 {
		for _, l := range backend.Devices() {
			for _, info := range l.Infos {
				names = append(names, info.Name)
			}
			if l.Err != nil {
				missing = append(missing, fmt.Sprintf("%s · none: %s", l.Family, oneLine(l.Err)))
			}
		}
	}
	for _, name := range names {
		for _, threads := range c.threadsOf(name) {
			be, err := c.openOne(name, threads)
			if err == nil && slices.ContainsFunc(backends, func(b backend.Backend) bool {
				return b.Info().Name == be.Info().Name && b.Info().Threads == be.Info().Threads
			}) {
				err = be.Close() // "auto" and its own name, or a name twice
				if err == nil {
					continue
				}
			}
			switch {
			case err == nil:
				backends = append(backends, be)
			case len(c.Backend) > 0:
				return backends, missing, fmt.Errorf("--backend: %w", err)
			default: // listed, and yet it does not open: the others are measured
				missing = append(missing, fmt.Sprintf("%s · does not open: %s", name, oneLine(err)))
			}
		}
	}
	return backends, missing, nil
}

// threadsOf returns the numbers of threads that a backend is measured with; 0 is its
// own choice.
func (c *benchCmd) threadsOf(name string) []int {
	if picked(name) != "cpu" || len(c.Threads) == 0 {
		return []int{0}
	}
	return c.Threads
}

// picked returns what "auto" stands for, and other names as they are.
func picked(name string) string {
	if name == "auto" {
		name, _ = backend.Auto()
	}
	return name
}

func (c *benchCmd) openOne(name string, threads int) (backend.Backend, error) {
	if picked(name) == "cpu" && threads > 0 {
		return cpu.Open(cpu.Options{Threads: threads})
	}
	if family, selector, _ := strings.Cut(picked(name), ":"); family == "gpu" && c.Memory > 0 {
		return gpu.Open(selector, gpu.Options{MemoryBytes: int64(c.Memory)})
	}
	return backend.Open(name)
}
