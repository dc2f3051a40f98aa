package workers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/register"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func TestMain(m *testing.M) {
	Serve()
	beam.Init()
	os.Exit(m.Run())
}

func init() {
	register.Function2x0(one)
	register.DoFn1x1[int, error](&recordFn{})
	register.DoFn1x1[int, error](&dieFn{})
	register.DoFn1x1[int, error](&failFn{})
	register.Emitter1[int]()
}

func one(_ []byte, emit func(int)) { emit(1) }

// recordFn writes a file named by the process.
type recordFn struct{ Dir string }

func (f *recordFn) ProcessElement(int) error {
	n, _ := Number()
	return os.WriteFile(filepath.Join(f.Dir, fmt.Sprintf("%d-%d", n, os.Getpid())), nil, 0o600)
}

// dieFn ends its process as a crash does.
type dieFn struct{}

func (*dieFn) ProcessElement(int) error {
	os.Exit(3)
	return nil
}

// TestRun: each branch runs in a process of its own.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	p, s := beam.NewPipelineWithRoot()
	for i := range 3 {
		branch := Scope(s, i)
		beam.ParDo0(branch, &recordFn{dir}, beam.ParDo(branch, one, beam.Impulse(branch)))
	}
	must.Get(Run(t.Context(), p, Options{Workers: 3}))(t)
	entries := must.Get(os.ReadDir(dir))(t)
	var numbers, pids []string
	for _, e := range entries {
		n, pid, _ := strings.Cut(e.Name(), "-")
		numbers, pids = append(numbers, n), append(pids, pid)
	}
	slices.Sort(pids)
	if !slices.Equal(numbers, []string{"0", "1", "2"}) || len(slices.Compact(pids)) != 3 || slices.Contains(pids, fmt.Sprint(os.Getpid())) {
		t.Errorf("branches and processes are %v, want 3 of them, none in this process %d", entries, os.Getpid())
	}
}

// failFn returns an error.
type failFn struct{}

func (*failFn) ProcessElement(int) error { return errors.New("shard k-3.npy is bad") }

// TestFailures: a process that dies fails the pipeline, as an error of a function does.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		name string
		fn   any
		want string
	}{
		{"a process that dies", &dieFn{}, ""}, // Prism reports it, or this package does
		{"a function that fails", &failFn{}, "shard k-3.npy is bad"},
	} {
		p, s := beam.NewPipelineWithRoot()
		for i := range 2 {
			branch := Scope(s, i)
			beam.ParDo0(branch, c.fn, beam.ParDo(branch, one, beam.Impulse(branch)))
		}
		if _, err := Run(t.Context(), p, Options{Workers: 2}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.name, err, c.want)
		}
	}
}

// TestCancel: a pipeline ends when its context does.
func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p, s := beam.NewPipelineWithRoot()
	beam.ParDo0(s, &recordFn{t.TempDir()}, beam.ParDo(s, one, beam.Impulse(s)))
	must.Fail(t, "cancelled", must.Err(Run(ctx, p, Options{})), context.Canceled)
}
