package beamattn

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// fault is the environment variable of a worker process with what happens in its third unit:
// the process is killed ("dies"), or the unit fails ("fails"). Worker 1 has faults, the others have not.
const fault = "ATTN_BEAM_TEST_FAULT"

func init() { backend.Register("faulty", faultyDriver{}) }

type faultyDriver struct{}

func (faultyDriver) Devices() ([]backend.Info, error) { return nil, kernels.ErrNoDevice }

func (faultyDriver) Open(string) (backend.Backend, error) {
	return &faulty{Backend: cpu.New(cpu.Options{})}, nil
}

// faulty is the CPU, with a fault in a worker.
type faulty struct {
	*cpu.Backend
	calls atomic.Int64
}

func (f *faulty) Attention(ctx context.Context, calls ...*backend.Call) error {
	if n, ok := workers.Number(); ok && n == 1 && f.calls.Add(1) == 3 {
		switch os.Getenv(fault) {
		case "dies":
			if self, err := os.FindProcess(os.Getpid()); err == nil {
				_ = self.Kill()
			}
			select {}
		case "fails":
			return errors.New("the third unit fails")
		}
	}
	return f.Backend.Attention(ctx, calls...)
}

// small is a call of 3 splits whose bits are those of one call.
func small() *problem {
	return draw(kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 1100, SeqK: 2*cpu.ShardKeys + 900, Dim: 8, ValueDim: 8}, kernels.F32, kernels.Options{Causal: true, Align: kernels.LowerRight, LSE: true})
}

// execute runs a job in n worker processes and returns how many units they computed.
func execute(t *testing.T, spec Spec, n int, env map[string]string) (units int64, job *Job, err error) {
	t.Helper()
	spec.Branches = n
	job = must.Get(Prepare(t.Context(), spec))(t)
	p, s := beam.NewPipelineWithRoot()
	job.Attention(s)
	r, err := workers.Run(t.Context(), p, workers.Options{Workers: n, Env: env})
	for _, c := range r.AllMetrics().Counters() {
		if c.Key.Name == "units" {
			units += c.Committed
		}
	}
	return units, job, err
}

// TestFaults: a worker that dies, or fails on its third unit, leaves no output that looks
// finished, and a second run computes the units that are missing, and no other.
func TestFaults(t *testing.T) {
	p := small()
	wantO, wantLSE := p.direct(t)
	for _, how := range []string{"dies", "fails"} {
		t.Run(how, func(t *testing.T) {
			spec := p.spec(t, 3)
			spec.Backend = "faulty"
			_, job, err := execute(t, spec, 2, map[string]string{fault: how})
			if err == nil {
				t.Fatal("no error")
			}
			if how == "fails" && (!strings.Contains(err.Error(), "the third unit fails") || !strings.Contains(err.Error(), "k-") || !strings.Contains(err.Error(), "over keys")) {
				t.Errorf("the error does not name the unit and the shards of its keys: %v", err)
			}
			missing, err := job.Missing(t.Context(), 100)
			if err != nil || len(missing) == 0 || !strings.Contains(missing[0], "k-") {
				t.Errorf("missing units: %q (%v)", missing, err)
			}
			must.Fail(t, "the manifest", must.Err(os.Stat(spec.Out+"/manifest.json")), fs.ErrNotExist)
			// A worker that is killed leaves the file that it would have renamed.
			leftover := fmt.Sprintf("%s/partial/.attn-0-%06d-0000.npy", spec.Out, job.Cut.Blocks[len(job.Cut.Blocks)-1].ID)
			must.Do(t, os.WriteFile(leftover, nil, 0o600))
			spec.Resume = true
			units, _, err := execute(t, spec, 2, nil)
			must.Do(t, err)
			if all := int64(len(job.Cut.Blocks) * 3); units != int64(len(missing)) || units >= all {
				t.Errorf("the second run computed %d units of %d, %d were missing", units, all, len(missing))
			}
			o, lse := results(t, spec.Out, p)
			if !sameBits(o, wantO) || !sameBits(lse, wantLSE) {
				t.Error("the bits are not those of one call")
			}
			// A third run has nothing to do.
			if units, job, err := execute(t, spec, 2, nil); err != nil || units != 0 || len(job.Left) != 0 {
				t.Errorf("a run of a finished job computed %d units of %d blocks (%v)", units, len(job.Left), err)
			}
		})
	}
}

// TestDamage: results that were damaged or deleted after a job are computed again.
func TestDamage(t *testing.T) {
	p := small()
	wantO, _ := p.direct(t)
	spec := p.spec(t, 2)
	if _, _, err := execute(t, spec, 1, nil); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(spec.Out + "/o-*.npy")
	if err != nil || len(files) < 3 {
		t.Fatalf("%d shards (%v)", len(files), err)
	}
	must.Do(t, errors.Join(os.Truncate(files[0], 200), os.Remove(files[2])))
	spec.Resume = true
	_, job, err := execute(t, spec, 1, nil)
	must.Do(t, err)
	if o, _ := results(t, spec.Out, p); len(job.Left) != 2 || !sameBits(o, wantO) {
		t.Errorf("%d blocks were computed again, want 2; same bits: %t", len(job.Left), sameBits(o, wantO))
	}
}

