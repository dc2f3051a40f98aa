package report

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// benchstat reads two files of Go benchmark lines and finds the case that became
// slower, by name.
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
