package vec

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
	files := []string{"vec_amd64.s", "vec_amd64.go"}
	args := []string{"run", ".", "-out", "../" + files[0], "-stubs", "../" + files[1], "-pkg", "vec"}
	if out, err := command(2*time.Minute, args...); err != nil {
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
