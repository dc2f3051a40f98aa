package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/npy"
)

// asCommand is the environment variable that makes the test binary attn-beam.
const asCommand = "ATTN_BEAM_TEST_COMMAND"

func TestMain(m *testing.M) {
	workers.Serve()
	if os.Getenv(asCommand) != "" {
		main()
	}
	os.Exit(m.Run())
}

// command runs attn-beam and returns its outputs.
func command(ctx context.Context, dir string, args ...string) (stdout, stderr string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", "", err
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), asCommand+"=1")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// write writes q, k and v of normal numbers, [1, heads, rows, width], as files of their own and in shards.
func write(t *testing.T, dir string, heads, rows, width, shards int) {
	t.Helper()
	for i, name := range []string{"q", "k", "v"} {
		rng := rand.New(rand.NewPCG(7, uint64(i)))
		data := make([]float32, heads*rows*width)
		for i := range data {
			data[i] = float32(rng.NormFloat64())
		}
		save := func(file string, rows int, data []float32) {
			f := must.Get(os.Create(filepath.Join(dir, file)))(t)
			must.Do(t, npy.Write(f, "<f4", []int{1, heads, rows, width}, data))
			must.Do(t, f.Close())
		}
		save(name+".npy", rows, data)
		for n := range shards {
			lo, hi := rows*n/shards, rows*(n+1)/shards
			var shard []float32
			for h := range heads {
				shard = append(shard, data[(h*rows+lo)*width:(h*rows+hi)*width]...)
			}
			save(fmt.Sprintf("%s-%d.npy", name, n), hi-lo, shard)
		}
	}
}

// oneMachine runs attn run --check. It returns the output file and the printed text.
func oneMachine(t *testing.T, dir string, flags ...string) (file []byte, check string) {
	t.Helper()
	attn := filepath.Join(t.TempDir(), "attn.exe")
	build := exec.Command("go", "build", "-o", attn, "./cmd/attn")
	build.Dir = filepath.Join("..", "..")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), attn, append([]string{"run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "one.npy", "--backend", "cpu", "--check"}, flags...)...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	file = must.Get(os.ReadFile(filepath.Join(dir, "one.npy")))(t)
	return file, string(out)
}

// TestLong: 262,144 causal rows in 8 shards on 4 worker processes have the bits of attn run,
// whose rows agree with float64.
func TestLong(t *testing.T) {
	rows := 262144
	if testing.Short() {
		rows = 70000 // still more than 2 splits of the keys
	}
	dir := t.TempDir()
	write(t, dir, 1, rows, 32, 8)
	stdout, stderr, err := command(t.Context(), dir, "run", "--q", "q-*.npy", "--k", "k-*.npy", "--v", "v-*.npy", "--out", "out", "--gather", "all.npy",
		"--causal", "--backend", "cpu", "--workers", "4", "--threads", "1")
	if err != nil || stderr != "" {
		t.Fatalf("%v: %s", err, stderr)
	}
	t.Log(strings.TrimSpace(stdout))
	if pairs := fmt.Sprintf("%d pairs", rows*(rows+1)/2); !strings.Contains(stdout, pairs) {
		t.Errorf("the output lacks %q: %s", pairs, stdout)
	}
	all := must.Get(os.ReadFile(filepath.Join(dir, "all.npy")))(t)
	want, check := oneMachine(t, dir, "--causal")
	t.Log(strings.TrimSpace(check))
	if !bytes.Equal(all, want) {
		t.Error("the bits are not those of attn run")
	}
	if !strings.Contains(check, "rows against float64") {
		t.Errorf("attn run checked no rows: %s", check)
	}
}

// TestPlan prints a plan of files.
func TestPlan(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, 2, 600, 8, 2)
	stdout, stderr, err := command(t.Context(), dir, "plan", "--q", "q-*.npy", "--k", "k-*.npy", "--v", "v-*.npy", "--causal", "--speed", "10", "--workers", "4")
	if err != nil || stderr != "" || !regexp.MustCompile(`(?s)blocks +6 .*units +6 .*efficiency`).MatchString(stdout) {
		t.Errorf("%v: %s%s", err, stdout, stderr)
	}
}

