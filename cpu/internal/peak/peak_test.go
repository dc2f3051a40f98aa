package peak

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestKernels shows that a wider loop is not slower than the plain one, and that
// no call holds a preemption up for long.
func TestKernels(t *testing.T) {
	plain := measure(generic, 1)
	if plain < 1e8 {
		t.Errorf("plain Go does %g FLOPS, less than any machine of this century", plain)
	}
	for _, k := range kernels() {
		rate := measure(k, 1)
		var calls []time.Duration
		for range 200 {
			start := time.Now()
			k.run(turns, 0.5, 1)
			calls = append(calls, time.Since(start))
		}
		slices.Sort(calls)
		median, longest := calls[len(calls)/2], calls[len(calls)-1]
		t.Logf("%s: %.1f GFLOPS, a call takes %v (median), %v (longest)", k.name, rate/1e9, median, longest)
		if rate < plain/2 {
			t.Errorf("%s does %g FLOPS, plain Go %g", k.name, rate, plain)
		}
		// The longest includes what the system did meanwhile.
		if k.name != generic.name && median > 20*time.Microsecond {
			t.Errorf("a call of %s takes %v, more than 20 microseconds", k.name, median)
		}
	}
	if Kernel() != kernels()[0].name {
		t.Errorf("%s is used, %s is the widest", Kernel(), kernels()[0].name)
	}
}

func TestFLOPS(t *testing.T) {
	one, err := FLOPS(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	three, err := FLOPS(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: one thread %.1f, three %.1f GFLOPS", Kernel(), one/1e9, three/1e9)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := FLOPS(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: error %v", err)
	}
}

// TestGenerated shows that the checked-in assembly is what the generator writes.
func TestGenerated(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: the generator is not compiled")
	}
	dir := t.TempDir()
	gen := filepath.Join(dir, "_generate")
	if err := os.CopyFS(gen, os.DirFS("_generate")); err != nil {
		t.Fatal(err)
	}
	command := func(limit time.Duration, args ...string) ([]byte, error) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = gen
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly", "GOOS=", "GOARCH=")
		return cmd.CombinedOutput()
	}
	if out, err := command(20*time.Second, "mod", "download"); err != nil {
		t.Skipf("the generator's modules cannot be had here: %v: %s", err, bytes.TrimSpace(out))
	}
	files := []string{"fma_amd64.s", "fma_amd64.go"}
	args := []string{"run", ".", "-out", "../" + files[0], "-stubs", "../" + files[1], "-pkg", "peak"}
	if out, err := command(time.Minute, args...); err != nil {
		t.Fatalf("go %s: %v: %s", strings.Join(args, " "), err, out)
	}
	for _, f := range files {
		got, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what the generator writes, run go generate", f)
		}
	}
}
