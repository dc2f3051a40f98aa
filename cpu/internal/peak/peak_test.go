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
	plain := measure(1, generic.fmaWork())
	if plain < 1e8 {
		t.Errorf("plain Go does %g FLOPS, less than any machine of this century", plain)
	}
	for _, k := range kernels() {
		rate := measure(1, k.fmaWork())
		t.Logf("%s: %.1f GFLOPS", k.tier, rate/1e9)
		if rate < plain/2 {
			t.Errorf("%s does %g FLOPS, plain Go %g", k.tier, rate, plain)
		}
		short(t, k, "fma", func() { k.fma(turns, 0.5, 1) })
	}
}

// short fails when most calls of an assembly loop take longer than the garbage
// collector may be held up.
func short(t *testing.T, k kernel, what string, call func()) {
	t.Helper()
	var calls []time.Duration
	for range 200 {
		start := time.Now()
		call()
		calls = append(calls, time.Since(start))
	}
	slices.Sort(calls)
	median, longest := calls[len(calls)/2], calls[len(calls)-1]
	t.Logf("%s %s: a call takes %v (median), %v (longest)", k.tier, what, median, longest)
	// The longest includes what the system did meanwhile.
	if k.tier != generic.tier && median > 20*time.Microsecond {
		t.Errorf("a call of %s %s takes %v, more than 20 microseconds", k.tier, what, median)
	}
}

func TestFLOPSOfEachTier(t *testing.T) {
	if tiers := Tiers(); tiers[len(tiers)-1] != "go" {
		t.Errorf("tiers are %v, plain Go is everywhere and last", tiers)
	}
	for _, tier := range append(Tiers(), "") {
		for threads := 1; threads <= 3; threads += 2 {
			rate, err := FLOPS(t.Context(), tier, threads)
			if err != nil || rate < 1e8 {
				t.Errorf("tier %q, %d threads: %g FLOPS, %v", tier, threads, rate, err)
			}
			t.Logf("tier %q, %d threads: %.1f GFLOPS", tier, threads, rate/1e9)
		}
	}
	if _, err := FLOPS(t.Context(), "avx1024", 1); !errors.Is(err, ErrTier) {
		t.Errorf("a tier that is not there: error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := FLOPS(ctx, "", 1); !errors.Is(err, context.Canceled) {
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
	var files []string
	for _, kernels := range []string{"fma", "read"} {
		asm, stubs := kernels+"_amd64.s", kernels+"_amd64.go"
		files = append(files, asm, stubs)
		args := []string{"run", ".", "-kernels", kernels, "-out", "../" + asm, "-stubs", "../" + stubs, "-pkg", "peak"}
		if out, err := command(time.Minute, args...); err != nil {
			t.Fatalf("go %s: %v: %s", strings.Join(args, " "), err, out)
		}
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
