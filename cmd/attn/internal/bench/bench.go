// Package bench is the commands attn bench and attn compare.
package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// sweepBudget bounds a sweep without --seq and --budget: with the start of the
// program and the last call it ends within a minute.
const sweepBudget = 48 * time.Second

// maxThreads is more than the processors of any machine. Each thread takes memory.
const maxThreads = 4096

// Command is attn bench. Flags of the cases are zero unless given, so that a
// preset can refuse them.
type Command struct {
	Preset  string        `name:"preset" placeholder:"NAME" help:"Measure a set of cases: ${presets}. It replaces the flags --seq to --mask."`
	Seq     string        `name:"seq" help:"Sequence lengths: 256,1k,4096, or 256..4k for powers of two. Default: 256, 512, ... until a call takes about a second." placeholder:"LIST"`
	SeqQ    *int          `name:"seq-q" help:"Number of queries, the last of them at the last key; 1 is decoding. Default: the number of keys." placeholder:"N"`
	Batch   []int         `name:"batch" placeholder:"N" help:"Batch sizes. This flag and those down to --variant take lists: each combination is a series. Default: 1."`
	Heads   []int         `name:"heads" placeholder:"N" help:"Query heads. Default: 8."`
	KVHeads []int         `name:"kv-heads" help:"Key and value heads, a divisor of --heads. Default: --heads." placeholder:"N"`
	Dim     []int         `name:"dim" placeholder:"N" help:"Head size. Default: 64."`
	DType   []string      `name:"dtype" placeholder:"TYPE" help:"Element type: f32, f16 or bf16. Default: f32."`
	Cache   []string      `name:"cache" placeholder:"TYPE" help:"Type of keys and values, as a cache stores them: q8, q4 or f8; none is that of --dtype. Default: none."`
	Variant []string      `name:"variant" placeholder:"NAME" help:"Operation: fused, stages (all three, with the weights in memory), qk, softmax, pv, or backward (the gradients of q, k and v, without the forward call). Default: fused."`
	Causal  bool          `name:"causal" help:"Hide later keys from a row."`
	Window  *flags.Window `name:"window" placeholder:"L,R" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	Softcap float64       `name:"softcap" placeholder:"C" help:"Bound scores to (-C, C). Default: off."`
	Low     bool          `name:"low-precision" help:"Let products have fewer bits than those of float32, see attn run --help."`
	Mask    bool          `name:"mask" help:"Add a random f32 mask [Sq, Sk] to the scores of all heads."`
	Backend []string      `name:"backend" help:"Backends: cpu, gpu, gpu:1, ...; repeat the flag or separate names with commas. Default: all." placeholder:"NAME"`
	Plan    bool          `name:"plan" help:"Print how each case would run (path, chunks, limits), and run none."`
	Threads []int         `name:"threads" help:"Threads of the CPU backend, at most GOMAXPROCS; a list measures each. Default: GOMAXPROCS." placeholder:"N"`
	Memory  cli.Size      `name:"device-memory" placeholder:"SIZE" help:"Limit of the GPU memory in use: 256M, 2G. Tensors beyond it stay in host memory and are streamed. Default: all of it."`
	Ladder  bool          `name:"ladder" help:"Measure one case on one backend with kernels from the plainest to the fastest, each next to the one below; see docs/cli.md. Default of --seq: 1k, of --backend: auto."`
	Budget  time.Duration `name:"budget" help:"Time for the whole run, shared among backends and series; cases beyond it are predicted. Default: 48s without --seq, no limit with it." placeholder:"DURATION"`
	Rounds  int           `name:"rounds" help:"Rounds of each case, of several calls with the ceilings next to them. Default: as many as a precise median takes, at most 40." placeholder:"N"`
	Seed    uint64        `name:"seed" default:"1" help:"Seed of the inputs and of the choice of checked rows."`
	Resume  string        `name:"resume" placeholder:"FILE" type:"path" help:"Continue an interrupted run: cases that its --json report FILE has are not measured again. The other flags are those of that run; --json defaults to FILE."`
	JSON    string        `name:"json" help:"Write the report to this file, after each case." placeholder:"FILE"`
	GoBench string        `name:"gobench" help:"Write the rounds to this file as Go benchmark lines, for benchstat." placeholder:"FILE"`
	Table   string        `name:"markdown" help:"Write the table to this file as Markdown, one row a case." placeholder:"FILE"`
	HTML    string        `name:"html" help:"Write the report to this file as a web page with pictures and sortable tables; it needs no network." placeholder:"FILE"`
}

// Vars are the variables of the help texts.
func Vars() kong.Vars {
	var presets []string
	for _, p := range bench.Presets() {
		presets = append(presets, fmt.Sprintf("%s (%s)", p.Name, p.About))
	}
	return kong.Vars{"presets": strings.Join(presets, "; ")}
}

// Run measures, prints the table and writes the files. It checks all flags before it measures.
func (c *Command) Run(ctx context.Context, out *cli.Streams) error {
	cfg, err := c.config()
	if err != nil {
		return flags.Usagef("%w", err)
	}
	cfg.Args = out.Args
	if c.Resume != "" {
		if cfg.Resume, err = readReport(ctx, c.Resume); err != nil {
			return fmt.Errorf("--resume: %w", err)
		}
		c.JSON = cmp.Or(c.JSON, c.Resume)
	}
	if err := c.checkOutputs(); err != nil {
		return err
	}
	var step atomic.Pointer[bench.Progress]
	cfg.Progress = func(p bench.Progress) { step.Store(&p) }
	if c.JSON != "" && !c.Plan && !output.IsStream(c.JSON) {
		// The report survives a crash. The last write returns the error of a file that cannot be written.
		cfg.Measured = func(r *report.Report) { _ = output.Write(ctx, c.JSON, r.WriteJSON) }
	}
	stop := cli.NewStatus(out.Err).Watch(func() string { return describe(step.Load()) })
	r, err := c.measure(ctx, cfg)
	stop()
	if err != nil {
		return err
	}
	// An interrupted or wrong report is written too, and a file that fails does
	// not keep the others from being written.
	err = errors.Join(r.WriteTable(out.Out), c.write(ctx, r))
	if c.Plan {
		return err
	}
	if err = errors.Join(err, r.Err()); errors.Is(err, report.ErrInterrupted) {
		return cli.Interrupted{Err: err}
	}
	return err
}

// checkOutputs checks that the files of the report can be written.
func (c *Command) checkOutputs() error {
	var set output.Set
	defer set.Discard()
	for _, f := range []struct{ flag, path string }{{"json", c.JSON}, {"gobench", c.GoBench}, {"markdown", c.Table}, {"html", c.HTML}} {
		if err := set.Add("--"+f.flag, f.path); err != nil {
			return err
		}
	}
	return nil
}

// write writes the files of the report. ctx ends the wait for the reader of a pipe.
func (c *Command) write(ctx context.Context, r *report.Report) error {
	var errs []error
	for _, f := range []struct {
		path  string
		write func(io.Writer) error
	}{{c.JSON, r.WriteJSON}, {c.GoBench, r.WriteGoBench}, {c.Table, r.WriteMarkdown}, {c.HTML, r.WritePage}} {
		if f.path != "" {
			errs = append(errs, output.Write(ctx, f.path, f.write))
		}
	}
	return errors.Join(errs...)
}

// describe returns the number of the case, and the case with its step. p is nil before the first.
func describe(p *bench.Progress) string {
	if p == nil {
		return "opening the devices"
	}
	of := ""
	if p.Of > 0 {
		of = fmt.Sprintf(" of %d", p.Of)
	}
	return fmt.Sprintf("case %d%s · %-5s S=%-7d %-12s", p.Cases+1, of, p.Backend, p.Case.SeqK, p.Step)
}

// measure runs the cases, or plans them.
func (c *Command) measure(ctx context.Context, cfg bench.Config) (*report.Report, error) {
	if c.Ladder {
		return c.climb(ctx, cfg)
	}
	devices, missing, err := c.open()
	defer func() {
		for _, dev := range devices {
			dev.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	cfg.Missing = append(missing, idle(ctx, devices, cfg)...)
	if c.Plan {
		return bench.Plans(ctx, devices, cfg)
	}
	return bench.Run(ctx, devices, cfg)
}

// idle has a line for each device whose fused calls would use matrix units with an option that no case has.
func idle(ctx context.Context, devices []*kernels.Device, cfg bench.Config) (lines []string) {
	if slices.ContainsFunc(cfg.Series, func(s bench.Series) bool { return s.Case.LowPrecision }) {
		return nil
	}
	x, _ := kernels.Meta(kernels.F16, kernels.Shape{1, 1, 64, 64}) // such a call is possible everywhere
	for _, dev := range devices {
		call, err := dev.Prepare(x, x, x, kernels.Options{LowPrecision: true})
		if err != nil {
			continue
		}
		if plan, err := call.Plan(ctx); err == nil && plan.Matrices > 0 {
			lines = append(lines, dev.Info().Name+" · fused calls leave matrix units idle: --low-precision uses them, with --dtype f16, bf16 or f32")
		}
	}
	return lines
}

// config returns the configuration that the flags describe.
func (c *Command) config() (bench.Config, error) {
	cfg := bench.Config{Budget: c.Budget, Rounds: c.Rounds, Seed: c.Seed}
	cases := c.Seq != "" || c.SeqQ != nil || len(c.Batch)+len(c.Heads)+len(c.KVHeads)+len(c.Dim)+len(c.DType)+len(c.Cache)+len(c.Variant) > 0 ||
		c.Causal || c.Window != nil || c.Softcap != 0 || c.Low || c.Mask
	switch {
	case c.Resume != "" && c.Plan:
		return cfg, errors.New("--resume cannot continue --plan")
	case c.Preset != "" && cases:
		return cfg, errors.New("--preset replaces the flags --seq to --mask")
	case c.Ladder && (c.Preset != "" || c.Resume != "" || len(c.Variant) > 0 || c.Low || len(c.Backend) > 1 || len(c.Threads) > 1):
		return cfg, errLadder
	}
	for _, n := range c.Threads {
		if n < 0 || n > maxThreads {
			return cfg, fmt.Errorf("--threads is %d, it must be 1 to %d, or 0 for GOMAXPROCS", n, maxThreads)
		}
	}
	if c.Preset != "" {
		return c.preset(cfg)
	}
	if c.Ladder {
		c.Seq = cmp.Or(c.Seq, "1k")
	}
	var err error
	if cfg.Series, err = c.series(); err != nil {
		return cfg, err
	}
	if c.Ladder && len(cfg.Series) > 1 {
		return cfg, errLadder
	}
	if c.Seq == "" && cfg.Budget == 0 {
		cfg.Budget = sweepBudget
	}
	return cfg, cfg.Check()
}

// preset returns the configuration of a preset.
func (c *Command) preset(cfg bench.Config) (bench.Config, error) {
	var names []string
	for _, p := range bench.Presets() {
		if names = append(names, p.Name); p.Name != c.Preset {
			continue
		}
		cfg.Series = p.Series
		if cfg.Budget == 0 {
			cfg.Budget = p.Budget
		}
		if len(c.Backend) == 0 {
			c.Backend = p.Backends
		}
		if len(c.Threads) == 0 && p.Threads > 0 {
			c.Threads = []int{p.Threads}
		}
		return cfg, cfg.Check()
	}
	return cfg, fmt.Errorf("--preset is %q, it must be one of %s", c.Preset, strings.Join(names, ", "))
}

// series returns the combinations of the flags that are lists.
func (c *Command) series() ([]bench.Series, error) {
	one := bench.Series{Case: report.Case{Causal: c.Causal, Softcap: c.Softcap, LowPrecision: c.Low}}
	if c.Mask {
		one.Mask = kernels.F32.String()
	}
	if w := c.Window; w != nil {
		one.WindowLeft, one.WindowRight = limit(w.Left), limit(w.Right)
	}
	if c.SeqQ != nil {
		if one.SeqQ = *c.SeqQ; one.SeqQ < 1 { // package bench reads 0 as the number of keys
			return nil, fmt.Errorf("--seq-q is %d, it must be at least 1", one.SeqQ)
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
		field  func(s *bench.Series) *int
	}{
		{"batch", c.Batch, func(s *bench.Series) *int { return &s.Batch }},
		{"heads", c.Heads, func(s *bench.Series) *int { return &s.Heads }},
		{"kv-heads", c.KVHeads, func(s *bench.Series) *int { return &s.KVHeads }},
		{"dim", c.Dim, func(s *bench.Series) *int { return &s.Dim }},
	} {
		for _, n := range f.values {
			if n < 1 { // package bench reads 0 as the default
				return nil, fmt.Errorf("--%s is %d, it must be at least 1", f.name, n)
			}
		}
		all = combined(all, f.values, f.field)
	}
	for _, f := range []struct {
		name          string
		values, known []string
		field         func(s *bench.Series) *string
	}{
		{"dtype", c.DType, []string{"f32", "f16", "bf16"}, func(s *bench.Series) *string { return &s.DType }},
		{"cache", c.Cache, []string{"q8", "q4", "f8", "none"}, func(s *bench.Series) *string { return &s.Cache }},
		{"variant", c.Variant, report.Variants, func(s *bench.Series) *string { return &s.Variant }},
	} {
		for i, v := range f.values {
			if f.values[i] = strings.TrimSpace(v); !slices.Contains(f.known, f.values[i]) {
				return nil, fmt.Errorf("--%s is %q, it must be one of %s", f.name, v, strings.Join(f.known, ", "))
			}
		}
		all = combined(all, f.values, f.field)
	}
	for i := range all {
		all[i].Cache = strings.TrimPrefix(all[i].Cache, "none") // of the flag only
	}
	return all, nil
}

// limit returns a side of a window; nil for none.
func limit(n int) *int {
	if n == kernels.Unbounded {
		return nil
	}
	return &n
}

// combined returns each series with each of values in a field, or the series where there are none.
func combined[T any](all []bench.Series, values []T, field func(s *bench.Series) *T) []bench.Series {
	if len(values) == 0 {
		return all
	}
	var out []bench.Series
	for _, s := range all {
		for _, v := range values {
			*field(&s) = v
			out = append(out, s)
		}
	}
	return out
}

// open opens the named backends, by default all. missing describes those that
// are not available, and matrix units that no library reaches. The caller closes the devices, after an error too.
func (c *Command) open() (devices []*kernels.Device, missing []string, err error) {
	names := c.Backend
	if len(names) == 0 {
		for _, l := range kernels.Devices() {
			for _, info := range l.Infos {
				names = append(names, info.Name)
				for _, f := range info.Features {
					if strings.Contains(f, "ATTN_WEBGPU") { // what a library would bring
						missing = append(missing, fmt.Sprintf("%s · %s", info.Name, f))
					}
				}
			}
			if flags.IsUsage(l.Err) { // of a variable of the environment
				return nil, nil, l.Err
			}
			if l.Err != nil {
				missing = append(missing, fmt.Sprintf("%s · none: %s", l.Family, plain.Line(l.Err.Error())))
			}
		}
	}
	for _, name := range names {
		if name == "auto" {
			name, _ = kernels.Auto()
		}
		threads := c.Threads
		if name != "cpu" || len(threads) == 0 {
			threads = []int{0} // the backend's choice
		}
		for _, n := range threads {
			dev, err := c.openOne(name, n)
			switch {
			case err != nil && (len(c.Backend) > 0 || flags.IsUsage(err)):
				return devices, missing, fmt.Errorf("--backend: %w", err)
			case err != nil: // a listed device that does not open: the others are measured
				missing = append(missing, fmt.Sprintf("%s · does not open: %s", name, plain.Line(err.Error())))
			case slices.ContainsFunc(devices, func(d *kernels.Device) bool {
				return d.Info().Name == dev.Info().Name && d.Info().Threads == dev.Info().Threads
			}): // "auto" and its own name, or a name twice
				dev.Close()
			default:
				devices = append(devices, dev)
			}
		}
	}
	return devices, missing, nil
}

func (c *Command) openOne(name string, threads int) (*kernels.Device, error) {
	if name == "cpu" && threads > 0 {
		be, err := cpu.Open(cpu.Options{Threads: threads})
		return kernels.NewDevice(be), err
	}
	if family, selector, _ := strings.Cut(name, ":"); family == "gpu" && c.Memory > 0 {
		return openGPU(selector, int64(c.Memory), false)
	}
	return kernels.Open(name)
}
