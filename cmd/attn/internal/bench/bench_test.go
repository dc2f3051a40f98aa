package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

type grammar struct {
	Bench   Command `cmd:""`
	Compare Compare `cmd:""`
}

var attn, _, _ = clitest.Named(cli.Program{Name: "attn", Grammar: func() any { return &grammar{} }, Options: []kong.Option{Vars()}})

// benchmark runs attn bench with args and returns what a shell would see.
func benchmark(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	program := cli.Program{Name: "attn", Grammar: func() any { return &grammar{} }, Options: []kong.Option{Vars()}}
	code = program.Run(ctx, append([]string{"bench"}, args...), &out, &err)
	return code, out.String(), err.String()
}

// measured runs attn bench with args, and returns what it prints and its report. An error fails the test.
func measured(t *testing.T, args ...string) (stdout string, r report.Report) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	code, stdout, stderr := benchmark(t.Context(), append(args, "--json", path)...)
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d: %s%s", code, stdout, stderr)
	}
	return stdout, decoded(t, path)
}

func decoded(t *testing.T, path string) report.Report {
	t.Helper()
	text := clitest.ReadFile(t, path)
	strict := json.NewDecoder(bytes.NewReader(text))
	strict.DisallowUnknownFields()
	var r report.Report
	must.Do(t, strict.Decode(&r))
	return r
}

// TestBenchPage: a run leaves the page.
func TestBenchPage(t *testing.T) {
	dir := t.TempDir()
	code, _, stderr := benchmark(t.Context(), "--seq", "64,128", "--heads", "1", "--backend", "cpu", "--threads", "1",
		"--html", dir+"/r.html")
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	text := clitest.ReadFile(t, dir+"/r.html")
	clitest.Contains(t, string(text), "2 of 2 cases measured", "attn bench --seq 64,128 --heads 1 --backend cpu --threads 1", "<svg ")
	code, stdout, stderr := benchmark(t.Context(), "--seq", "64", "--html", dir)
	clitest.WantFailure(t, code, stdout, stderr, "is not a regular file")
}

func TestBenchOnTheCPU(t *testing.T) {
	out, r := measured(t, "--seq", "256", "--heads", "1", "--backend", "cpu", "--threads", "1")
	clitest.Contains(t, out, "attn bench · ", "B=1 H=1 D=64 f32", "cpu · ", "1 thread", "      256  ", "   ok")
	if len(r.Cases) != 1 || r.Cases[0].Status != report.OK || r.Cases[0].Threads != 1 || r.Cases[0].SeqQ != 256 || r.Cases[0].MedianS == nil {
		t.Errorf("%+v", r.Cases)
	}
	if r.Environment.BudgetS != 0 {
		t.Errorf("lengths that were asked for have no budget unless one is given, got %v s", r.Environment.BudgetS)
	}
}

func TestBenchOptionsReachTheCases(t *testing.T) {
	_, r := measured(t, "--seq", "16..32", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--dim", "8",
		"--causal", "--dtype", "bf16", "--backend", "cpu,cpu", "--budget", "10s", "--rounds", "2")
	if len(r.Cases) != 2 || r.Environment.BudgetS != 10 {
		t.Fatalf("one backend named twice has two lengths: %+v", r)
	}
	for i, c := range r.Cases {
		if c.SeqQ != 16<<i || c.Batch != 2 || c.Heads != 4 || c.KVHeads != 2 || c.Dim != 8 || !c.Causal || c.DType != "bf16" || len(c.Rounds) != 2 {
			t.Errorf("%+v", c)
		}
	}
}

func TestBenchRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		why, want string
		args      []string
	}{
		{"no length", "--seq: sequence length \"0\"", []string{"--seq", "0"}},
		{"a word", "--seq: sequence length \"abc\" is not a number", []string{"--seq", "abc"}},
		{"a range that runs backwards", "reverse order", []string{"--seq", "4k..256"}},
		{"no queries", "--seq-q is 0", []string{"--seq-q", "0"}},
		{"half a window", "--window", []string{"--window", "3"}},
		{"a negative window", "--window", []string{"--window=-1,0"}},
		{"a negative softcap", "softcap is -1", []string{"--softcap=-1"}},
		{"a softcap that is not a number", "softcap is NaN", []string{"--softcap", "NaN"}},
		{"no head size", "--dim is 0", []string{"--dim", "0"}},
		{"a negative head size", "--dim is -3", []string{"--dim=-3"}},
		{"no heads", "--heads is 0", []string{"--heads", "0"}},
		{"no kv heads", "--kv-heads is 0", []string{"--kv-heads", "0"}},
		{"no batch", "--batch is 0", []string{"--batch", "0"}},
		{"kv heads that do not divide", "kv-heads must divide heads", []string{"--heads", "8", "--kv-heads", "3"}},
		{"an unknown type", "--dtype is \"f64\"", []string{"--dtype", "f64"}},
		{"a mask type", "--dtype is \"bool\"", []string{"--dtype", "bool"}},
		{"an unknown backend", "--backend: backend \"tpu\" is unknown", []string{"--backend", "tpu"}},
		{"an unknown backend next to a known one", "backend \"tpu\" is unknown", []string{"--backend", "cpu,tpu"}},
		{"a plan of an unknown backend", "backend \"tpu\" is unknown", []string{"--plan", "--backend", "cpu,tpu"}},
		{"no device memory", "--device-memory", []string{"--device-memory", "0"}},
		{"device memory of another unit", "is not a size", []string{"--device-memory", "2T"}},
		{"too much device memory", "is not a size", []string{"--device-memory", "9000000000G"}},
		{"an unknown preset", "it must be one of quick, long", []string{"--preset", "fast"}},
		{"a preset and a length", "--preset replaces the flags", []string{"--preset", "quick", "--seq", "256"}},
		{"a preset and an option", "--preset replaces the flags", []string{"--preset", "quick", "--causal"}},
		{"an unknown variant", "--variant is \"fast\"", []string{"--variant", "fast"}},
		{"the same series twice", "there are two series", []string{"--dim", "64,64"}},
		{"a folder as the table", "is not a regular file", []string{"--markdown", dir}},
		{"no folder for the lines", "does not exist", []string{"--gobench", filepath.Join(dir, "absent", "r")}},
		{"negative threads", "--threads is -1", []string{"--threads=-1"}},
		{"more threads than memory", "it must be 1 to 4096", []string{"--threads=9223372036854775807"}},
		{"negative rounds", "rounds is -1", []string{"--rounds=-1"}},
		{"a negative budget", "budget is -1s", []string{"--budget=-1s"}},
		{"no value", "--seq: a value is missing", []string{"--seq"}},
		{"a budget without a unit", "--budget: expected a duration such as 90s or 5m", []string{"--budget", "10"}},
		{"a folder that does not exist", "does not exist", []string{"--json", filepath.Join(dir, "absent", "r.json")}},
		{"a folder as the file", "is not a regular file", []string{"--json", dir}},
		{"two reports in one file", "--json names the same file", []string{"--json", filepath.Join(dir, "r"), "--html", filepath.Join(dir, ".", "r")}},
		{"too large to count", "too large", []string{"--seq", "1024M", "--heads", "1000000000", "--dim", "1000000000"}},
		{"an unknown flag", "unknown flag", []string{"--sequence", "1"}},
	} {
		code, out, stderr := benchmark(t.Context(), tc.args...)
		if code == 0 || out != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, tc.want) {
			t.Errorf("%s: exit code %d, stdout %q, stderr %q, want one line with %q", tc.why, code, out, stderr, tc.want)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("files are left over: %v %v", entries, err)
	}
}

func TestBenchOfDecodingMasksAndWindows(t *testing.T) {
	out, r := measured(t, "--seq", "100", "--seq-q", "3", "--window", "20,inf", "--softcap", "2.5", "--low-precision", "--mask",
		"--heads", "2", "--dim", "64", "--backend", "cpu")
	clitest.Contains(t, out, "q3 window20,inf softcap2.5 low mask")
	c := r.Cases[0]
	if c.SeqQ != 3 || c.SeqK != 100 || *c.WindowLeft != 20 || c.WindowRight != nil || c.Softcap != 2.5 || !c.LowPrecision || c.Mask != "f32" ||
		c.Bound == "" || c.CeilingGBS == nil || c.PercentOfBound == nil {
		t.Errorf("%+v", c)
	}
}

