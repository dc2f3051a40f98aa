package bench

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var update = flag.Bool("update", false, "write the table of docs/results")

const resultsFolder = "../../../../docs/results"

// TestResults: the table of docs/results is that of its reports, which attn compare reads. Their names
// are the classes of their machines, and no case is wrong or failed.
func TestResults(t *testing.T) {
	files := must.Get(filepath.Glob(filepath.Join(resultsFolder, "*.json")))(t)
	reports := map[string]report.Report{}
	for _, file := range files {
		r := decoded(t, file)
		class := strings.TrimSuffix(filepath.Base(file), ".json")
		if want := classOf(&r); class != want {
			t.Errorf("%s is of the class %s", file, want)
		}
		must.Pass(t, file, r.Err())
		if code, out, stderr := attn(t, "compare", file, file); code != 0 || !regexp.MustCompile(`\n\d+ cases?: `).MatchString(out) {
			t.Errorf("attn compare %s with itself: exit code %d\n%s%s", file, code, out, stderr)
		}
		reports[class] = r
	}
	readme := filepath.Join(resultsFolder, "README.md")
	text := string(clitest.ReadFile(t, readme))
	const begin, end = "<!-- results: computed -->\n", "<!-- end of results -->"
	head, rest, ok := strings.Cut(text, begin)
	_, tail, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no place for the table", readme)
	}
	want := head + begin + resultsTable(reports) + end + tail
	if *update {
		must.Do(t, os.WriteFile(readme, []byte(want), 0o644))
	} else if text != want {
		t.Errorf("%s is stale: go test ./cmd/attn/internal/bench -run TestResults -update", readme)
	}
}

// classOf returns the class of the machine: that of the first backend of a report.
func classOf(r *report.Report) string {
	word := func(text string) string {
		return strings.ToLower(regexp.MustCompile(`^[A-Za-z0-9]*`).FindString(text))
	}
	if len(r.Environment.Backends) == 0 {
		return ""
	}
	be := r.Environment.Backends[0]
	if strings.HasPrefix(be.Name, "gpu") {
		return "gpu-" + word(be.Device)
	}
	return strings.Join([]string{r.Environment.Arch, word(be.Provider), word(r.Environment.CPU)}, "-")
}

// resultsTable returns the machines, a row for each report, and the cases: GFLOP/s and percent of the
// ceiling that binds.
func resultsTable(reports map[string]report.Report) string {
	if len(reports) == 0 {
		return "\nNo report has been recorded yet.\n\n"
	}
	classes := slices.Sorted(maps.Keys(reports))
	var b strings.Builder
	b.WriteString("\n| class | machine | date | version | command |\n| --- | --- | --- | --- | --- |\n")
	var names []string                        // of the cases, in the order of the reports
	figures := map[string]map[string]string{} // by case and class
	for _, class := range classes {
		r := reports[class]
		e := &r.Environment
		cell := func(text string) string { return strings.ReplaceAll(plain.Line(text), "|", `\|`) }
		variables := slices.DeleteFunc(slices.Clone(e.Variables), func(v string) bool { return !strings.HasPrefix(v, "ATTN_") })
		day, _, _ := strings.Cut(e.Date, "T")
		fmt.Fprintf(&b, "| [%s](%s.json) | %s, %d CPUs, %s/%s, %s | %s | %s | `%s` |\n", class, class, cell(e.CPU), e.CPUs, e.OS, e.Arch, e.GoVersion, day, cell(e.Version),
			cell(strings.Join(append(append(variables, "attn"), e.Args...), " ")))
		for i := range r.Cases {
			m := &r.Cases[i]
			name := m.Name
			if m.Threads > 0 {
				name += fmt.Sprintf("/threads%d", m.Threads)
			}
			if m.Variant != report.Fused {
				name += "/" + m.Variant
			}
			if m.Status != report.OK || m.GFLOPS == nil || m.PercentOfBound == nil {
				continue
			}
			if figures[name] == nil {
				names, figures[name] = append(names, name), map[string]string{}
			}
			figures[name][class] = fmt.Sprintf("%.3g (%.0f%% of %s)", *m.GFLOPS, *m.PercentOfBound, cmp.Or(string(m.Bound), "?"))
		}
	}
	fmt.Fprintf(&b, "\nGFLOP/s, and percent of the ceiling that binds:\n\n| case | %s |\n|%s\n", strings.Join(classes, " | "), strings.Repeat(" --- |", len(classes)+1))
	for _, name := range names {
		fmt.Fprintf(&b, "| `%s` |", name)
		for _, class := range classes {
			fmt.Fprintf(&b, " %s |", figures[name][class])
		}
		b.WriteByte('\n')
	}
	return b.String() + "\n"
}

// TestResultsTable makes the table of two machines.
func TestResultsTable(t *testing.T) {
	one := decoded(t, "../../../../bench/report/testdata/real.json")
	two := decoded(t, "../../../../bench/report/testdata/real.json")
	two.Environment.Variables = []string{"ATTN_CPU_TIER=avx512", "GOMAXPROCS=2"}
	two.Environment.CPU, two.Cases = "Intel(R) Xeon(R)", two.Cases[:1]
	two.Environment.Backends[0].Provider = "avx512 (of avx512, avx2, gonum), gonum blas32"
	three := decoded(t, "../../../../bench/report/testdata/real.json")
	three.Environment.Backends = three.Environment.Backends[1:]
	if a, b, c := classOf(&one), classOf(&two), classOf(&three); a != "amd64-avx2-amd" || b != "amd64-avx512-intel" || c != "gpu-llvmpipe" {
		t.Errorf("classes %s, %s, %s", a, b, c)
	}
	table := resultsTable(map[string]report.Report{"a": one, "b": two})
	clitest.Contains(t, table, "| [a](a.json) | AMD EPYC, 2 CPUs, linux/amd64, go1.26.8 | 2026-11-22 | (devel) | `attn bench --backend cpu --heads 4",
		"| Intel(R) Xeon(R), 2 CPUs,", "| `ATTN_CPU_TIER=avx512 attn bench ", "| case | a | b |\n| --- | --- | --- |\n",
		"/mask/threads2` | 2.33 (3% of ", "/threads2/stages` | 1.61 (2% of ")
	if rows := strings.Count(table, "\n| `f32"); rows != 6 {
		t.Errorf("%d rows:\n%s", rows, table)
	}
}
