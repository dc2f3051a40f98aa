package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// sample is a report with a row of every kind.
func sample() *Report {
	f := func(x float64) *float64 { return &x }
	n := func(x int64) *int64 { return &x }
	row := func(name string, seq int) Measurement {
		return Measurement{Backend: name, Series: "plain", Name: fmt.Sprintf("f32/b1h8s%dd64/kv2/causal", seq), Threads: 2,
			Case:  Case{Variant: "fused", DType: "f32", Batch: 1, Heads: 8, KVHeads: 2, SeqQ: seq, SeqK: seq, Dim: 64, Causal: true},
			Rates: Rates{Pairs: int64(seq) * int64(seq) * 4, FLOPs: int64(seq) * int64(seq) * 1024}, Memory: Memory{Operands: int64(seq) * 5120, Scratch: 65536}, Rounds: []Round{}}
	}
	ok := row("cpu", 256)
	ok.Status, ok.Repetitions = OK, 80
	ok.MedianS, ok.MinS, ok.GFLOPS, ok.CeilingGFLOPS = f(0.00123), f(0.0012), f(54.56), f(100.25)
	ok.Bytes, ok.GBS, ok.CeilingGBS, ok.Bound, ok.PercentOfBound = 393216, f(0.3197), f(200.5), BoundFMA, f(54.42)
	ok.LowS, ok.HighS, ok.Confidence, ok.OthersPercent = f(0.00122), f(0.00125), f(96.9), f(12.5)
	ok.Memory.HostPeak = n(2 << 20)
	ok.Rounds = []Round{{TimesS: []float64{0.00122, 0.00124}, PaceS: []float64{3.5e-6, 3.4e-6}, CeilingGFLOPS: f(100.25), CeilingGBS: f(200.5)}}
	ok.StagesS, ok.SpeedupVsStages, ok.Allocs, ok.MaxError, ok.ErrorBound = f(0.00258), f(2.1), n(3), f(6.4e-8), f(7.25e-5)
	large := row("cpu", 65536)
	large.Status, large.Note, large.Repetitions, large.PredictedS = OK, "stages skipped: 128.0 GiB of weights", 3, f(12)
	large.MedianS, large.MinS, large.GFLOPS, large.CeilingGFLOPS = f(10.5), f(10.4), f(104.7), f(99.5)
	large.Bound, large.PercentOfBound = BoundFMA, f(105.2)
	large.Allocs, large.MaxError, large.ErrorBound = n(1234), f(1e-7), f(1e-4)
	read := row("cpu", 32768) // decoding
	read.SeqQ, read.Status, read.Repetitions, read.FLOPs, read.Bytes = 1, OK, 80, 67108864, 33558528
	read.MedianS, read.MinS, read.GFLOPS, read.CeilingGFLOPS = f(0.0008), f(0.0007), f(83.9), f(99.5)
	read.GBS, read.CeilingGBS, read.Bound, read.PercentOfBound = f(41.95), f(45.5), BoundRead, f(92.2)
	read.Allocs, read.MaxError, read.ErrorBound = n(0), f(1e-7), f(1e-4)
	left := 4095
	read.WindowLeft, read.Softcap, read.Mask = &left, 50, "f32"
	skipped := row("cpu", 131072)
	skipped.Status, skipped.Note, skipped.PredictedS = Predicted, "predicted 42.0 s each, 3.20 s of the budget is left", f(42)
	wrong := row("gpu:0", 256)
	wrong.Status, wrong.Note, wrong.Threads = Wrong, "WRONG: o[0,3,17,5] is 1.5, should be 0.25", 0
	wrong.MaxError, wrong.ErrorBound = f(1.25), f(7.25e-5)
	short := row("gpu:0", 64)
	short.Threads, short.Status, short.Repetitions = 0, OK, 100
	short.MedianS, short.MinS, short.KernelS, short.GFLOPS, short.CeilingGFLOPS = f(0.00006), f(0.00005), f(0.000015), f(69.9), f(60000)
	short.Bytes, short.GBS, short.CeilingGBS, short.LaunchS, short.Bound, short.PercentOfBound = 393216, f(6.55), f(3000), f(0.00003), BoundLaunch, f(50)
	short.CompileS, short.Compiled, short.MoveS, short.MovedBytes = f(0.25), 2, f(0.001), 294912
	short.Allocs, short.MaxError, short.ErrorBound = n(9), f(1e-7), f(1e-4)
	short.Memory.DevicePeak = n(400000)
	short.Plan = &kernels.Plan{Backend: "gpu:0", Path: "fused WGSL", Why: "it fits", Pairs: 4096, FLOPs: 4194304, Bytes: 393216, Chunks: 1, Cut: "8 heads",
		Limits: []kernels.Limit{{Name: "binding", Value: 1 << 27}}}
	return &Report{
		Schema: Schema,
		Environment: Environment{Date: "2026-01-02T03:04:05Z", GoVersion: "go1.26.0", OS: "linux", Arch: "amd64", CPU: "Some CPU", CPUs: 4, Threads: 2,
			Version: "v0.1.0-0.20260102030405-0123456789ab+dirty", CGO: true, Seed: 1, Args: []string{"bench", "--causal"}, Variables: []string{"GOMAXPROCS=2"}, CheckedRows: 16, BudgetS: 48,
			Backends: []kernels.Info{
				{Name: "cpu", Device: "Some CPU", Type: kernels.CPU, Provider: "gonum v0.17.0", Threads: 2},
				{Name: "gpu:0", Device: "Some GPU", Type: kernels.Discrete, Provider: "wgpu v1", Driver: "driver 2", Limits: []kernels.Limit{{Name: "binding", Value: 1 << 27}}},
			},
			Missing: []string{"npu · none: no usable device"}},
		Cases: []Measurement{ok, large, read, skipped, short, wrong},
	}
}

