// Package generated checks, in tests, that checked-in assembly is what its generator
// writes.
package generated

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Check runs the generator in the folder _generate once for each list of arguments, in a
// copy of the folder, and compares the files, which it writes one folder up, with those
// in the current folder. It skips the test where the generator's modules are not
// available.
func Check(t *testing.T, files []string, runs ...[]string) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: the generator is not compiled")
	}
	dir := t.TempDir()
	folder := filepath.Join(dir, "_generate")
	if err := os.CopyFS(folder, os.DirFS("_generate")); err != nil {
		t.Fatal(err)
	}
	command := func(ctx context.Context, args ...string) ([]byte, error) {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = folder
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly", "GOOS=", "GOARCH=")
		return cmd.CombinedOutput()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // without a network it may hang
	defer cancel()
	if out, err := command(ctx, "mod", "download"); err != nil {
		t.Skipf("the generator's modules are not available: %v: %s", err, bytes.TrimSpace(out))
	}
	for _, args := range runs {
		if out, err := command(t.Context(), append([]string{"run", "."}, args...)...); err != nil {
			t.Fatalf("go run . %s: %v: %s", strings.Join(args, " "), err, out)
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
