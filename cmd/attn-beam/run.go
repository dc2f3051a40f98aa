package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/core/metrics"

	"github.com/seed90331342/attn/cmd/attn-beam/beamattn"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/plan"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"

	// Runners besides Prism.
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/runners/dataflow"
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/runners/flink"
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/runners/spark"
)

// runCommand is attn-beam run.
type runCommand struct {
	operands        `embed:""`
	callFlags       `embed:""`
	flags.Overwrite `embed:""`

	Out    string `name:"out" required:"" placeholder:"URI" group:"Outputs" help:"Folder for the output: .npy shards and manifest.json."`
	LSE    bool   `name:"lse" group:"Outputs" help:"Also write the log-sum-exp of the rows, in shards of f4."`
	Gather string `name:"gather" placeholder:"URI" group:"Outputs" help:"Also write the output as one .npy file, [B,H,Sq,Dv]."`
	Resume bool   `name:"resume" group:"Outputs" help:"Continue a job with the same inputs and options: finished shards and partial results are kept."`

	Backend string `name:"backend" default:"auto" placeholder:"NAME" help:"Device of the workers: auto, cpu, gpu, gpu:1 or gpu:NAME."`
	Runner  string `name:"runner" enum:"prism,flink,spark,dataflow" default:"prism" help:"Engine: prism is this machine; flink and spark take -- --endpoint=HOST:PORT, dataflow its flags, as -- --project=NAME --region=NAME --staging_location=gs://.."`
	Threads int    `name:"threads" placeholder:"N" help:"Threads of each worker process of prism. Default: the machine's, divided by --workers."`
	Verbose bool   `name:"verbose" help:"Print the log of the engine."`
}

// Run computes the output.
func (c *runCommand) Run(ctx context.Context, out *cli.Streams, beams beamFlags) error {
	err := c.run(ctx, out, beams)
	if err != nil && ctx.Err() != nil {
		return cli.Interrupted{Err: errors.New("interrupted: the shards that are written stay, --resume continues from them")}
	}
	return err
}

func (c *runCommand) run(ctx context.Context, out *cli.Streams, beams beamFlags) error {
	if c.Threads < 0 {
		return flags.Usagef("--threads is %d, it must be at least 1, or 0 for the default", c.Threads)
	}
	if err := beams.init(); err != nil {
		return err
	}
	if !c.Verbose {
		slog.SetDefault(slog.New(slog.DiscardHandler)) // errors come back from the pipeline
	}
	spec, err := c.spec(ctx)
	if err != nil {
		return err
	}
	spec.Q, spec.K, spec.V = c.Q, c.K, c.V
	spec.Out, spec.Gather, spec.Backend, spec.Resume, spec.Options.LSE = c.Out, c.Gather, c.Backend, c.Resume, c.LSE
	spec.Replaces = func(inputs, outputs []string) error {
		files := func(flag string, uris []string) (list []flags.File) {
			for _, uri := range uris {
				list = append(list, flags.File{Flag: flag, Path: uri})
			}
			return list
		}
		segments := []flags.File{{Flag: "--segments", Path: c.Segments}, {Flag: "--kv-segments", Path: c.KVSegments}}
		return c.Overwrite.Check(append(segments, files("shard", inputs)...), files("the output", outputs))
	}
	if c.Runner == "prism" {
		spec.Branches = c.Workers
		dev, err := kernels.Open(c.Backend) // the error of a worker would be no more than text
		if err != nil {
			return fmt.Errorf("--backend: %w", err)
		}
		dev.Close()
	}
	job, err := beamattn.Prepare(ctx, spec)
	if err != nil {
		return blame(ctx, spec, err)
	}
	p, s := beam.NewPipelineWithRoot()
	job.Attention(s)
	started := time.Now()
	results, err := c.pipeline(ctx, p, job, out)
	if err != nil {
		return explain(context.WithoutCancel(ctx), job, err)
	}
	sums := counters(results)
	seconds := time.Since(started).Seconds()
	_, err = fmt.Fprintf(out.Out, "%d of %d blocks and %d units computed in %.1f s: %d pairs, %.4g GFLOP/s, %d merges, %d bytes read and %d written\n%s\n",
		len(job.Left), len(job.Cut.Blocks), sums["units"], seconds, sums["pairs"], float64(sums["flops"])/seconds/1e9, sums["merges"], sums["bytes_read"], sums["bytes_written"], job.Manifest)
	if c.Gather != "" {
		err = errors.Join(err, job.Gather(ctx, c.Gather))
	}
	return err
}