// TestWorkers: the same bits on 1, 2 and 16 workers.
func TestWorkers(t *testing.T) {
	p := small()
	wantO, wantLSE := p.direct(t)
	for _, n := range []int{1, 2, 16} {
		spec := p.spec(t, 5)
		spec.Workers = n
		if _, _, err := execute(t, spec, n, map[string]string{"GOMAXPROCS": "1"}); err != nil {
			t.Fatal(err)
		}
		o, lse := results(t, spec.Out, p)
		if !sameBits(o, wantO) || !sameBits(lse, wantLSE) {
			t.Errorf("%d workers: the bits are not those of one call", n)
		}
	}
}

// TestPrepare: what is wrong is found before work starts, and named.
func TestPrepare(t *testing.T) {
	p := draw(kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 6, SeqK: 9, Dim: 4, ValueDim: 4}, kernels.F32, kernels.Options{})
	for _, c := range []struct {
		name   string
		change func(t *testing.T, s *Spec, dir string)
		is     error
		want   string
	}{
		{"truncated shard", func(t *testing.T, s *Spec, dir string) {
			must.Do(t, os.Truncate(dir+"/k-1.npy", 150))
		}, kernels.ErrShape, "k-1.npy"},
		{"missing shard", func(_ *testing.T, s *Spec, dir string) { s.V = dir + "/v-0.npy," + dir + "/v-7.npy" }, fs.ErrNotExist, "v-7.npy"},
		{"shard of another shape", func(_ *testing.T, s *Spec, dir string) { s.K += "," + dir + "/q-0.npy" }, kernels.ErrShape, "q-0.npy"},
		{"fewer values than keys", func(_ *testing.T, s *Spec, dir string) { s.V = dir + "/v-0.npy" }, kernels.ErrShape, "keys"},
		{"shard of another type", func(t *testing.T, s *Spec, dir string) {
			half := draw(p.dims, kernels.F16, kernels.Options{}).spec(t, 1)
			s.K += "," + half.K
		}, kernels.ErrDType, "f2"},
		{"mask", func(_ *testing.T, s *Spec, _ string) {
			mask, err := kernels.HostBool(make([]bool, 54), kernels.Shape{1, 1, 6, 9})
			if err != nil {
				panic(err)
			}
			s.Options.Mask = mask
		}, kernels.ErrUnsupported, "mask"},
		{"dropout", func(_ *testing.T, s *Spec, _ string) { s.Options.Dropout.P = 0.5 }, kernels.ErrUnsupported, "dropout"},
		{"no output", func(_ *testing.T, s *Spec, _ string) { s.Out = "" }, kernels.ErrOption, "out is missing"},
		{"no keys", func(_ *testing.T, s *Spec, _ string) { s.K = "" }, kernels.ErrOption, "k is missing"},
		{"type", func(_ *testing.T, s *Spec, _ string) { s.DType = "f8" }, kernels.ErrOption, `dtype is "f8"`},
		{"branches", func(_ *testing.T, s *Spec, _ string) { s.Branches = -1 }, kernels.ErrOption, "branches is -1"},
	} {
		spec := p.spec(t, 2)
		dir := filepath.Dir(spec.Out)
		c.change(t, &spec, dir)
		if _, err := Prepare(t.Context(), spec); !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%s: error %v, want %v with %q", c.name, err, c.is, c.want)
		}
		must.Fail(t, c.name, must.Err(os.Stat(dir+"/out")), fs.ErrNotExist)
	}
	spec := p.spec(t, 2)
	must.Get(Prepare(t.Context(), spec))(t)
	must.Fail(t, "a second job in a folder", must.Err(Prepare(t.Context(), spec)), fs.ErrExist, "resume")
	spec.Resume = true
	if _, err := Prepare(t.Context(), spec); err != nil {
		t.Errorf("resume: %v", err)
	}
	spec.Options.Causal = true
	must.Fail(t, "resume of another job", must.Err(Prepare(t.Context(), spec)), fs.ErrExist, "other inputs or options")
}

// TestAttentionFails: a pipeline of a call that Prepare refuses fails with its error.
func TestAttentionFails(t *testing.T) {
	p, s := beam.NewPipelineWithRoot()
	Attention(s, Spec{Q: t.TempDir() + "/q.npy", Out: t.TempDir()})
	if _, err := workers.Run(t.Context(), p, workers.Options{}); err == nil || !strings.Contains(err.Error(), "q.npy") || !strings.Contains(err.Error(), "missing") {
		t.Errorf("error %v", err)
	}
}