// golden compares text with a file in testdata; the environment variable UPDATE_GOLDEN=1 writes it instead.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE_GOLDEN") == "1" {
		must.Do(t, os.MkdirAll("testdata", 0o755))
		must.Do(t, os.WriteFile(path, got, 0o644))
	}
	want := must.Get(os.ReadFile(path))(t)
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// wantText fails the test unless what write writes has all these texts.
func wantText(t *testing.T, write func(io.Writer) error, texts ...string) {
	t.Helper()
	var out strings.Builder
	must.Do(t, write(&out))
	for _, want := range texts {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it lacks %q:\n%s", want, &out)
		}
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	must.Do(t, sample().WriteTable(&out))
	golden(t, "table.golden", out.Bytes())
	for l := range strings.Lines(out.String()) {
		if l != strings.TrimRight(l, " \n")+"\n" {
			t.Errorf("spaces at the end of %q", l)
		}
	}
}

func TestMarkdown(t *testing.T) {
	r := sample()
	r.Cases[1].Note = "a | bar"
	wantText(t, r.WriteMarkdown,
		"| case | device | S | time | ± | kernel | GFLOP/s | GB/s | ceiling | reached | vs stages | ± | memory | error | bound | status |\n| --- | --- |",
		"| plain | cpu | 256 | 1.23 ms | 1.2% | - | 54.6 | 0.32 | 100 fma | 54.4% | 2.10x | - | 2.0 MiB | 6.4e-08 | 7.3e-05 | ok, noisy: ",
		"| 1.0e-07 | 1.0e-04 | ok, a / bar |\n",
		"| plain | gpu:0 | 64 | 60.0 µs | - | 15.0 µs | 69.9 | 6.55 | 30.0 launch | 50.0% | - | - | 390.6 KiB | 1.0e-07 | 1.0e-04 | ok |\n",
	)
}

func TestNumbersForPeople(t *testing.T) {
	for _, tc := range []struct{ got, want string }{
		{format.Duration(0), "0 ns"}, {format.Duration(1.234e-7), "123 ns"}, {format.Duration(9.996e-7), "1.00 µs"},
		{format.Duration(1.5e-5), "15.0 µs"}, {format.Duration(0.9996), "1.00 s"}, {format.Duration(0.0123), "12.3 ms"}, {format.Duration(75), "75.0 s"}, {format.Duration(1234.5), "1234 s"},
		{format.Size(0), "0.0 B"}, {format.Size(1536), "1.5 KiB"}, {format.Size(128 << 30), "128.0 GiB"},
		{format.Number(0.5), "0.50"}, {format.Number(9.996), "10.0"}, {format.Number(99.96), "100"},
		{format.Count(1, "thread"), "1 thread"}, {format.Count(0, "thread"), "0 threads"},
		{deviation.show(nil), "-"},
	} {
		if tc.got != tc.want {
			t.Errorf("%q, want %q", tc.got, tc.want)
		}
	}
}

// Other programs read these: names may be added, none may go or change.
func TestJSONHoldsEveryField(t *testing.T) {
	var b bytes.Buffer
	must.Do(t, sample().WriteJSON(&b))
	text := b.Bytes()
	golden(t, "report.golden.json", text)

	strict := json.NewDecoder(bytes.NewReader(text))
	strict.DisallowUnknownFields()
	var back Report
	must.Do(t, strict.Decode(&back))
	if diff := cmp.Diff(sample(), &back); diff != "" {
		t.Errorf("a report does not come back as it was (-want +got):\n%s", diff)
	}
}