// blame marks the error of a call over files as wrong usage if the files alone are a call.
func blame(ctx context.Context, spec beamattn.Spec, err error) error {
	return flags.Blame(err, func() error {
		spec.Options, spec.DType = kernels.Options{QSegments: spec.Options.QSegments, KSegments: spec.Options.KSegments}, ""
		_, err := beamattn.Plan(ctx, spec)
		return err
	})
}

// pipeline runs the pipeline.
func (c *runCommand) pipeline(ctx context.Context, p *beam.Pipeline, job *beamattn.Job, out *cli.Streams) (metrics.Results, error) {
	if c.Runner != "prism" {
		r, err := beam.Run(ctx, c.Runner, p)
		if err != nil || r == nil {
			return metrics.Results{}, err
		}
		return r.Metrics(), nil
	}
	threads := c.Threads
	if threads == 0 {
		threads = max(1, runtime.GOMAXPROCS(0)/c.Workers)
	}
	o := workers.Options{Workers: c.Workers, Env: map[string]string{"GOMAXPROCS": strconv.Itoa(threads)}}
	if status := cli.NewStatus(out.Err); status.Active() {
		var all int64
		for _, b := range job.Left {
			all += b.Pairs
		}
		started := time.Now()
		o.Progress = func(r metrics.Results) {
			sums := counters(r)
			status.Show(fmt.Sprintf("%3.0f%% of %.3g pairs, %.4g GFLOP/s", 100*float64(sums["pairs"])/float64(max(1, all)), float64(all), float64(sums["flops"])/time.Since(started).Seconds()/1e9))
		}
		defer status.Clear()
	}
	return workers.Run(ctx, p, o)
}

// counters returns the sums of the counters of a job.
func counters(r metrics.Results) map[string]int64 {
	sums := map[string]int64{}
	for _, c := range r.AllMetrics().Counters() {
		if c.Key.Namespace == "attn" {
			sums[c.Key.Name] += max(c.Attempted, c.Committed)
		}
	}
	return sums
}

// explain adds to the error of a pipeline which results are missing.
func explain(ctx context.Context, job *beamattn.Job, err error) error {
	text := err.Error()
	// What a function returned follows Beam's own description of the pipeline.
	if i := strings.LastIndex(text, "failed:\n"); i >= 0 {
		text = text[i+len("failed:\n"):]
	}
	missing, e := job.Missing(ctx, 4)
	if e != nil || len(missing) == 0 {
		return errors.New(text)
	}
	if len(missing) == 4 {
		missing[3] = "and others"
	}
	return fmt.Errorf("%s; not computed: %s; --resume continues", text, strings.Join(missing, "; "))
}

// planCommand is attn-beam plan.
type planCommand struct {
	Q string `name:"q" placeholder:"URI,.." group:"Inputs" help:"Files, as for run. Instead of --q, --k and --v give --seq."`
	K string `name:"k" placeholder:"URI,.." group:"Inputs" help:"Keys."`
	V string `name:"v" placeholder:"URI,.." group:"Inputs" help:"Values."`

	Seq      length `name:"seq" placeholder:"N" group:"Lengths" help:"Query rows of a head: 10000000, or 10M for ten million."`
	SeqK     length `name:"seq-k" placeholder:"N" group:"Lengths" help:"Keys of a head. Default: --seq."`
	Batch    int    `name:"batch" placeholder:"N" group:"Lengths" help:"Batches. Default: 1."`
	Heads    int    `name:"heads" placeholder:"N" group:"Lengths" help:"Query heads. Default: 8."`
	KVHeads  int    `name:"kv-heads" placeholder:"N" group:"Lengths" help:"Key and value heads. Default: --heads."`
	Dim      int    `name:"dim" placeholder:"N" group:"Lengths" help:"Head size. Default: 64."`
	ValueDim int    `name:"value-dim" placeholder:"N" group:"Lengths" help:"Head size of the values. Default: --dim."`

	callFlags `embed:""`

	Speed     float64       `name:"speed" placeholder:"GFLOP/s" help:"Speed of a worker, as attn bench or attn-beam run print it. Default: 100, about one core with AVX2, which the plan then calls assumed."`
	Bandwidth float64       `name:"bandwidth" default:"1" placeholder:"GB/s" help:"Bandwidth of a worker to and from the files. Default: 1."`
	Overhead  time.Duration `name:"overhead" default:"50ms" placeholder:"TIME" help:"Time of a unit or a merge without computing and moving data. Default: 50ms."`
}

