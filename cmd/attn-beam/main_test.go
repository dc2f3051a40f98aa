package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
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

// write writes q, k and v of normal numbers, [1, heads, rows, width], as files of their own and
// in shards.
func write(t *testing.T, dir string, heads, rows, width, shards int) {
	t.Helper()
	for i, name := range []string{"q", "k", "v"} {
		rng := rand.New(rand.NewPCG(7, uint64(i)))
		data := make([]float32, heads*rows*width)
		for i := range data {
			data[i] = float32(rng.NormFloat64())
		}
		save := func(file string, rows int, data []float32) {
			f, err := os.Create(filepath.Join(dir, file))
			if err == nil {
				err = npy.Write(f, "<f4", []int{1, heads, rows, width}, data)
			}
			if err == nil {
				err = f.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
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
	if file, err = os.ReadFile(filepath.Join(dir, "one.npy")); err != nil {
		t.Fatal(err)
	}
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
	all, err := os.ReadFile(filepath.Join(dir, "all.npy"))
	if err != nil {
		t.Fatal(err)
	}
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

// TestRefused: bad command lines fail with one line that names the flag or the file.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, 1, 8, 4, 2)
	good := []string{"run", "--q", "q-*.npy", "--k", "k-*.npy", "--v", "v-*.npy", "--out", "out"}
	if err := os.WriteFile(filepath.Join(dir, "half.npy"), []byte("\x93NUMPY"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"run"}, "missing flags"},
		{append(good, "--window", "3"), `"3" must be L,R`},
		{append(good, "--workers", "0"), "--workers is 0"},
		{append(good, "--runner", "none"), "--runner"},
		{append(good, "--dropout", "0.5"), "unknown flag --dropout"},
		{append(good, "--k", "half.npy"), "half.npy"},
		{append(good, "--segments", "half.npy"), "--segments half.npy"},
		{append(good, "--sinks", "1,2"), "sinks"},
		{append(good, "--", "--nothing"), "nothing"},
	} {
		stdout, stderr, err := command(t.Context(), dir, c.args...)
		if err == nil || strings.Count(stderr, "\n") != 1 || !strings.HasPrefix(stderr, "attn-beam: ") || !strings.Contains(stderr, c.want) {
			t.Errorf("%q: %v, %q, want a line with %q", c.args, err, stdout+stderr, c.want)
		}
		if _, err := os.Stat(filepath.Join(dir, "out")); err == nil {
			t.Errorf("%q: the output folder exists", c.args)
		}
	}
}
