package tune

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/cmd/attn/internal/bench"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func grammar() any {
	return &struct {
		Tune  Command       `cmd:""`
		Bench bench.Command `cmd:""`
	}{}
}

var program = cli.Program{Name: "attn", Grammar: grammar, Options: []kong.Option{bench.Vars()}}

var _, mustRun, mustFail = clitest.Named(program)

// TestMain runs the command line in place of the tests in processes that tests start.
func TestMain(m *testing.M) { clitest.Main(m, func() { program.Main(os.Args[1:]) }) }

// TestTune measures a shape. It then shows the kept choice, uses it and clears it.
func TestTune(t *testing.T) {
	clitest.NeedBackend(t, "gpu")
	if runtime.GOOS != "linux" {
		t.Skip("the user's cache folder can be moved on Linux only")
	}
	cache := t.TempDir()
	mustFail(t, "nonesuch", "tune", "--file", filepath.Join(cache, "x.json"), "--backend", "gpu:nonesuch")
	shaders := os.Getenv("MESA_SHADER_CACHE_DIR")
	if shaders == "" { // that of compiled shaders stays
		if dir, err := os.UserCacheDir(); err == nil {
			shaders = dir
		}
	}
	process := func(args ...string) (stdout, stderr string) {
		t.Helper()
		cmd := clitest.Process(args...)
		cmd.Env = append(cmd.Env, "XDG_CACHE_HOME="+cache, "MESA_SHADER_CACHE_DIR="+shaders)
		var out, err bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &err
		if e := cmd.Run(); e != nil {
			t.Fatalf("attn %s: %v, %s", strings.Join(args, " "), e, err.String())
		}
		return out.String(), err.String()
	}
	plan := func() string {
		t.Helper()
		out, _ := process("bench", "--backend", "gpu", "--heads", "1", "--seq", "500", "--dim", "32", "--plan")
		return out
	}
	if out := plan(); !strings.Contains(out, "this shape was not measured") {
		t.Errorf("before: %s", out)
	}
	out, stderr := process("tune", "--dim", "32", "--seq", "300,512")
	row := regexp.MustCompile(`(?m)^  \S+ +[0-9.]+ +[0-9.]+ +[0-9.]+% `)
	if n := len(row.FindAllString(out, -1)); n < 4 || strings.Count(out, "fastest, in use") != 1 || stderr != "" {
		t.Errorf("%d variants were timed:\n%s%s", n, out, stderr)
	}
	path := filepath.Join(cache, "attn", "tuning.json")
	list, err := gpu.ReadTuneFile(path)
	if err != nil || len(list) != 1 || list[0].Peak <= 0 {
		t.Fatalf("the file holds %+v, %v", list, err)
	}
	if out := plan(); !strings.Contains(out, "measured on") {
		t.Errorf("after: %s", out)
	}
	shown, _ := process("tune", "--show")
	if !strings.Contains(shown, list[0].Device.Adapter) || strings.Count(shown, "fastest, in use") != 1 {
		t.Errorf("shown: %s", shown)
	}
	if out, _ := process("tune", "--clear"); !strings.Contains(out, "1 entries removed") {
		t.Errorf("cleared: %s", out)
	}
	if out, _ := process("tune", "--show"); !strings.Contains(out, "no measurements") {
		t.Errorf("shown after: %s", out)
	}
}

// TestTuneFiles shows files that are of no use.
func TestTuneFiles(t *testing.T) {
	for _, c := range []struct{ name, data, says string }{
		{"damaged", `{"format": "attn tuning"`, "damaged"},
		{"foreign", `{"name": "left-pad"}`, "not a tuning file"},
		{"newer", `{"format": "attn tuning", "version": 99}`, "another version"},
	} {
		path := filepath.Join(t.TempDir(), "tuning.json")
		must.Do(t, os.WriteFile(path, []byte(c.data), 0o600))
		mustFail(t, path+" … "+c.says, "tune", "--show", "--file", path)
		must.Fail(t, c.name, must.Err(gpu.ReadTuneFile(path)), kernels.ErrFile)
	}
}
