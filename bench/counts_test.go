package bench

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// counted are the counts of a case by a loop over every pair, with the visibility rule of the documentation.
type counted struct{ pairs, flops, bytes, operands, square int64 }

func countByLoop(d report.Case) counted {
	size := int64(report.DTypes[d.DType].Size())
	var n counted
	for range d.Batch {
		seen := map[[2]int]bool{} // kv head and key
		for h := range d.Heads {
			kv := h / (d.Heads / d.KVHeads)
			for i := range d.SeqQ {
				n.operands += int64(2*d.Dim) * size // a row of Q and of O
				at := i + d.SeqK - d.SeqQ           // the row's own position: the last row is at the last key
				for j := range d.SeqK {
					visible := true
					if d.Causal && j > at {
						visible = false
					}
					if l, r := d.WindowLeft, d.WindowRight; l != nil && j < at-*l || r != nil && j > at+*r {
						visible = false
					}
					pair := int64(4 * d.Dim) // a multiplication and an addition for each element of K, and of V
					if visible {
						n.pairs++
						n.flops += pair
						seen[[2]int{kv, j}] = true
					}
				}
			}
		}
		n.bytes += int64(len(seen)) * int64(2*d.Dim) * size
		n.operands += int64(d.KVHeads*d.SeqK*(2*d.Dim)) * size
		n.bytes += int64(d.Heads*d.SeqQ*(2*d.Dim)) * size
	}
	if d.Mask != "" {
		n.bytes += int64(d.SeqQ*d.SeqK) * 4
		n.square += int64(d.SeqQ*d.SeqK) * 4
	}
	return n
}

// Operations, bytes and memory equal those of a loop over the visibility rule, for plans of the CPU backend.
func TestCountsAreThoseOfALoop(t *testing.T) {
	be := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer be.Close()
	n := 0
	for _, dims := range []report.Case{
		{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 1, SeqK: 1, Dim: 1},
		{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 17, SeqK: 17, Dim: 3},
		{Batch: 1, Heads: 3, KVHeads: 1, SeqQ: 5, SeqK: 23, Dim: 8},
		{Batch: 3, Heads: 2, KVHeads: 2, SeqQ: 1, SeqK: 40, Dim: 4},
		{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 9, SeqK: 4, Dim: 2},
	} {
		for _, w := range [][2]*int{{}, {new(0), new(0)}, {new(3), new(0)}, {new(0), new(2)}, {new(6), new(5)}, {nil, new(1)}, {new(2), nil}, {new(100), new(100)}} {
			for _, causal := range []bool{false, true} {
				for _, dtype := range []string{"f32", "bf16"} {
					c := call{dims}
					c.Variant, c.DType, c.Causal, c.WindowLeft, c.WindowRight = report.Fused, dtype, causal, w[0], w[1]
					if n%3 == 0 {
						c.Mask = "f32"
					}
					n++
					m := must.Get(planned(t.Context(), be, "", c))(t)
					want := countByLoop(c.Case)
					got := counted{m.Pairs, m.FLOPs, m.Bytes, m.Memory.Operands, m.Memory.Square}
					if got != want {
						t.Errorf("%s: %+v, the loop counts %+v", c.Name(), got, want)
					}
					if m.Memory.Scratch != m.Plan.Scratch || m.Memory.Counted() != got.operands+got.square+m.Plan.Scratch {
						t.Errorf("%s: memory %+v, the plan's scratch is %d", c.Name(), m.Memory, m.Plan.Scratch)
					}
				}
			}
		}
	}
}

// A cache stores rows of fewer bytes: in q8 an integer for each element and a float32, in q4 18 bytes for 32
// elements, in fp8 a byte for each. What is measured is within its bound, and the case has another name.
func TestCaches(t *testing.T) {
	be := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer be.Close()
	names := map[string]bool{}
	for _, tc := range []struct {
		cache string
		row   int64
	}{{"", 64 * 4}, {"q8", 64 + 4}, {"q4", 2 * 18}, {"f8", 64}} {
		r := must.Get(Run(t.Context(), []*kernels.Device{be}, Config{Rounds: 1, Series: []Series{
			{Seqs: []int{40}, Case: report.Case{Heads: 4, KVHeads: 2, SeqQ: 8, Cache: tc.cache, WindowLeft: new(3), WindowRight: new(0)}}}}))(t)
		m := r.Cases[0]
		if names[m.Name] = true; m.Status != report.OK || m.MaxError == nil || *m.MaxError > *m.ErrorBound {
			t.Errorf("%q: %v %v", tc.cache, m.Status, m.Note)
		}
		q := int64(4 * 8 * 64 * 4)
		if want := 2*q + 2*2*(8+3)*tc.row; m.Bytes != want { // the rows see 11 keys
			t.Errorf("%q moves %d bytes, want %d", tc.cache, m.Bytes, want)
		}
	}
	if len(names) != 4 {
		t.Errorf("the names are %v", names)
	}
}

