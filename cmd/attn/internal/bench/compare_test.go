package bench

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// steady writes a report with times of calls that vary by 1%, as on a quiet machine, multiplied by factor.
func steady(t *testing.T, r report.Report, factor float64) (path string) {
	t.Helper()
	for i := range r.Cases {
		for j := range r.Cases[i].Rounds {
			round := &r.Cases[i].Rounds[j]
			for k := range round.TimesS {
				round.TimesS[k] = 1e-5 * (1 + 0.01*float64(k%5)) * factor
			}
			for k := range round.PaceS {
				round.PaceS[k] = 1e-5
			}
		}
		r.Cases[i].OthersPercent = nil
		r.Cases[i].Derive()
	}
	path = filepath.Join(t.TempDir(), "steady.json")
	must.Do(t, output.Write(t.Context(), path, r.WriteJSON))
	return path
}

func TestCompare(t *testing.T) {
	_, r := measured(t, "--seq", "64", "--heads", "1", "--backend", "cpu", "--threads", "1")
	path, twice := steady(t, r, 1), steady(t, r, 2)
	for _, tc := range []struct {
		why, want string
		code      int
		args      []string
	}{
		{"the same report", "1 case: 1 same", 0, []string{path, path, "--fail-over", "5%"}},
		{"slower, and nothing depends on it", "1 case: 1 slower", 0, []string{path, twice}},
		{"slower", "1 case: 1 slower", 1, []string{path, twice, "--fail-over", "5%"}},
		{"slower by less than the gate", "1 case: 1 slower", 0, []string{path, twice, "--fail-over", "150"}},
		{"faster", "1 case: 1 faster", 0, []string{twice, path, "--fail-over=5%"}},
		{"less than what is looked for", "1 case: 1 same", 0, []string{path, steady(t, r, 1.05), "--percent", "10%", "--fail-over", "1%"}},
	} {
		code, out, stderr := attn(t, append([]string{"compare"}, tc.args...)...)
		if code != tc.code || !strings.Contains(out, tc.want) || (code != 0) != strings.Contains(stderr, "% slower, which is over 5%") {
			t.Errorf("%s: exit code %d, want %d\n%s%s", tc.why, code, tc.code, out, stderr)
		}
	}

	wrong := decoded(t, path)
	wrong.Cases[0].Status, wrong.Cases[0].Note, wrong.Cases[0].Rounds = report.Wrong, "WRONG: o[0,0,0,0]", nil
	wrong.Cases[0].Derive()
	broken := filepath.Join(t.TempDir(), "broken.json")
	must.Do(t, output.Write(t.Context(), broken, wrong.WriteJSON))
	code, out, stderr := attn(t, "compare", path, broken)
	if code != 1 || !strings.Contains(out, "1 broken") || !strings.Contains(stderr, "WRONG: o[0,0,0,0]") {
		t.Errorf("a case that is wrong now: exit code %d\n%s%s", code, out, stderr)
	}
}

func TestCompareRefuses(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		must.Do(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	empty := write("empty.json", `{"schema": 4}`)
	for _, tc := range []struct {
		why, want string
		args      []string
	}{
		{"one report", "expected \"<new>\"", []string{empty}},
		{"no JSON", "text: this is not a report of attn bench (line 1: invalid character 'a' looking for beginning of value)\n", []string{empty, write("text", "abc")}},
		{"other JSON", "other.json: this is not a report of attn bench (no \"schema\" field)\n", []string{empty, write("other.json", `{"name": "x"}`)}},
		{"a list", "list.json: this is not a report of attn bench (line 2: the text is of type array)\n", []string{write("list.json", "\n[1]"), empty}},
		{"a word instead of a number", "(line 1: cases.seq_k is of type string)\n", []string{write("word.json", `{"schema": 4, "cases": [{"seq_k": "4k"}]}`), empty}},
		{"an older form", "old.json: the report has schema 1, this program reads 4: measure again\n", []string{write("old.json", `{"schema": 1}`), empty}},
		{"no file", "no such file", []string{filepath.Join(dir, "absent"), empty}},
		{"nothing in common", "no measured case in common", []string{empty, empty}},
		{"no percentage", "is not a percentage", []string{empty, empty, "--fail-over", "much"}},
		{"a negative percentage", "is not a percentage", []string{empty, empty, "--percent=-1"}},
	} {
		code, _, stderr := attn(t, append([]string{"compare"}, tc.args...)...)
		if code == 0 || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, tc.want) {
			t.Errorf("%s: exit code %d, stderr %q, want one line with %q", tc.why, code, stderr, tc.want)
		}
	}
}

