package tune

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn/internal/cli/clitest"
)

// TestEmit writes the kernels of some calls and reads them as another program would.
func TestEmit(t *testing.T) {
	t.Setenv("VK_DRIVER_FILES", "/nonexistent") // no device is needed
	for _, c := range []struct {
		args string
		want []string // among the names
	}{
		{"--seq 256 --dim 32,64 --dtype f32,bf16", []string{"flash-032-L-f32-256", "flash-064-M-bf16-256", "flash-064-L-registers-f32-256", "attention-064-f32-256"}},
		{"--seq 256 --dim 64 --causal --alibi --mask", []string{"flash-064-S-f32-causal-mask-alibi-256"}},
		{"--seq 4k --seq-q 1 --heads 32 --kv-heads 8 --dim 128 --q8", []string{"decode-128-r4-f32-q8-1x4096", "splitmerge-128-f32-q8-1x4096"}},
		{"--seq 512 --dim 64 --staged", []string{"matmul-064-qk-L-f32-512", "matmul-064-pv-S-f32-512", "softmax-064-f32-512"}},
	} {
		dir := filepath.Join(t.TempDir(), "new", "folder")
		out := mustRun(t, append([]string{"tune", "--emit", dir}, strings.Fields(c.args)...)...)
		paths, err := filepath.Glob(filepath.Join(dir, "*.json"))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, path := range paths {
			var e emitted
			text, err := os.ReadFile(path)
			if err == nil {
				err = json.Unmarshal(text, &e)
			}
			if err != nil {
				t.Fatal(err)
			}
			base := strings.TrimSuffix(path, ".json")
			names = append(names, e.Name)
			wgsl, err := os.ReadFile(base + ".wgsl")
			spirv, err2 := os.ReadFile(base + ".spv")
			if err := errors.Join(err, err2); err != nil {
				t.Fatal(err)
			}
			if filepath.Base(base) != e.Name || !strings.Contains(out, e.Name+": ") || !strings.Contains(string(wgsl), "fn "+e.Entry+"(") ||
				len(spirv)%4 != 0 || binary.LittleEndian.Uint32(spirv) != 0x07230203 ||
				len(e.Bindings) == 0 || len(e.Uniform) == 0 || e.Groups < 1 || e.Threads < 1 {
				t.Errorf("attn tune %s: %s is %+v, %d bytes of WGSL and %d of SPIR-V", c.args, path, e.Call, len(wgsl), len(spirv))
			}
		}
		for _, name := range c.want {
			if !slices.Contains(names, name) {
				t.Errorf("attn tune %s wrote %q, not %s", c.args, names, name)
			}
		}
		if n := strings.Count(out, "\n"); n != len(names)+1 {
			t.Errorf("attn tune %s: %d lines for %d kernels", c.args, n, len(names))
		}
	}
}

// TestEmitRefuses names what is wrong with the flags and writes nothing.
func TestEmitRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	for _, c := range []struct{ args, says string }{
		{"--causal", "--emit DIR, which is missing"},
		{"--emit DIR --show", "--emit excludes --show"},
		{"--emit DIR --heads 6 --kv-heads 4", "--kv-heads is 4"},
		{"--emit DIR --seq-q -1", "--seq-q is -1"},
		{"--emit DIR --q8 --dim 30", "multiple of 4"},
		{"--emit DIR --q8 --staged", "exclude each other"},
		{"--emit DIR --dim 0", "at least 1"},
		{"--emit DIR --q8 --dim 300", "256"},
	} {
		code, stdout, stderr := attn(t, append([]string{"tune", "--seq", "64"}, strings.Fields(strings.ReplaceAll(c.args, "DIR", dir))...)...)
		clitest.WantFailure(t, code, stdout, stderr, c.says)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		files, _ := os.ReadDir(dir)
		if len(files) > 0 {
			t.Errorf("%d files were written", len(files))
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := attn(t, "tune", "--emit", file, "--seq", "64", "--dim", "32")
	clitest.WantFailure(t, code, stdout, stderr, "--emit")
}
