package bench_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

var (
	pairs      = flag.Int("pairs", 1, "pairs of runs of the same program that BenchmarkPairsOfRuns compares")
	slowedDown = flag.Int("slowed", 1, "further pairs, of which the later run is slowed down")
	shift      = flag.Float64("shift", 5, "percent that the slowed runs take longer")
	load       = flag.Int("load", 0, "processes that compute meanwhile")
	pairPreset = flag.String("pair-preset", "", "preset that they measure; by default three of the cases of ci")
)

// role is the environment variable that makes a process a helper of BenchmarkPairsOfRuns: it
// computes if the value is "load", else it writes a report to the file of that name.
const role = "ATTN_PAIR_ROLE"

// slowed is the CPU backend with calls that take longer by a fraction.
type slowed struct {
	*cpu.Backend
	by float64
}

func (s slowed) Attention(ctx context.Context, calls ...*backend.Call) error {
	begin := time.Now()
	err := s.Backend.Attention(ctx, calls...)
	for end := time.Duration(float64(time.Since(begin)) * (1 + s.by)); time.Since(begin) < end; {
	}
	return err
}

// BenchmarkPairsOfRuns measures pairs of short runs, each in a process of its own, and counts
// the verdicts of report.Compare. It fails if a case of the same program is called slower or
// faster, under -load in more than one of 20 pairs, or if the gate of attn compare --fail-over
// passes for more than one of 10 slowed pairs:
//
//	go test -run '^$' -bench PairsOfRuns -benchtime 1x -timeout 0 ./bench -pairs 40 -slowed 10
//	go test -run '^$' -bench PairsOfRuns -benchtime 1x -timeout 0 ./bench -pairs 40 -slowed 0 -load 4
//
// TestPairsOfRuns of package report asserts the same on simulated machines.
func BenchmarkPairsOfRuns(b *testing.B) {
	switch path := os.Getenv(role); path {
	case "":
	case "load":
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin) // until the benchmark ends
			os.Exit(0)
		}()
		for x := 1.0; ; x = x*0.5 + 1 {
		}
	default:
		measurePair(b, path)
		return
	}
	for range *load {
		c := helper(b, "load", 0)
		stdin, err := c.StdinPipe()
		if err == nil {
			err = c.Start()
		}
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = stdin.Close(); _ = c.Wait() }()
	}
	// The log of a benchmark is cut after ten lines.
	count := func(name string, pairs int, shift float64) (n map[report.Verdict]int, caught int) {
		n = map[report.Verdict]int{}
		for pair := range pairs {
			changes := report.Compare(runApart(b, 0), runApart(b, shift), 4)
			if report.Worst(changes, 0) != nil {
				caught++
			}
			for _, c := range changes {
				n[c.Verdict]++
				fmt.Printf("%s %d: %+.1f%% (%+.1f to %+.1f%%) %s %s\n", name, pair+1, c.Percent, c.Low, c.High, c.Verdict, c.Why)
			}
		}
		fmt.Printf("%s: verdicts %v; the gate fails for %d of %d pairs\n", name, n, caught, pairs)
		return n, caught
	}
	for b.Loop() {
		same, _ := count("same", *pairs, 0)
		wrong, allowed := same[report.Slower]+same[report.Faster], 0
		if *load > 0 {
			allowed = *pairs / 20
		}
		if wrong > allowed {
			b.Errorf("%d verdicts report a change where there is none, of %d pairs", wrong, *pairs)
		}
		later, caught := count("slowed", *slowedDown, *shift)
		if missed := *slowedDown - caught; missed > *slowedDown/10 {
			b.Errorf("%d of %d slowed pairs pass the gate", missed, *slowedDown)
		}
		b.ReportMetric(float64(wrong), "false-verdicts")
		b.ReportMetric(float64(caught), "slowed-pairs-caught")
		b.ReportMetric(float64(later[report.Slower]), "slowed-cases-found")
	}
}

// helper returns the command of a process with a role.
func helper(b *testing.B, does string, shift float64) *exec.Cmd {
	c := exec.CommandContext(b.Context(), os.Args[0], "-test.run=^$", "-test.bench=PairsOfRuns", "-test.benchtime=1x", "-test.timeout=0",
		fmt.Sprint("-shift=", shift), "-pair-preset="+*pairPreset)
	c.Env = append(os.Environ(), role+"="+does)
	return c
}

// runApart returns the report of another process, whose calls take longer by shift percent.
func runApart(b *testing.B, shift float64) *report.Report {
	path := filepath.Join(b.TempDir(), "report.json")
	if out, err := helper(b, path, shift).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	r, err := report.Read(f)
	if err != nil {
		b.Fatal(err)
	}
	return r
}

// measurePair is the process of one report.
func measurePair(b *testing.B, path string) {
	cfg := bench.Config{Budget: 8 * time.Second, Series: []bench.Series{
		{Name: "plain", Seqs: []int{64, 128}, Heads: 4},
		{Name: "decode", Seqs: []int{512}, Heads: 4, KVHeads: 1, SeqQ: 1},
	}}
	if *pairPreset != "" {
		i := slices.IndexFunc(bench.Presets(), func(p bench.Preset) bool { return p.Name == *pairPreset })
		if i < 0 {
			b.Fatalf("there is no preset %q", *pairPreset)
		}
		cfg.Series, cfg.Budget = bench.Presets()[i].Series, bench.Presets()[i].Budget
	}
	be := cpu.New(cpu.Options{Threads: 1})
	defer be.Close()
	r, err := bench.Run(b.Context(), []*kernels.Device{kernels.NewDevice(slowed{be, *shift / 100})}, cfg)
	if err == nil {
		err = r.Err()
	}
	if err != nil {
		b.Fatal(err)
	}
	f, err := os.Create(path)
	if err == nil {
		err = r.WriteJSON(f)
	}
	if err != nil {
		b.Fatal(err)
	}
}
