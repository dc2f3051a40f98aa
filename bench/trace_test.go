package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// The report contains what a device reports of its calls. Timed repetitions are not traced.
func TestTracesOfDevices(t *testing.T) {
	be := &device{roofed: roofed{fake: fake{name: "gpu:0", delay: 10 * time.Second}, peak: 1e9, read: 1e9}, launch: time.Nanosecond, part: 0.5}
	r := runOn(t, small(32, 48), be)
	c, next := r.Cases[0], r.Cases[1]
	if c.Status != report.OK || c.KernelS == nil || *c.KernelS <= 0 || *c.KernelS > 0.8**c.MedianS || *c.KernelS < 0.2**c.MinS {
		t.Errorf("the device clock counts half of each call of %v s: %+v", *c.MedianS, c.KernelS)
	}
	if c.Compiled != 2 || *c.CompileS != 3 || next.Compiled != 0 || next.CompileS != nil {
		t.Errorf("two kernels were compiled once, for the first case: %d and %d", c.Compiled, next.Compiled)
	}
	if want := int64(3 * 2 * 32 * 4 * 4); c.MovedBytes != want || *c.MoveS != float64(want)/1e9 {
		t.Errorf("%d bytes moved in %v s, want %d at 1 GB/s", c.MovedBytes, *c.MoveS, want)
	}
	if want := int64(4 * 2 * 32 * 4 * 4); c.Memory.Operands != want || c.Memory.DevicePeak == nil || *c.Memory.DevicePeak != 12345 {
		t.Errorf("%+v, the operands take %d bytes", c.Memory, want)
	}
	if c.LaunchS == nil || *c.LaunchS != 1e-9 || c.Plan == nil || c.Plan.FLOPs != c.FLOPs {
		t.Errorf("launch %v, plan %+v", c.LaunchS, c.Plan)
	}
	wantText(t, r.WriteTable, "     time      ±    kernel   GFLOP/s")
	wantText(t, r.WritePage, ">compiling<", ">3.00 s<", ">upload<")
}

func TestPlans(t *testing.T) {
	cfg := small()
	cfg.Series[0].Causal, cfg.Missing = true, []string{"npu · none"}
	r, err := Plans(t.Context(), devices(&fake{name: "cpu"}, &fake{name: "gpu:0"}), cfg)
	if err != nil || len(r.Cases) != 2*len(planSeqs) {
		t.Fatalf("%v, %d plans", err, len(r.Cases))
	}
	c := r.Cases[len(r.Cases)-1]
	if c.Backend != "gpu:0" || c.Status != report.NotRun || c.SeqK != 4096 || c.Plan == nil || c.Plan.Path != "pretended" ||
		c.Plan.Pairs != 2*4096*4097/2 || c.FLOPs != c.Plan.FLOPs || c.MedianS != nil {
		t.Errorf("%+v", c)
	}
	fail(&r.Cases[0], kernels.ErrUnsupported)
	r.Cases[0].Plan = nil
	wantText(t, r.WriteTable, "D=4 f32 causal\n\ncpu · pretended · fake v1 ·", "      256   not run: not supported", "\ngpu:0 · pretended",
		"     4096   pretended\n", "\n            16781312 visible pairs, moves ", "\nnpu · none\n")
	if _, err := Plans(t.Context(), nil, of(Series{Case: report.Case{Dim: -1}})); err == nil {
		t.Error("a negative head size has plans")
	}
}

func TestNoClockNoKernelTime(t *testing.T) {
	be := &device{roofed: roofed{fake: fake{name: "gpu:0"}, peak: 1e12, read: 1e12}, launch: time.Second}
	r := runOn(t, small(16), be)
	c := r.Cases[0]
	if c.Status != report.OK || c.KernelS != nil || c.Bound != report.BoundLaunch || *c.PercentOfBound != 100 / *c.MedianS {
		t.Errorf("kernel %v, bound %q, %v%%", c.KernelS, c.Bound, *c.PercentOfBound)
	}
	var out strings.Builder
	if err := r.WriteTable(&out); err != nil || strings.Contains(out.String(), "kernel   GFLOP/s") || !strings.Contains(out.String(), "1000000 launch") {
		t.Errorf("%v, the table:\n%s", err, &out)
	}
}