// The stages compute every pair and store the scores.
func TestCountsOfStages(t *testing.T) {
	c := call{report.Case{DType: "bf16", Causal: true, Mask: "f32", Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 3, SeqK: 5, Dim: 7}}
	const (
		all  = 2 * 4 * 3 * 5
		seen = 2 * 4 * (3 + 4 + 5)
		q    = 2 * 4 * 3 * 7 * 2
		k    = 2 * 2 * 5 * 7 * 2
		mask = 3 * 5 * 4
	)
	for _, tc := range []struct {
		variant              string
		flops, bytes, square int64
	}{
		{report.QK, all * 14, q + k + 4*all, mask + 4*all},
		{report.Softmax, 0, 2*4*all + mask, mask + 4*all},
		{report.PV, all * 14, q + k + 4*all, mask + 4*all},
		{report.Stages, seen * 28, 2*q + 2*k + mask + 4*4*all, mask + 4*all},
		{report.Fused, seen * 28, 2*q + 2*k + mask, mask},
	} {
		c.Variant = tc.variant
		m := c.row("", kernels.Info{})
		m.Plan = &kernels.Plan{Scratch: 5}
		m.Derive()
		if got, want := fmt.Sprint(m.FLOPs, m.Bytes, m.Memory.Square), fmt.Sprint(tc.flops, tc.bytes, tc.square); got != want {
			t.Errorf("%s: operations, bytes, memory %s, want %s", tc.variant, got, want)
		}
		if m := m.Memory; m.Scratch != 5 || m.Operands != 2*q+2*k {
			t.Errorf("%s: %+v", tc.variant, m)
		}
	}
}

func TestPercentOfTheLimitingCeiling(t *testing.T) {
	for _, tc := range []struct {
		seqQ     int
		matrices bool
		want     report.Bound
	}{
		{0, false, report.BoundFMA},   // 32 queries: 8 operations a byte
		{1, false, report.BoundRead},  // half an operation a byte
		{0, true, report.BoundMatrix}, // three products for one
	} {
		be := &roofed{fake: fake{name: "cpu"}, peak: 4e9, read: 2e9}
		cfg := small(32)
		cfg.Series[0].SeqQ, cfg.Series[0].LowPrecision = tc.seqQ, tc.matrices
		r := runOn(t, cfg, be)
		c := r.Cases[0]
		if c.Status != report.OK || c.Bound != tc.want || c.PercentOfBound == nil || c.CeilingGBS == nil || *c.CeilingGBS != 2 || *c.CeilingGFLOPS != 4 {
			t.Fatalf("Sq=%d: bound by %q, want %q: %+v", c.SeqQ, c.Bound, tc.want, c)
		}
		// Heads 2, D 4, f32: q and o, k and v.
		if want := int64(2 * 4 * 4 * (2*c.SeqQ + 2*32)); c.Bytes != want {
			t.Errorf("Sq=%d: %d bytes, want %d", c.SeqQ, c.Bytes, want)
		}
		if want := c.Bytes - int64(2*4*4*c.SeqQ); be.asked != want {
			t.Errorf("Sq=%d: the ceiling read %d bytes, the call reads %d", c.SeqQ, be.asked, want)
		}
		want, unit := 100**c.GFLOPS/4, " fma"
		switch c.Bound {
		case report.BoundRead:
			want, unit = 100**c.GBS/2, " read"
		case report.BoundMatrix:
			unit = " matrix"
		}
		if got := *c.PercentOfBound; got < want*(1-1e-12) || got > want*(1+1e-12) {
			t.Errorf("Sq=%d: %v%% of what binds, want %v", c.SeqQ, got, want)
		}
		wantText(t, r.WriteTable, unit+" ")
	}
}

// Every option reaches the call, whose rows are checked in float64 with the same options, and the report.
func TestOptionsOfACase(t *testing.T) {
	be := &roofed{fake: fake{name: "cpu"}, peak: 1e9, read: 1e9}
	cfg := small(48)
	cfg.Series[0].SeqQ, cfg.Series[0].WindowLeft, cfg.Series[0].Softcap, cfg.Series[0].Mask, cfg.Series[0].KVHeads = 4, new(8), 1.5, "f32", 1
	r := runOn(t, cfg, be)
	c := r.Cases[0]
	if c.Status != report.OK || c.SeqQ != 4 || c.SeqK != 48 || c.WindowLeft == nil || *c.WindowLeft != 8 || c.WindowRight != nil || c.Softcap != 1.5 || c.Mask != "f32" {
		t.Fatalf("%+v", c)
	}
	// Rows are at keys 44 to 47 and see from 8 keys before: 12, 11, 10, 9 keys,
	// which are 12 in all; the mask is 4 x 48.
	if want := int64(2 * (12 + 11 + 10 + 9) * 4 * 4); c.FLOPs != want {
		t.Errorf("%d FLOPs, want %d", c.FLOPs, want)
	}
	if want := int64(4 * (2*2*4*4 + 2*12*4 + 4*48)); c.Bytes != want {
		t.Errorf("%d bytes, want %d", c.Bytes, want)
	}
	if want := c.Bytes - 4*2*4*4; be.asked != want {
		t.Errorf("the ceiling read %d bytes, the call reads %d", be.asked, want)
	}
	wantText(t, r.WriteTable, "D=4 f32 kv1 q4 window8,inf softcap1.5 mask\n")
}

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
