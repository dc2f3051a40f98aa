package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/core/metrics"
	"golang.org/x/term"

	"github.com/seed90331342/attn/cmd/attn-beam/beamattn"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/plan"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"

	// Runners besides Prism.
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/runners/dataflow"
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/runners/flink"
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/runners/spark"
)

// runCommand is attn-beam run.
type runCommand struct {
	callFlags `embed:""`

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
func (c *runCommand) Run(ctx context.Context, out *streams) error {
	if c.Threads < 0 {
		return fmt.Errorf("--threads is %d, it must be at least 1, or 0 for the default", c.Threads)
	}
	if err := out.init(); err != nil {
		return err
	}
	if !c.Verbose {
		slog.SetDefault(slog.New(slog.DiscardHandler)) // errors come back from the pipeline
	}
	spec, err := c.spec(ctx)
	if err != nil {
		return err
	}
	spec.Out, spec.Backend, spec.Resume, spec.Options.LSE = c.Out, c.Backend, c.Resume, c.LSE
	if c.Runner == "prism" {
		spec.Branches = c.Workers
	}
	job, err := beamattn.Prepare(ctx, spec)
	if err != nil {
		return err
	}
	p, s := beam.NewPipelineWithRoot()
	job.Attention(s)
	started := time.Now()
	results, err := c.run(ctx, p, job, out)
	if err != nil {
		return explain(context.WithoutCancel(ctx), job, err)
	}
	sums := counters(results)
	seconds := time.Since(started).Seconds()
	_, err = fmt.Fprintf(out.out, "%d of %d blocks and %d units computed in %.1f s: %d pairs, %.4g GFLOP/s, %d merges, %d bytes read and %d written\n%s\n",
		len(job.Left), len(job.Cut.Blocks), sums["units"], seconds, sums["pairs"], float64(sums["flops"])/seconds/1e9, sums["merges"], sums["bytes_read"], sums["bytes_written"], job.Manifest)
	if c.Gather != "" {
		err = errors.Join(err, job.Gather(ctx, c.Gather))
	}
	return err
}

// run runs the pipeline.
func (c *runCommand) run(ctx context.Context, p *beam.Pipeline, job *beamattn.Job, out *streams) (metrics.Results, error) {
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
	if f, ok := out.err.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		var all int64
		for _, b := range job.Left {
			all += b.Pairs
		}
		started := time.Now()
		o.Progress = func(r metrics.Results) {
			sums := counters(r)
			fmt.Fprintf(f, "\r\x1b[K%3.0f%% of %.3g pairs, %.4g GFLOP/s", 100*float64(sums["pairs"])/float64(max(1, all)), float64(all), float64(sums["flops"])/time.Since(started).Seconds()/1e9)
		}
		defer fmt.Fprint(f, "\r\x1b[K")
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
	callFlags `embed:""`

	Speed     float64       `name:"speed" required:"" placeholder:"GFLOP/s" help:"Measured speed of a worker, as attn bench or attn-beam run print it."`
	Bandwidth float64       `name:"bandwidth" default:"1" placeholder:"GB/s" help:"Bandwidth of a worker to and from the files."`
	Overhead  time.Duration `name:"overhead" default:"50ms" placeholder:"TIME" help:"Time of a unit or a merge without computing and moving data."`
}

// Run prints the plan.
func (c *planCommand) Run(ctx context.Context, out *streams) error {
	if !(c.Speed > 0) || !(c.Bandwidth > 0) || c.Overhead < 0 {
		return fmt.Errorf("--speed is %v, --bandwidth %v and --overhead %v: they must be positive", c.Speed, c.Bandwidth, c.Overhead)
	}
	spec, err := c.spec(ctx)
	if err != nil {
		return err
	}
	p, err := beamattn.Plan(ctx, spec)
	if err != nil {
		return err
	}
	return p.Print(out.out, plan.Machine{Workers: c.Workers, Speed: 1e9 * c.Speed, Bandwidth: 1e9 * c.Bandwidth, Overhead: c.Overhead})
}
