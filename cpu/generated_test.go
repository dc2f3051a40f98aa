package cpu

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestGenerated shows that the checked-in assembly and its tables are what the generators write.
// It skips a generator whose modules are not available.
func TestGenerated(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("-short, or the race detector: the generators are not compiled")
	}
	const vec = "internal/vec"
	for arch, main := range map[string]string{"amd64": ".", "arm64": "./arm64"} {
		t.Run(arch, func(t *testing.T) {
			dir := t.TempDir()
			command := func(ctx context.Context, args ...string) ([]byte, error) {
				cmd := exec.CommandContext(ctx, "go", args...)
				cmd.Dir = filepath.Join(dir, "_generate")
				cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly", "GOOS=", "GOARCH=")
				return cmd.CombinedOutput()
			}
			must.Do(t, os.CopyFS(dir, os.DirFS(vec)))
			files := []string{"vec_" + arch + ".s", "vec_" + arch + ".go", "tables_" + arch + ".go"}
			for _, file := range files { // the generator must write them
				must.Do(t, os.Remove(filepath.Join(dir, file)))
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // without a network it may hang
			defer cancel()
			if out, err := command(ctx, "mod", "download"); err != nil {
				t.Skipf("the generator's modules are not available: %v: %s", err, bytes.TrimSpace(out))
			}
			// The arguments are those of go:generate, which the files repeat in their heads.
			args := []string{"run", main, "-out", "../" + files[0], "-stubs", "../" + files[1], "-pkg", "vec"}
			if out, err := command(t.Context(), args...); err != nil {
				t.Fatalf("go %s: %v: %s", strings.Join(args, " "), err, out)
			}
			for _, file := range files {
				got := must.Get(os.ReadFile(filepath.Join(dir, file)))(t)
				want := must.Get(os.ReadFile(filepath.Join(vec, file)))(t)
				if !bytes.Equal(got, want) {
					t.Errorf("%s is not what the generator writes, run go generate", file)
				}
			}
		})
	}
}