func TestFiguresThatJSONCannotHoldAreNull(t *testing.T) {
	for _, x := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		if Figure(x) != nil {
			t.Errorf("%v would end the writing of a report", x)
		}
	}
}

func TestReportErr(t *testing.T) {
	rows := func(s ...Status) *Report {
		r := &Report{}
		for _, s := range s {
			r.Cases = append(r.Cases, Measurement{Backend: "cpu", Case: Case{SeqK: 256}, Status: s, Note: "why"})
		}
		return r
	}
	stopped := rows(OK, NotRun)
	stopped.Interrupted = true
	stoppedWrong := rows(OK, Wrong, NotRun)
	stoppedWrong.Interrupted = true
	for _, tc := range []struct {
		r    *Report
		want string
	}{
		{rows(OK, OK), ""},
		{rows(OK, NotRun), ""},
		{rows(OK, Failed, Wrong), "1 of 3 cases give a wrong result, the first is cpu at S = 256"},
		{rows(Failed, OK), "1 of 2 cases failed, the first is cpu at S = 256: why"},
		{stopped, "interrupted with 1 of 2 cases measured"},
		{stoppedWrong, "interrupted with 1 of 3 cases measured and 1 wrong"},
		{rows(NotRun), "no case was measured, cpu at S = 256: why"},
		{rows(), "no case was measured: there is no backend"},
	} {
		got := ""
		if err := tc.r.Err(); err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("%q, want %q", got, tc.want)
		}
	}
}

func TestEnvironmentOfThisMachine(t *testing.T) {
	e := ThisMachine(time.Unix(0, 0))
	if e.Date != "1970-01-01T00:00:00Z" || e.CPU == "" || e.CPUs < 1 || e.Threads < 1 || e.GoVersion == "" || e.Backends == nil || e.Missing == nil {
		t.Errorf("%+v", e)
	}
}

func TestVersionIsThisModules(t *testing.T) {
	settings := []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}, {Key: "CGO_ENABLED", Value: "1"}}
	var own, other Environment
	own.readBuild(&debug.BuildInfo{Main: debug.Module{Path: modulePath, Version: "v1"}, Settings: settings})
	if own.Version != "v1" || !own.CGO {
		t.Errorf("%+v", own)
	}
	other.readBuild(&debug.BuildInfo{Main: debug.Module{Path: "example.com/p", Version: "v1"}, Deps: []*debug.Module{{Path: modulePath, Version: "v2"}}})
	if other.Version != "v2" || other.CGO {
		t.Errorf("as a library: %+v", other)
	}
}

func TestReadRefuses(t *testing.T) {
	for name, text := range map[string]string{"no JSON": "abc", "another thing": "{}", "an older form": `{"schema": 1}`, "a newer form": `{"schema": 99}`, "half a file": `{"schema": 4, "cases": [`,
		"no median": `{"schema": 4, "cases": [{"status": "ok", "rounds": [{"times_s": [1]}]}]}`, "no rounds": `{"schema": 4, "cases": [{"status": "ok", "median_s": 1}]}`,
		"no time": `{"schema": 4, "cases": [{"status": "ok", "median_s": 1, "rounds": [{"times_s": [0]}]}]}`} {
		if r, err := Read(strings.NewReader(text)); !errors.Is(err, kernels.ErrFile) {
			t.Errorf("%s: %v %v", name, r, err)
		}
	}
	must.Fail(t, "a file that cannot be read", must.Err(Read(iotest.ErrReader(os.ErrPermission))), os.ErrPermission)
}

func TestBound(t *testing.T) {
	for _, tc := range []struct {
		why          string
		flops, bytes int64
		peak, read   float64
		launch       float64
		want         Bound
	}{
		{"prefill", 1e9, 1e6, 100e9, 10e9, 1e-5, BoundFMA},
		{"decoding", 1e6, 1e6, 100e9, 10e9, 1e-5, BoundRead},
		{"both at once", 10e6, 1e6, 100e9, 10e9, 0, BoundFMA},
		{"a short call", 1e6, 1e6, 100e9, 10e9, 1e-3, BoundLaunch},
		{"a short call, no bandwidth", 1e6, 1e6, 100e9, 0, 1e-3, BoundLaunch},
		{"no bandwidth", 1e6, 1e6, 100e9, 0, 0, BoundFMA},
		{"no peak", 1e6, 1e6, 0, 10e9, 1e-3, ""},
		{"nothing", 1e6, 1e6, 0, 0, 0, ""},
	} {
		m := Measurement{Rates: Rates{FLOPs: tc.flops, Bytes: tc.bytes, CeilingGFLOPS: Positive(tc.peak / 1e9), CeilingGBS: Positive(tc.read / 1e9), LaunchS: Positive(tc.launch)}}
		if m.findBound(); m.Bound != tc.want {
			t.Errorf("%s: %q, want %q", tc.why, m.Bound, tc.want)
		}
	}
}