func TestBenchPlans(t *testing.T) {
	out, r := measured(t, "--plan", "--backend", "cpu", "--seq", "256,1M", "--heads", "1", "--window", "100,0")
	clitest.Contains(t, out, "  1048576   fused ", " chunks (")
	if len(r.Cases) != 2 || r.Cases[1].Status != report.NotRun || r.Cases[1].Plan == nil || r.Cases[1].Plan.Chunks < 1 || r.Cases[1].Plan.Cut == "" {
		t.Errorf("%+v", r.Cases)
	}
}

func TestDeviceMemoryIsBounded(t *testing.T) {
	for _, tc := range []struct {
		memory cli.Size
		onHost bool // what stays there has no rate at which the device reads it
	}{{0, false}, {1 << 20, true}} {
		dev, err := (&Command{Memory: tc.memory}).openOne("gpu", 0)
		if err != nil {
			t.Skipf("needs a WebGPU adapter: %v", err)
		}
		defer dev.Close()
		x := must.Get(dev.FromFloat32(t.Context(), kernels.F32, make([]float32, 1<<19), kernels.Shape{1, 1, 1, 1 << 19}))(t)
		defer x.Release()
		rate, err := dev.Backend().(backend.Meter).ReadBandwidth(t.Context(), x)
		if err != nil || (rate == 0) != tc.onHost {
			t.Errorf("of %d bytes: 2 MiB are read at %v B/s, %v", tc.memory, rate, err)
		}
	}
}

// interrupting is a device on which Ctrl-C is pressed in the 60th call, when the warm-up is over.
type interrupting struct {
	backend.Backend
	cancel context.CancelFunc
	calls  int
}

func (b *interrupting) Info() backend.Info {
	info := b.Backend.Info()
	info.Name = "interrupting"
	return info
}

func (b *interrupting) Attention(ctx context.Context, calls ...*backend.Call) error {
	if b.calls++; b.calls == 60 {
		b.cancel()
	}
	return b.Backend.Attention(ctx, calls...)
}

// wrong is a device whose outputs are zeros.
type wrong struct{ backend.Backend }

func (wrong) Attention(context.Context, ...*backend.Call) error { return nil }

// idling is a device that has matrix units for low precision.
type idling struct{ backend.Backend }

func (b idling) Plan(ctx context.Context, calls ...*backend.Call) (backend.Plan, error) {
	plan, err := b.Backend.Plan(ctx, calls...)
	if calls[0].LowPrecision {
		plan.Matrices = 1
	}
	return plan, err
}

// TestIdleMatrixUnits: a line names the option that uses them, unless a case has it.
func TestIdleMatrixUnits(t *testing.T) {
	backend.Register("idling", clitest.OnCPU(func(be backend.Backend) backend.Backend { return idling{be} }))
	for _, low := range []bool{false, true} {
		out, _ := measured(t, "--seq", "8", "--heads", "1", "--backend", "idling", "--dtype", "f16", "--rounds", "1", fmt.Sprintf("--low-precision=%t", low))
		if strings.Contains(out, "leave matrix units idle: --low-precision") == low {
			t.Errorf("--low-precision=%t:\n%s", low, out)
		}
	}
}

func TestBenchWritesWhatItHasWhenInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	backend.Register("interrupting", clitest.OnCPU(func(be backend.Backend) backend.Backend { return &interrupting{Backend: be, cancel: cancel} }))
	path := filepath.Join(t.TempDir(), "report.json")
	code, out, stderr := benchmark(ctx, "--seq", "64,128", "--heads", "1", "--backend", "interrupting", "--json", path)
	if code == 0 || !strings.Contains(stderr, "interrupted with 1 of 2 cases measured") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
	if !strings.Contains(out, "not run: interrupted") || !strings.Contains(out, "ok, interrupted") {
		t.Errorf("the table does not say so:\n%s", out)
	}
	r := decoded(t, path)
	if !r.Interrupted || len(r.Cases) != 2 || r.Cases[0].MedianS == nil || r.Cases[1].MedianS != nil {
		t.Errorf("%+v", r)
	}
}