// A run that was interrupted goes on from its file, into the same file.
func TestBenchResumes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.json")
	args := []string{"--seq", "64,128", "--heads", "1", "--backend", "cpu", "--threads", "1", "--rounds", "3"}
	if code, out, stderr := benchmark(t.Context(), append(args, "--json="+path)...); code != 0 {
		t.Fatalf("exit code %d: %s%s", code, out, stderr)
	}
	first := decoded(t, path)
	if got := strings.Join(first.Environment.Args, " "); got != "bench "+strings.Join(args, " ")+" --json="+path {
		t.Errorf("the report says that it is repeated by %q", got)
	}
	stopped := first
	stopped.Interrupted = true
	stopped.Cases = append([]report.Measurement(nil), first.Cases...)
	stopped.Cases[1].Status, stopped.Cases[1].Rounds = report.NotRun, nil
	stopped.Cases[1].Derive()
	must.Do(t, output.Write(t.Context(), path, stopped.WriteJSON))
	for _, c := range []struct{ want, args string }{
		{path + " is incomplete, its run was interrupted: continue it with attn bench --resume " + path, "compare " + path + " " + path},
		{"which this run would drop: --seq was 64 and is 32 now: give the flags of that run (attn bench --seq 64,128 ", "bench --seq 32 --heads 1 --backend cpu --threads 1 --resume " + path},
	} {
		if code, _, stderr := attn(t, strings.Fields(c.args)...); code == 0 || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit code %d, stderr %q, want %q", c.args, code, stderr, c.want)
		}
	}
	code, out, stderr := benchmark(t.Context(), append(args, "--resume", path)...)
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d: %s%s", code, out, stderr)
	}
	second := decoded(t, path)
	if len(second.Cases) != 2 || !second.Cases[0].Resumed || second.Cases[1].Resumed || second.Interrupted ||
		*second.Cases[0].MedianS != *first.Cases[0].MedianS || second.Cases[1].MedianS == nil {
		t.Errorf("%+v", second)
	}
	for want, args := range map[string][]string{
		"absent: no such file":     {"--resume", path + ".absent"},
		"seed \"1\", this run has": append(args, "--resume", path, "--seed", "2"),
	} {
		if code, _, stderr := benchmark(t.Context(), args...); code == 0 || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d, stderr %q, want %q", args, code, stderr, want)
		}
	}
}

// Each combination of lists is a series, and each number of threads a backend.
func TestBenchSweepsLists(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2)) // 99 threads are 2
	dir := t.TempDir()
	lines, markdown := filepath.Join(dir, "r.txt"), filepath.Join(dir, "r.md")
	out, r := measured(t, "--seq", "32", "--heads", "1,2", "--dim", "16", "--dtype", "f32,bf16", "--threads", "1,2,99", "--backend", "cpu", "--rounds", "3",
		"--gobench", lines, "--markdown", markdown)
	seen := map[string]bool{}
	for _, c := range r.Cases {
		seen[strings.Join([]string{c.Name, string(rune('0' + c.Threads)), string(c.Status)}, " ")] = true
	}
	for _, want := range []string{"f32/b1h1s32d16 1 ok", "f32/b1h2s32d16 1 ok", "bf16/b1h1s32d16 1 ok", "bf16/b1h2s32d16 1 ok",
		"f32/b1h1s32d16 2 ok", "f32/b1h2s32d16 2 ok", "bf16/b1h1s32d16 2 ok", "bf16/b1h2s32d16 2 ok"} {
		if !seen[want] {
			t.Errorf("%q was not measured, of %v", want, seen)
		}
	}
	if len(seen) != 8 || !strings.Contains(out, "\nB=1 H=2 D=16 bf16\n") {
		t.Errorf("%d cases:\n%s", len(seen), out)
	}
	for path, want := range map[string]string{
		lines:    "BenchmarkAttention/backend=cpu/variant=fused/bf16/b1h2s32d16-2 ",
		markdown: "\n| B=1 H=2 D=16 bf16 | cpu | 32 | ",
	} {
		if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%v, %s lacks %q:\n%s", err, path, want, text)
		}
	}
}

// A case that does not fit the budget is predicted, and said.
func TestBenchPredicts(t *testing.T) {
	backend.Register("cpu1", clitest.OnCPU(func(be backend.Backend) backend.Backend { return be }))
	out, r := measured(t, "--seq", "256,1M", "--heads", "1", "--dim", "8", "--backend", "cpu1", "--budget", "20s")
	clitest.Contains(t, out, "  1048576   predicted ", " of the budget is left\n")
	c := r.Cases[1]
	// A million keys and queries are 3.5e13 operations, minutes at the least. Small heads
	// leave memory no reason to refuse them.
	if c.Status != report.Predicted || c.PredictedS == nil || *c.PredictedS < 60 || c.FLOPs != 32<<40 {
		t.Errorf("%+v", c)
	}
}

// A preset brings its cases, and the backends and threads that it is for.
func TestBenchPresets(t *testing.T) {
	out, _ := measured(t, "--preset", "long", "--plan", "--backend", "cpu")
	clitest.Contains(t, out, "\nfull · B=1 ", "\nwindow of 4096 · B=1 ", "\n  1048576   fused ")
	_, r := measured(t, "--preset", "ci", "--plan")
	if len(r.Cases) != 4 {
		t.Errorf("%d cases", len(r.Cases))
	}
	for _, c := range r.Cases {
		if c.Backend != "cpu" || c.Threads != 1 {
			t.Errorf("%s is on %s, %d threads", c.Name, c.Backend, c.Threads)
		}
	}
}