// The interval of the comparison with the stages is that of the ratios in the rounds, from which load that
// slows both down cancels.
func TestStagesInterval(t *testing.T) {
	m := sample().Cases[0]
	m.Rounds = nil
	for i, ratio := range []float64{2, 2.1, 1.9, 2.2, 1.8, 2.05} {
		call := 1e-3 * float64(1+i) // ever slower
		m.Rounds = append(m.Rounds, Round{TimesS: []float64{call}, StagesS: Figure(call * ratio)})
	}
	m.Derive()
	want := 50 * (2.2 - 1.8) / 2.025 // six values cover the median between the smallest and the largest
	if m.StagesPercent == nil || math.Abs(*m.StagesPercent-want) > 1e-9 {
		t.Errorf("%v, want %v", m.StagesPercent, want)
	}
	m.Rounds = m.Rounds[1:]
	if m.Derive(); m.StagesPercent != nil {
		t.Errorf("five rounds: %v, want none", *m.StagesPercent)
	}
}

// benchstat reads two files of Go benchmark lines and finds the case that became slower, by name.
func TestBenchstatReadsGoBench(t *testing.T) {
	if testing.Short() {
		t.Skip("builds benchstat")
	}
	dir := t.TempDir()
	write := func(name string, factor float64) string {
		r := sample()
		c := &r.Cases[0]
		c.Rounds = nil
		for i := range 10 {
			x := 0.0012 * factor * (1 + 0.001*float64(i))
			c.Rounds = append(c.Rounds, Round{TimesS: []float64{x, x}, CeilingGFLOPS: c.CeilingGFLOPS})
		}
		path := filepath.Join(dir, name)
		f := must.Get(os.Create(path))(t)
		must.Do(t, errors.Join(r.WriteGoBench(f), f.Close()))
		return path
	}
	out, err := exec.CommandContext(t.Context(), "go", "tool", "benchstat", write("old", 1), write("new", 1.1)).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{
		`cpu: Some CPU`, `goos: linux`, `device: cpu · Some CPU · gonum v0\.17\.0`,
		`Attention/backend=cpu/variant=fused/f32/b1h8s256d64/kv2/causal-2 +1\.20\dm ± 0% +1\.3[12]\dm ± 0% +\+10\.\d+% \(p=0\.000 n=10\)`,
		`GFLOP/s`, `%ceiling`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("benchstat does not print %q:\n%s", want, out)
		}
	}
}

// What was not measured, or is wrong, has no line.
func TestGoBenchLines(t *testing.T) {
	r := sample()
	for i := range r.Cases {
		r.Cases[i].Rounds = []Round{{TimesS: []float64{0.002}, CeilingGBS: new(45.5), LaunchS: new(1e-3)}}
	}
	var text strings.Builder
	must.Do(t, r.WriteGoBench(&text))
	var lines []string
	for l := range strings.Lines(text.String()) {
		if strings.HasPrefix(l, "Benchmark") {
			lines = append(lines, strings.TrimSpace(l))
		}
	}
	want := []string{
		"BenchmarkAttention/backend=cpu/variant=fused/f32/b1h8s256d64/kv2/causal-2 1 2000000.0 ns/op 33.5544 GFLOP/s 0.196608 GB/s 3 allocs/op",
		"BenchmarkAttention/backend=cpu/variant=fused/f32/b1h8s65536d64/kv2/causal-2 1 2000000.0 ns/op 2.19902e+06 GFLOP/s 0 GB/s 1234 allocs/op",
		"BenchmarkAttention/backend=cpu/variant=fused/f32/b1h8s32768d64/kv2/causal-2 1 2000000.0 ns/op 33.5544 GFLOP/s 16.7793 GB/s 36.8775 %ceiling 0 allocs/op",
		"BenchmarkAttention/backend=gpu:0/variant=fused/f32/b1h8s64d64/kv2/causal 1 2000000.0 ns/op 2.09715 GFLOP/s 0.196608 GB/s 50 %ceiling 9 allocs/op",
	}
	if strings.Join(lines, "\n") != strings.Join(want, "\n") {
		t.Errorf("the lines are\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
}