// TestRefused: bad command lines fail with one line that names the flag or the file, wrong usage with exit code 2.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, 1, 8, 4, 2)
	good := []string{"run", "--q", "q-*.npy", "--k", "k-*.npy", "--v", "v-*.npy", "--out", "out"}
	plan := []string{"plan", "--seq", "1k"}
	must.Do(t, os.WriteFile(filepath.Join(dir, "half.npy"), []byte("\x93NUMPY"), 0o600))
	ids := must.Get(os.Create(filepath.Join(dir, "ids.npy")))(t)
	must.Do(t, npy.Write(ids, "<i4", []int{2}, []int32{0, 1}))
	must.Do(t, ids.Close())
	must.Do(t, os.Symlink("k-1.npy", filepath.Join(dir, "link.npy")))
	text := must.Get(os.ReadFile(filepath.Join(dir, "q.npy")))(t)
	text = bytes.Replace(text, []byte("'fortran_order': False"), []byte("'fortran_order': True "), 1)
	must.Do(t, os.WriteFile(filepath.Join(dir, "fortran.npy"), text, 0o600))
	for _, c := range []struct {
		args []string
		want string
		code int
	}{
		{[]string{"run"}, "missing flags: --k=URI,.., --out=URI, --q=URI,.., --v=URI,..", 2},
		{append(good, "--window", "3"), `"3" must be L,R`, 2},
		{append(good, "--workers", "0"), "--workers is 0", 2},
		{append(good, "--runner", "none"), "--runner", 2},
		{append(good, "--dropout", "0.5"), "unknown flag --dropout", 2},
		{append(good, "--softcap", "-1"), "softcap is -1", 2},
		{append(good, "--scale"), "--scale: a value is missing", 2},
		{append(good, "--", "--nothing"), "nothing", 2},
		{append(good, "--gather", "q-0.npy"), "the output q-0.npy would replace the input shard q-0.npy", 2},
		{append(good, "--gather", "link.npy"), "the output link.npy would replace the input shard k-1.npy", 2},
		{append(good, "--k", "half.npy"), "half.npy", 1},
		{append(good, "--q", "fortran.npy"), "fortran.npy: stored in Fortran order", 1},
		{append(good, "--segments", "half.npy"), "--segments half.npy", 1},
		{append(good, "--sinks", "1,-2"), "sinks has 2 elements, it must have 1, the number of heads", 2},
		{append(good, "--segments", "ids.npy"), "qsegments[0] has 2 elements, it must have 8", 1},
		{append(good, "--sinks", "1,-2", "--segments", "ids.npy"), "2 elements", 1},
		{append(good, "--backend", "tpu"), `backend "tpu" is unknown`, 2},
		{[]string{"plan"}, "missing flags: --q, --k and --v, or --seq", 2},
		{[]string{"plan", "--dim", "64"}, "missing flags: --q, --k and --v, or --seq", 2},
		{append(plan, "--q", "q.npy"), "--q, --k and --v exclude --seq", 2},
		{append(plan, "--speed", "-1"), "--speed is -1", 2},
		{append(plan, "--heads", "-1"), "--heads is -1, it must be at least 1", 2},
		{append(plan, "--heads", "8", "--kv-heads", "3"), "the kv heads must divide the query heads", 2},
		{[]string{"plan", "--seq", "10x"}, `"10x" is not a number of rows`, 2},
	} {
		stdout, stderr, err := command(t.Context(), dir, c.args...)
		exit := new(exec.ExitError)
		if !errors.As(err, &exit) || exit.ExitCode() != c.code {
			t.Errorf("%q: %v, want exit code %d", c.args, err, c.code)
		}
		if strings.Count(stderr, "\n") != 1 || !strings.HasPrefix(stderr, "attn-beam: ") || !strings.Contains(stderr, c.want) {
			t.Errorf("%q: %q, want a line with %q", c.args, stdout+stderr, c.want)
		}
		if _, err := os.Stat(filepath.Join(dir, "out")); err == nil {
			t.Errorf("%q: the output folder exists", c.args)
		}
	}
}

// TestNegative: lists of numbers may begin with or contain negative ones.
func TestNegative(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, 2, 16, 4, 1)
	for i, sinks := range []string{"0.3,-1", "-1,0.3", "-Inf,-.5"} {
		args := []string{"run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", fmt.Sprint("out", i), "--gather", "all.npy", "--backend", "cpu", "--sinks", sinks, "--alibi", "0.5,-2"}
		if _, stderr, err := command(t.Context(), dir, args...); err != nil {
			t.Fatalf("--sinks %s: %v: %s", sinks, err, stderr)
		}
		all := must.Get(os.ReadFile(filepath.Join(dir, "all.npy")))(t)
		if want, _ := oneMachine(t, dir, "--sinks", sinks, "--alibi", "0.5,-2"); !bytes.Equal(all, want) {
			t.Errorf("--sinks %s: the bits are not those of attn run", sinks)
		}
	}
}

// TestPlanOfLengths: the command in docs/distributed.md prints the plan that is there.
func TestPlanOfLengths(t *testing.T) {
	page := must.Get(os.ReadFile(filepath.Join("..", "..", "docs", "distributed.md")))(t)
	line := regexp.MustCompile(`(?m)^    \$ (attn-beam plan --seq .*)$`).FindSubmatch(page)
	if line == nil {
		t.Fatal("docs/distributed.md has no command attn-beam plan --seq")
	}
	args := strings.Fields(string(line[1]))[1:]
	stdout, stderr, err := command(t.Context(), t.TempDir(), args...)
	if err != nil || stderr != "" {
		t.Fatalf("%q: %v: %s", args, err, stderr)
	}
	if want := "    " + strings.ReplaceAll(strings.TrimSpace(stdout), "\n", "\n    "); !bytes.Contains(page, []byte(want)) {
		t.Errorf("docs/distributed.md lacks the output of %q:\n%s", args, stdout)
	}
	if stdout, stderr, err = command(t.Context(), t.TempDir(), "plan", "--seq", "1M", "--causal"); err != nil || !strings.Contains(stdout, "\nassumed     100 GFLOP/s a worker: give its measured speed as --speed\n") {
		t.Errorf("without --speed: %v: %s%s", err, stdout, stderr)
	}
}
