package bench

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cpu"
)

// TestLadderOfTheCPU: a rung for the stages and for each tier of this machine, on the same case, and a report of all.
func TestLadderOfTheCPU(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.json")
	code, out, stderr := benchmark(t.Context(), "--ladder", "--backend", "cpu", "--seq", "16,32", "--heads", "1", "--causal", "--rounds", "1", "--json", path)
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	r := decoded(t, path)
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
	path := filepath.Join(t.TempDir(), "r.json")
	code, out, stderr := benchmark(t.Context(), "--ladder", "--backend", "gpu", "--seq", "40", "--heads", "1", "--rounds", "1", "--json", path)
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	r := decoded(t, path)
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
