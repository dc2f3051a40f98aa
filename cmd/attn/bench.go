package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu"
)

// sweepBudget bounds a sweep, in which nothing says how long to measure: it ends
// within a minute, the start of the program and the last call included.
const sweepBudget = 48 * time.Second

// benchCmd is attn bench.
type benchCmd struct {
	Seq     string        `name:"seq" help:"Sequence lengths: 256,1k,4096 or 256..4k doubling. Default: 256, 512, ... up to about a second a call." placeholder:"LIST"`
	SeqQ    *int          `name:"seq-q" help:"Queries, the last on the last key; 1 is decoding. Default: as many as keys." placeholder:"N"`
	Batch   int           `name:"batch" default:"1" help:"Batches."`
	Heads   int           `name:"heads" default:"8" help:"Query heads."`
	KVHeads *int          `name:"kv-heads" help:"Key and value heads, which divide --heads. Default: as many." placeholder:"N"`
	Dim     int           `name:"dim" default:"64" help:"Head size."`
	Causal  bool          `name:"causal" help:"Hide later keys from a row."`
	Window  window        `name:"window" placeholder:"L,R" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	Softcap number        `name:"softcap" placeholder:"C" help:"Bound scores to (-C, C). Default: off."`
	Mask    bool          `name:"mask" help:"Add a random f32 mask [Sq, Sk] to the scores, the same for all heads."`
	DType   string        `name:"dtype" default:"f32" help:"Element type: f32, f16 or bf16."`
	Backend []string      `name:"backend" help:"Backends: cpu, gpu, gpu:1, ...; repeat or list with commas. Default: each that there is." placeholder:"NAME"`
	Compare bool          `name:"compare" help:"With --backend cpu: measure its vector tiers, the gonum path, and another BLAS where built with one, in turns."`
	Ceiling bool          `name:"ceilings" help:"Measure only what the backends reach at most; the CPU's tiers on 1, 2, 4, ... threads up to --threads."`
	Plan    bool          `name:"plan" help:"Print how each case would run (path, chunks, limits in play), and run none."`
	Threads int           `name:"threads" help:"Threads of the CPU backend and of its ceiling. Default: GOMAXPROCS." placeholder:"N"`
	Memory  byteCount     `name:"device-memory" placeholder:"SIZE" help:"Device memory that a GPU may take: 256M, 2G. Tensors that do not fit stay in host memory and are streamed. Default: all that there is."`
	Budget  time.Duration `name:"budget" help:"Time for the whole run, shared among the backends. Default: 48s without --seq, no limit with it." placeholder:"DURATION"`
	Seed    uint64        `name:"seed" default:"1" help:"Seed of the inputs and of the rows that are checked."`
	JSON    string        `name:"json" help:"Write the report to this file." placeholder:"FILE"`
}

// Run measures and prints the table. Everything that can be wrong with the flags
// is said before anything is measured.
func (c *benchCmd) Run(ctx context.Context, out *streams) error {
	cfg, err := c.config()
	if err != nil {
		return err
	}
	if c.JSON != "" {
		if err := bench.CheckFile(c.JSON); err != nil {
			return err
		}
	}
	bar := newBenchBar(out.err)
	cfg.Progress = bar.show
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
	// one output that fails must not lose the other.
	err = report.WriteTable(out.out)
	if c.JSON != "" {
		err = errors.Join(err, report.WriteFile(c.JSON))
	}
	if err != nil {
		return err
	}
	return report.Err()
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
	list := contenders(c.Threads)
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
		list = append(list, tiersAndThreads(c.Threads)...)
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

// config translates the flags.
func (c *benchCmd) config() (bench.Config, error) {
	cfg := bench.Config{Series: make([]bench.Series, 1), Budget: c.Budget, Seed: c.Seed}
	s := &cfg.Series[0]
	*s = bench.Series{Batch: c.Batch, Heads: c.Heads, Dim: c.Dim, Causal: c.Causal, Softcap: c.Softcap.value, Mask: c.Mask}
	if c.Window.set {
		s.Window = &c.Window.Window
	}
	if c.SeqQ != nil {
		if s.SeqQ = *c.SeqQ; s.SeqQ < 1 { // 0 means 'as many as keys' to package bench
			return cfg, fmt.Errorf("--seq-q is %d, it must be at least 1: %w", s.SeqQ, backend.ErrOption)
		}
	}
	kvHeads := c.Heads
	if c.KVHeads != nil {
		kvHeads = *c.KVHeads
	}
	s.KVHeads = kvHeads
	for _, f := range []struct {
		name  string
		value int
	}{{"batch", c.Batch}, {"heads", c.Heads}, {"kv-heads", kvHeads}, {"dim", c.Dim}} {
		if f.value < 1 { // 0 means 'the default' to package bench
			return cfg, fmt.Errorf("--%s is %d, it must be at least 1: %w", f.name, f.value, backend.ErrOption)
		}
	}
	if c.Compare && !slices.Equal(c.Backend, []string{"cpu"}) {
		return cfg, fmt.Errorf("--compare is of what the CPU backend computes with, give --backend cpu with it: %w", backend.ErrOption)
	}
	if c.Compare && c.Ceiling || c.Compare && c.Plan || c.Ceiling && c.Plan {
		return cfg, fmt.Errorf("--compare, --ceilings and --plan each print a table of their own, give one of them: %w", backend.ErrOption)
	}
	if c.Threads < 0 {
		return cfg, fmt.Errorf("--threads is %d, it must be at least 1, or 0 for GOMAXPROCS: %w", c.Threads, backend.ErrOption)
	}
	dtypes := []backend.DType{backend.F32, backend.F16, backend.BF16}
	i := slices.IndexFunc(dtypes, func(d backend.DType) bool { return d.String() == c.DType })
	if i < 0 {
		return cfg, fmt.Errorf("--dtype is %q, it must be f32, f16 or bf16: %w", c.DType, backend.ErrOption)
	}
	s.DType = dtypes[i]
	if c.Seq != "" {
		var err error
		if s.Seqs, err = bench.ParseSeqs(c.Seq); err != nil {
			return cfg, fmt.Errorf("--seq: %w", err)
		}
	} else if cfg.Budget == 0 && !c.Compare {
		cfg.Budget = sweepBudget
	}
	return cfg, cfg.Check()
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
		be, err := c.openOne(name)
		if err == nil && slices.ContainsFunc(backends, func(b backend.Backend) bool { return b.Info().Name == be.Info().Name }) {
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
	return backends, missing, nil
}

func (c *benchCmd) openOne(name string) (backend.Backend, error) {
	picked := name
	if name == "auto" {
		picked, _ = backend.Auto()
	}
	if picked == "cpu" && c.Threads > 0 {
		return cpu.Open(cpu.Options{Threads: c.Threads})
	}
	if family, selector, _ := strings.Cut(picked, ":"); family == "gpu" && c.Memory > 0 {
		return gpu.Open(selector, gpu.Options{MemoryBytes: int64(c.Memory)})
	}
	return backend.Open(name)
}

// benchBar shows how far a run is, on a terminal; its zero value shows nothing.
type benchBar struct{ bar *progressbar.ProgressBar }

// benchBarSteps is finer than any terminal is wide.
const benchBarSteps = 1000

// newBenchBar returns a bar on w when w is a terminal: in a pipe or a log file it
// would be noise.
func newBenchBar(w io.Writer) *benchBar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return &benchBar{}
	}
	return &benchBar{progressbar.NewOptions(benchBarSteps,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetWidth(24),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionSetPredictTime(false), // bench predicts from costs, the bar only from steps
		progressbar.OptionClearOnFinish(),
		// The library's own Unicode theme needs glyphs of special fonts.
		progressbar.OptionSetTheme(progressbar.Theme{Saucer: "█", SaucerPadding: "░"}),
	)}
}

// show moves the bar.
func (b *benchBar) show(p bench.Progress) {
	if b.bar == nil {
		return
	}
	left := ""
	if p.Remaining > 0 {
		left = fmt.Sprintf("%3.0f s left", p.Remaining.Seconds())
	}
	b.bar.Describe(fmt.Sprintf("%-5s S=%-6d %-18s %-10s", p.Backend, p.Case.Dims.SeqK, p.Step, left))
	// A bar that cannot be drawn is no reason to stop measuring. It ends by
	// clear alone, so that it never claims to be done.
	_ = b.bar.Set(min(int(p.Done*benchBarSteps), benchBarSteps-1))
}

// clear takes the bar off the screen.
func (b *benchBar) clear() {
	if b.bar != nil {
		_ = b.bar.Clear()
	}
}