// assumedSpeed is the default of --speed in GFLOP/s: a core with AVX2 at 85% of its peak.
const assumedSpeed = 100

// Run prints the plan.
func (c *planCommand) Run(ctx context.Context, out *cli.Streams) error {
	if !(c.Speed >= 0) || !(c.Bandwidth > 0) || c.Overhead < 0 {
		return flags.Usagef("--speed is %v, --bandwidth %v and --overhead %v: they must be positive", c.Speed, c.Bandwidth, c.Overhead)
	}
	spec, err := c.spec(ctx)
	if err != nil {
		return err
	}
	p, err := c.plan(ctx, spec)
	if err != nil {
		return err
	}
	m := plan.Machine{Workers: c.Workers, Speed: 1e9 * cmp.Or(c.Speed, assumedSpeed), Bandwidth: 1e9 * c.Bandwidth, Overhead: c.Overhead}
	if err := p.Print(out.Out, m); err != nil || c.Speed > 0 {
		return err
	}
	_, err = fmt.Fprintf(out.Out, "assumed     %d GFLOP/s a worker: give its measured speed as --speed\n", assumedSpeed)
	return err
}

// plan returns the plan of the files, or of the lengths.
func (c *planCommand) plan(ctx context.Context, spec beamattn.Spec) (*plan.Plan, error) {
	spec.Q, spec.K, spec.V = c.Q, c.K, c.V
	d := kernels.Dims{Batch: c.Batch, Heads: c.Heads, KVHeads: c.KVHeads, SeqQ: int(c.Seq), SeqK: int(c.SeqK), Dim: c.Dim, ValueDim: c.ValueDim}
	switch files := c.Q != "" && c.K != "" && c.V != ""; {
	case files && d == kernels.Dims{}:
		p, err := beamattn.Plan(ctx, spec)
		return p, blame(ctx, spec, err)
	case c.Q+c.K+c.V != "" && d != kernels.Dims{}:
		return nil, flags.Usagef("--q, --k and --v exclude --seq and the other lengths: the files have lengths of their own")
	case c.Seq == 0:
		return nil, flags.Usagef("missing flags: --q, --k and --v, or --seq")
	}
	for _, f := range []struct {
		flag string
		n    int
	}{{"--batch", d.Batch}, {"--heads", d.Heads}, {"--kv-heads", d.KVHeads}, {"--dim", d.Dim}, {"--value-dim", d.ValueDim}} {
		if f.n < 0 {
			return nil, flags.Usagef("%s is %d, it must be at least 1", f.flag, f.n)
		}
	}
	d.Batch, d.Heads, d.SeqK, d.Dim = cmp.Or(d.Batch, 1), cmp.Or(d.Heads, 8), cmp.Or(d.SeqK, d.SeqQ), cmp.Or(d.Dim, 64)
	d.KVHeads, d.ValueDim = cmp.Or(d.KVHeads, d.Heads), cmp.Or(d.ValueDim, d.Dim)
	p, err := beamattn.PlanDims(d, spec)
	return p, flags.Blame(err, func() error { return nil }) // all is on the command line
}

// length is a flag of a number of rows: 4096, 10k, 10M, where k and M are 1,000 and 1,000,000.
type length int

// UnmarshalText implements encoding.TextUnmarshaler.
func (n *length) UnmarshalText(text []byte) error {
	digits, unit := string(text), 1
	for suffix, size := range map[string]int{"k": 1e3, "M": 1e6, "G": 1e9} {
		if d, ok := strings.CutSuffix(digits, suffix); ok {
			digits, unit = d, size
			break
		}
	}
	x, err := strconv.Atoi(digits)
	if err != nil || x < 1 || x > math.MaxInt32*1000/unit {
		return fmt.Errorf("%q is not a number of rows, write 4096, 10k or 10M", text)
	}
	*n = length(x * unit)
	return nil
}
