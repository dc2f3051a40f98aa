package plan

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var update = flag.Bool("update", false, "write the tables of docs/distributed.md")

// tables returns the tables of docs/distributed.md that programs compute, by their names.
func tables(t *testing.T) map[string]string {
	lengths := []struct {
		name string
		s    int
	}{{"1M", 1_000_000}, {"10M", 10_000_000}, {"100M", 100_000_000}}
	var times strings.Builder
	times.WriteString("| S | units | partial results | on 256 workers | efficiency | on 4,096 workers | efficiency |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, l := range lengths {
		p := planned(t, l.s, 1, causal)
		fmt.Fprintf(&times, "| %s | %s | %s |", l.name, thousands(p.Units), cli.SI(float64(p.Partials), "B"))
		for _, workers := range []int{256, 4096} {
			c := planned(t, l.s, workers, causal).On(node(workers))
			fmt.Fprintf(&times, " %s | %.0f%% |", short(c.Units+c.Merge), 100*c.Efficiency)
		}
		times.WriteByte('\n')
	}
	var printed strings.Builder
	must.Do(t, planned(t, 10_000_000, 256, causal).Print(&printed, node(256)))
	return map[string]string{"times": times.String(), "plan": "    " + strings.ReplaceAll(strings.TrimSuffix(printed.String(), "\n"), "\n", "\n    ") + "\n"}
}

// TestDocs: the tables of docs/distributed.md are those that the plan computes now.
func TestDocs(t *testing.T) {
	page := filepath.Join("..", "..", "..", "..", "docs", "distributed.md")
	content := must.Get(os.ReadFile(page))(t)
	text := string(content)
	for name, want := range tables(t) {
		begin, end := fmt.Sprintf("<!-- %s: computed -->\n\n", name), fmt.Sprintf("\n<!-- end of %s -->", name)
		before, rest, ok := strings.Cut(text, begin)
		got, after, ok2 := strings.Cut(rest, end)
		if !ok || !ok2 {
			t.Fatalf("%s has no table %q between %q and %q", page, name, begin, end)
		}
		if got != want && !*update {
			t.Errorf("table %q of %s is\n%s\nwant (go test ./cmd/attn-beam/internal/plan -update)\n%s", name, page, got, want)
		}
		text = before + begin + want + end + after
	}
	if *update {
		must.Do(t, os.WriteFile(page, []byte(text), 0o644))
	}
}

// TestFigures: the figures in the text of docs/distributed.md.
func TestFigures(t *testing.T) {
	p := planned(t, 100_000_000, 1, causal)
	million, cores := planned(t, 1_000_000, 4096, causal), node(4096)
	window := kernels.Options{Causal: true, Window: &kernels.Window{Left: 4095, Right: kernels.Unbounded}}
	for what, x := range map[string][2]float64{
		"FLOP for each byte of partial results":    {p.FLOPs / float64(p.Partials), 32e3},
		"FLOP for each byte that units read":       {p.FLOPs / float64(p.Read), 11e3},
		"partial results of the output":            {float64(p.Partials) / float64(p.Output), 1500},
		"FLOP of a unit of 1M rows on 4,096 cores": {million.FLOPs / float64(million.Units), 0.075 * cores.Speed},
		"speed of 4,096 cores, of that of 256":     {planned(t, 1_000_000, 256, causal).On(node(256)).Units.Seconds() / million.On(cores).Units.Seconds(), 5.6},
	} {
		if math.Abs(x[0]/x[1]-1) > 0.05 {
			t.Errorf("%s: %.4g, the text has %g", what, x[0], x[1])
		}
	}
	if got := planned(t, 10_000_000, 4096, causal).On(cores).Balance; got < 0.999 {
		t.Errorf("10M rows on 4,096 workers: balance %v, the text has 0.999", got)
	}
	for _, c := range []struct {
		s, workers    int
		turns, random float64
	}{{1_000_000, 256, 0.93, 0.7}, {10_000_000, 4096, 0.99, 0.7}} {
		turns, random := placed(sequence(t, c.s, c.workers, causal), c.workers)
		if math.Abs(turns-c.turns) > 0.005 || math.Abs(random-c.random) > 0.05 {
			t.Errorf("%d rows on %d workers: balance %.3f in turns and %.3f at random, the text has %v and %v", c.s, c.workers, turns, random, c.turns, c.random)
		}
	}
	if x := sequence(t, 100_000_000, 1, window); x.Pairs > million.Cut.Pairs {
		t.Errorf("100M rows with a window have %d pairs, 1M without have %d: the text says less", x.Pairs, million.Cut.Pairs)
	}
}

// placed returns the mean load of workers, of the largest one, when they get the units of x in
// advance: in turns, and at random.
func placed(x *cut.Cut, workers int) (turns, random float64) {
	draw := rand.New(rand.NewPCG(1, 2))
	a, b, n := make([]int64, workers), make([]int64, workers), 0
	for _, block := range x.Blocks {
		for _, u := range block.Units() {
			a[n%workers] += u.Pairs
			b[draw.IntN(workers)] += u.Pairs
			n++
		}
	}
	mean := float64(x.Pairs) / float64(workers)
	return mean / float64(slices.Max(a)), mean / float64(slices.Max(b))
}
