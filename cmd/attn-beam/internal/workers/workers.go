// Package workers runs a pipeline on Prism, Beam's local runner, in several worker processes.
//
// Prism starts one worker for each environment of a pipeline. A pipeline divides its work into branches, one for each
// worker, and builds branch i in the scope that [Scope] returns. [Run] gives each branch an environment of its own,
// whose process is this program again. The program calls [Serve] first, which does not return in such a process:
//
//	func main() {
//		workers.Serve()
//		...
//	}
//
// Other runners scale a single branch on their own and need none of this.
package workers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/apache/beam/sdks/v2/go/container/tools"
	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/core/metrics"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/core/runtime/graphx"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/core/runtime/harness"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/core/runtime/metricsx"
	jobpb "github.com/apache/beam/sdks/v2/go/pkg/beam/model/jobmanagement_v1"
	pipepb "github.com/apache/beam/sdks/v2/go/pkg/beam/model/pipeline_v1"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/runners/prism"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/runners/universal/runnerlib"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/util/grpcx"
	"google.golang.org/protobuf/proto"
)

// number is the environment variable of a worker process with the number of its branch.
const number = "ATTN_BEAM_WORKER"

// Number returns the number of this worker process; ok is false in other processes.
func Number() (n int, ok bool) {
	n, err := strconv.Atoi(os.Getenv(number))
	return n, err == nil
}

// Serve returns at once, except in a process that Run started as a worker: there it works
// until the runner has ended, and exits.
func Serve() {
	n, ok := Number()
	if !ok {
		return
	}
	grpcx.Dial = dialer(fmt.Sprintf("%d-", n))
	err := announce(n)
	if err == nil {
		err = serve(os.Args[1:])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "attn-beam: worker: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve connects to the runner, which passes --id='ID' and --provision_endpoint=ADDRESS.
func serve(args []string) error {
	var id, endpoint string
	for _, arg := range args {
		name, value, _ := strings.Cut(arg, "=")
		switch name {
		case "--id":
			id = strings.Trim(value, "'")
		case "--provision_endpoint":
			endpoint = value
		}
	}
	beam.Init()
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the runner receives the log otherwise
	ctx := grpcx.WriteWorkerID(context.Background(), id)
	info, err := tools.ProvisionInfo(ctx, endpoint)
	if err != nil {
		return err
	}
	return harness.MainWithOptions(ctx, info.GetLoggingEndpoint().GetUrl(), info.GetControlEndpoint().GetUrl(),
		harness.Options{RunnerCapabilities: info.GetRunnerCapabilities()})
}

// grace is how long Prism may take to report that a pipeline is done after it has ended the
// first of its processes. It takes milliseconds, and it ends all of them first.
const grace = 3 * time.Second

// Scope returns the scope for the branch of a worker.
func Scope(s beam.Scope, worker int) beam.Scope { return s.Scope(fmt.Sprintf("worker %d", worker)) }

var scope = regexp.MustCompile(`(?:^|/)worker (\d+)/`)

// Options are the processes of a pipeline, and what follows its progress.
type Options struct {
	// Workers is the number of processes; 0 means 1.
	Workers int
	// Env is added to the environment of each process.
	Env map[string]string
	// Progress, unless nil, is called every half a second with the counters of the workers.
	Progress func(metrics.Results)
}

// Run executes a pipeline and returns its metrics, those of a failed pipeline as well. The
// pipeline ends when ctx does. The program has called beam.Init.
func Run(ctx context.Context, p *beam.Pipeline, o Options) (metrics.Results, error) {
	address, lost, stop, err := watch()
	if err != nil {
		return metrics.Results{}, err
	}
	defer stop()
	pl, err := marshal(ctx, p, o, address)
	if err != nil {
		return metrics.Results{}, err
	}
	client, err := prism.CreateJobServer(ctx, prism.Options{})
	if err != nil {
		return metrics.Results{}, err
	}
	opt := &runnerlib.JobOptions{Name: "attn", Experiments: []string{"prism_disable_sdf_split"}}
	prepared, _, token, err := runnerlib.Prepare(ctx, client, pl, opt)
	if err != nil {
		return metrics.Results{}, err
	}
	job, err := runnerlib.Submit(ctx, client, prepared, token)
	if err != nil {
		return metrics.Results{}, err
	}
	results := func() (metrics.Results, error) {
		// The metrics of a job that was cancelled are wanted as well.
		r, err := client.GetJobMetrics(context.WithoutCancel(ctx), &jobpb.GetJobMetricsRequest{JobId: job})
		if err != nil {
			return metrics.Results{}, err
		}
		return *metricsx.FromMonitoringInfos(pl, r.GetMetrics().GetAttempted(), r.GetMetrics().GetCommitted()), nil
	}
	finished := make(chan error, 1)
	go func() { finished <- runnerlib.WaitForCompletion(context.WithoutCancel(ctx), client, job) }()
	tick := time.NewTicker(time.Second / 2)
	defer tick.Stop()
wait:
	for {
		select {
		case err = <-finished:
			break wait
		case err = <-lost:
			// Prism ends the processes of a pipeline that is done.
			select {
			case err = <-finished:
			case <-time.After(grace):
			}
			break wait
		case <-ctx.Done():
			err = ctx.Err()
			break wait
		case <-tick.C:
			if r, err := results(); err == nil && o.Progress != nil {
				o.Progress(r)
			}
		}
	}
	r, errResults := results()
	if err != nil {
		// This ends the processes. Where the job has ended already, it does nothing.
		_, _ = client.Cancel(context.WithoutCancel(ctx), &jobpb.CancelJobRequest{JobId: job})
	}
	return r, errors.Join(err, errResults)
}

// marshal returns the pipeline with an environment for each worker, which connects to address.
func marshal(ctx context.Context, p *beam.Pipeline, o Options, address string) (*pipepb.Pipeline, error) {
	edges, _, err := p.Build()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	first, err := graphx.CreateEnvironment(ctx, graphx.URNEnvProcess, func(context.Context) string { return "{}" })
	if err != nil {
		return nil, err
	}
	pl, err := graphx.Marshal(edges, &graphx.Options{Environment: first})
	if err != nil {
		return nil, err
	}
	environments := pl.GetComponents().GetEnvironments()
	if len(environments) != 1 {
		return nil, fmt.Errorf("the pipeline has %d environments, it must have 1", len(environments))
	}
	var ids []string
	for id, e := range environments {
		ids = append(ids, id)
		first = e
		e.Dependencies = nil // the workers are this program: nothing is staged for them
	}
	for i := range max(1, o.Workers) {
		payload := &pipepb.ProcessPayload{Command: self, Env: map[string]string{number: strconv.Itoa(i), watched: address}}
		for k, v := range o.Env {
			payload.Env[k] = v
		}
		e := first
		if i > 0 {
			e = proto.Clone(first).(*pipepb.Environment)
			ids = append(ids, fmt.Sprintf("%s %d", ids[0], i))
			environments[ids[i]] = e
		}
		if e.Payload, err = proto.Marshal(payload); err != nil {
			return nil, err
		}
	}
	for _, t := range pl.GetComponents().GetTransforms() {
		m := scope.FindStringSubmatch(t.GetUniqueName())
		if m == nil || t.GetEnvironmentId() == "" {
			continue
		}
		i, err := strconv.Atoi(m[1])
		if err != nil || i >= len(ids) {
			return nil, fmt.Errorf("%s is the branch of a worker that does not exist, there are %d", t.GetUniqueName(), len(ids))
		}
		t.EnvironmentId = ids[i]
	}
	return pl, nil
}