func TestBenchExitCodeSaysWrong(t *testing.T) {
	backend.Register("wrong", clitest.OnCPU(func(be backend.Backend) backend.Backend { return wrong{be} }))
	path := filepath.Join(t.TempDir(), "report.json")
	code, out, stderr := benchmark(t.Context(), "--seq", "64", "--heads", "1", "--backend", "wrong", "--json", path)
	if code == 0 || !strings.Contains(stderr, "wrong result") || !strings.Contains(out, "WRONG: ") {
		t.Errorf("exit code %d, stderr %q, stdout:\n%s", code, stderr, out)
	}
	if c := decoded(t, path).Cases[0]; c.Status != report.Wrong || c.MedianS != nil || c.GFLOPS != nil {
		t.Errorf("a wrong result has figures: %+v", c)
	}
}

func TestProgressSaysWhatRuns(t *testing.T) {
	p := &bench.Progress{Backend: "cpu", Case: report.Case{SeqK: 4096}, Step: "round 3", Cases: 1, Of: 5}
	if got, want := describe(p), "case 2 of 5 · cpu   S=4096    round 3     "; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	p.Of = 0
	if got, want := describe(p), "case 2 · cpu   S=4096    round 3     "; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestLadderOfTheCPU: a rung for the stages and for each tier of this machine, on the same case, and a report of all.
func TestLadderOfTheCPU(t *testing.T) {
	out, r := measured(t, "--ladder", "--backend", "cpu", "--seq", "16,32", "--heads", "1", "--causal", "--rounds", "1")
	if want := 2 * (1 + len(cpu.Tiers())); len(r.Cases) != want || r.Interrupted {
		t.Fatalf("%d cases, want %d:\n%s", len(r.Cases), want, out)
	}
	for i, m := range r.Cases {
		if m.Status != report.OK || !m.Causal || m.SeqK != 16<<(i%2) || m.Heads != 1 || (m.Variant == report.Stages) != (i < 2) {
			t.Errorf("case %d is %+v", i, m)
		}
		name, _, _ := strings.Cut(m.Series, ": ")
		if i >= 2 && !strings.HasPrefix(m.Plan.Path, name) && !strings.Contains(m.Plan.Path+m.Plan.Why, name) {
			t.Errorf("%s ran %s (%s)", m.Series, m.Plan.Path, m.Plan.Why)
		}
	}
	if strings.Count(out, "times as fast as the rung below") != len(r.Cases)-2 {
		t.Errorf("each rung but the lowest is compared with the one below:\n%s", out)
	}
}

// TestLadderOfTheGPU: the kernel of each rung is the one that it names, or the reason is listed.
func TestLadderOfTheGPU(t *testing.T) {
	if dev, err := openGPU("", 0, false); err != nil {
		t.Skipf("needs a WebGPU adapter: %v", err)
	} else {
		dev.Close()
	}
	out, r := measured(t, "--ladder", "--backend", "gpu", "--seq", "40", "--heads", "1", "--rounds", "1")
	paths := []string{"three stages", "plain WGSL", "register-tiled WGSL", "matrix units WGSL"}
	if len(r.Cases) != len(paths) {
		t.Fatal(out)
	}
	for i, m := range r.Cases {
		ran := strings.Contains(m.Plan.Path, paths[i])
		if (m.Status == report.OK) != ran || !ran && (m.Status != report.NotRun || i < 3 || !strings.Contains(out, m.Note)) {
			t.Errorf("%s: %s, %s, %s\n%s", m.Series, m.Status, m.Plan.Path, m.Note, out)
		}
	}
}

func TestLadderRefuses(t *testing.T) {
	for _, args := range []string{"--preset quick", "--resume x.json", "--variant qk", "--low-precision", "--dim 32,64", "--backend cpu,gpu", "--threads 1,2"} {
		code, out, stderr := benchmark(t.Context(), append(strings.Fields(args), "--ladder")...)
		clitest.WantFailure(t, code, out, stderr, "--ladder takes one case")
	}
	code, out, stderr := benchmark(t.Context(), "--ladder", "--backend", "tpu")
	clitest.WantFailure(t, code, out, stderr, "has no ladder")
}
