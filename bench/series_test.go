package bench

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/seed90331342/attn/bench/internal/machine"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func TestPresetsAreWhatTheySay(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range Presets() {
		if seen[p.Name] || p.About == "" || p.Budget <= 0 || len(p.Series) == 0 {
			t.Errorf("%+v", p)
		}
		seen[p.Name] = true
		must.Pass(t, p.Name, (Config{Series: p.Series, Budget: p.Budget}).Check())
		for _, s := range p.Series {
			if s.Name == "" || len(s.Seqs) == 0 {
				t.Errorf("%s: %+v", p.Name, s)
			}
		}
	}
	// Each row of the window of the long preset sees 4096 keys.
	for _, p := range Presets() {
		if p.Name != "long" {
			continue
		}
		s := must.Get(p.Series[1].withDefaults())(t)
		dev := kernels.NewDevice(cpu.New(cpu.Options{}))
		defer dev.Close()
		plan := must.Get(s.at(1<<20).plan(t.Context(), dev))(t)
		if want := int64(s.Heads) * (4096<<20 - 4096*4095/2); plan.Pairs != want {
			t.Errorf("%d pairs are visible, want %d", plan.Pairs, want)
		}
	}
}

func TestSeriesAreRunOneAfterTheOther(t *testing.T) {
	cfg := Config{Series: []Series{
		{Seqs: []int{16, 32}, Case: report.Case{Heads: 2, Dim: 4}},
		{Seqs: []int{16}, Case: report.Case{Heads: 2, Dim: 4, Causal: true}},
		{Name: "few", Seqs: []int{24}, Case: report.Case{SeqQ: 3, Heads: 2, Dim: 4}},
	}}
	r := runOn(t, cfg, &fake{name: "a"}, &fake{name: "b"})
	var got []string
	for _, c := range r.Cases {
		got = append(got, c.Backend+" "+c.Series+" "+c.Name)
	}
	want := []string{"B=1 H=2 D=4 f32 f32/b1h2s16d4", "B=1 H=2 D=4 f32 f32/b1h2s32d4", "B=1 H=2 D=4 f32 causal f32/b1h2s16d4/causal", "few f32/b1h2s24d4/q3"}
	for i, name := range got {
		if name != "ab"[i/4:i/4+1]+" "+want[i%4] {
			t.Errorf("case %d is %q, want %q", i, name, want[i%4])
		}
	}
	wantText(t, r.WriteTable, "· 3 series\n", "\nB=1 H=2 D=4 f32\n", "\nB=1 H=2 D=4 f32 causal\n", "\nfew · B=1 H=2 D=4 f32 q3\n")
	cfg.Series[1] = cfg.Series[0]
	must.Fail(t, "the same series twice", cfg.Check(), kernels.ErrOption, "two series")
}

// Each single stage is timed and checked; a wrong one has no figure.
func TestVariants(t *testing.T) {
	for _, v := range []string{report.Fused, report.Stages, report.QK, report.Softmax, report.PV} {
		cfg := small(24)
		cfg.Series[0].Variant, cfg.Series[0].Causal, cfg.Series[0].Mask, cfg.Series[0].KVHeads = v, true, "f32", 1
		be := &fake{name: "cpu", delay: time.Second}
		c := runOn(t, cfg, be).Cases[0]
		if c.Status != report.OK || c.MedianS == nil || c.Variant != v || (c.GFLOPS == nil) != (v == report.Softmax) || (c.StagesS != nil) != (v == report.Fused) {
			t.Errorf("%s: %+v", v, c)
		}
		if n := be.calls.Load(); (n > 0) != (v == report.Fused) {
			t.Errorf("%s: %d fused calls", v, n)
		}
		if c.StagesS != nil && *c.StagesS != 3*callTime.Seconds() { // no fused call, which takes longer
			t.Errorf("%s: the stages take %v s, should be %v", v, *c.StagesS, 3*callTime.Seconds())
		}
	}
	for _, v := range []string{report.Stages, report.QK, report.Softmax, report.PV} {
		cfg := small(24)
		cfg.Series[0].Variant = v
		if c := runOn(t, cfg, &fake{name: "cpu", wrongStage: v}).Cases[0]; c.Status != report.Wrong || c.MedianS != nil {
			t.Errorf("%s: %+v", v, c)
		}
	}
}

// TestBackward: the backward pass is timed without the forward call, and each of its outputs is
// checked. A backend without gradients is named.
func TestBackward(t *testing.T) {
	cfg := small(24)
	cfg.Series[0].Variant, cfg.Series[0].Causal, cfg.Series[0].Mask, cfg.Series[0].KVHeads = report.Backward, true, "f32", 1
	for _, wrong := range []string{"o", "dq", "dk", "dv"} {
		c := runOn(t, cfg, newDifferentiator(wrong)).Cases[0]
		if c.Status != report.Wrong || c.MedianS != nil || !strings.Contains(c.Note, " "+wrong+"[") {
			t.Errorf("a wrong %s: %+v", wrong, c)
		}
	}
	if err := runOn(t, cfg, &fake{name: "plain"}).Err(); err == nil || !strings.Contains(err.Error(), "plain has no gradients") {
		t.Errorf("a backend without gradients: %v", err)
	}
	be := newDifferentiator("")
	cfg.Series = append(cfg.Series, cfg.Series[0])
	cfg.Series[1].Variant = report.Fused
	r := runOn(t, cfg, be)
	c := r.Cases[0]
	if c.Status != report.OK || c.MedianS == nil || c.StagesS != nil || *c.MedianS != 3*callTime.Seconds() {
		t.Fatalf("%+v", c)
	}
	// 5 products of 2·D operations for each of 2 heads of 1+2+...+24 pairs.
	if want := int64(2 * 300 * 5 * 2 * 4); c.FLOPs != want || c.Plan.FLOPs != want || 2*c.FLOPs != 5*r.Cases[1].FLOPs {
		t.Errorf("%d operations, %d planned, want %d", c.FLOPs, c.Plan.FLOPs, want)
	}
	// Q, dQ, O and dO, K, dK, V and dV, LSE; the mask.
	if want := int64(4*(4*2*24*4+4*24*4+2*24) + 4*24*24); c.Bytes != want || c.Plan.Bytes != want || c.Memory.Operands+c.Memory.Square != want {
		t.Errorf("%d bytes, %d planned, memory %+v, want %d", c.Bytes, c.Plan.Bytes, c.Memory, want)
	}
	wantText(t, r.WriteTable, "f32 kv1 causal mask backward\n")
	wantText(t, r.WritePage, "cpu · B=1 H=2 D=4 f32 kv1 causal mask backward")
	wantText(t, r.WriteGoBench, "/variant=backward/f32/b1h2s24d4/kv1/causal/mask")
	wantText(t, r.WriteJSON, `"variant": "backward"`)
	var file bytes.Buffer
	must.Do(t, r.WriteJSON(&file))
	if _, err := report.Read(&file); err != nil {
		t.Error(err)
	}
}

// TestHostMemoryIsMeasured: the measured memory contains what a call allocates.
func TestHostMemoryIsMeasured(t *testing.T) {
	if machine.Resident() == 0 || !machine.ResetPeak() {
		t.Skip("this system does not report the memory of a process")
	}
	be := &fake{name: "cpu"}
	be.before = func(call int64) error { // 64 MiB, written
		if call > 1 {
			return nil
		}
		held = make([]byte, 64<<20)
		for i := 0; i < len(held); i += 4096 {
			held[i] = 1
		}
		return nil
	}
	c := runOn(t, small(16), be).Cases[0]
	held = nil
	if c.Memory.HostPeak == nil || *c.Memory.HostPeak < 60<<20 || *c.Memory.HostPeak > 512<<20 {
		t.Errorf("calls that take 64 MiB: %+v", c.Memory)
	}
}

// held keeps memory from being collected.
var held []byte

// All goroutines together compute exactly the pieces of a run.
func TestPacer(t *testing.T) {
	for _, threads := range []int{1, 3} {
		p := newPacer(threads, 100e-6)
		if p.pieces < int64(threads) || p.piece() <= 0 {
			t.Errorf("%d threads: %d pieces", threads, p.pieces)
		}
		for range 3 {
			p.run()
			// Each goroutine takes one number too many, which ends its work.
			if n := p.next.Load(); n != p.pieces+int64(threads) {
				t.Errorf("%d threads took %d of %d pieces", threads, n, p.pieces)
			}
		}
		p.close()
	}
}

// A run is as long as a call, within limits.
func TestPacePieces(t *testing.T) {
	for _, tc := range []struct {
		why         string
		threads     int
		call, piece float64
		want        int64
	}{
		{"as long as the call", 2, 2e-3, 4e-6, 500},
		{"the shortest run", 2, 1e-6, 5e-6, 10},
		{"the longest run", 2, 10, 4e-6, 2500},
		{"a piece for each thread", 64, 1e-6, 5e-6, 64},
	} {
		if got := pacePieces(tc.threads, tc.call, tc.piece); got != tc.want {
			t.Errorf("%s: %d pieces, want %d", tc.why, got, tc.want)
		}
	}
}

// The time to make a case precise is a share of what is left.
func TestPatience(t *testing.T) {
	cfg := must.Get(of(Series{Seqs: []int{1024, 2048, 4096, 1 << 20}}).withDefaults())(t)
	synctest.Test(t, func(t *testing.T) { // time stands still
		r := &runner{cfg: cfg, series: &cfg.Series[0]}
		if got := r.patience(1024); !math.IsInf(got, 1) {
			t.Errorf("without a budget: %v s", got)
		}
		if got := (&runner{series: &Series{}}).patience(1024); got != caseSeconds {
			t.Errorf("in a sweep: %v s", got)
		}
		r.seriesEnd = time.Now().Add(100 * time.Second)
		if got := r.patience(1024); got != 20 {
			t.Errorf("100 s for four lengths: %v s, want a fifth", got)
		}
	})
}

func TestParseSeqs(t *testing.T) {
	for _, tc := range []struct {
		list string
		want []int
	}{
		{"256", []int{256}},
		{"1k", []int{1024}},
		{"1K, 2M", []int{1024, 2 << 20}},
		{"4096,256,1k", []int{256, 1024, 4096}},
		{"256..4k", []int{256, 512, 1024, 2048, 4096}},
		{"300..1000", []int{300, 600}},
		{"512..512", []int{512}},
		{"256..1k,512,100", []int{100, 256, 512, 1024}},
	} {
		got, err := ParseSeqs(tc.list)
		if err != nil {
			t.Errorf("%q: %v", tc.list, err)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tc.list, diff)
		}
	}
}

func TestParseSeqsRefuses(t *testing.T) {
	for _, list := range []string{"", "0", "-5", "abc", "k", "256,", "1.5k", "4k..256", "256..", "..256", "2048M", "99999999999999999999", "9999999999999k", "1e3"} {
		got, err := ParseSeqs(list)
		if !errors.Is(err, kernels.ErrOption) {
			t.Errorf("%q gives %v and the error %v, it should be refused as an option", list, got, err)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: the error takes more than a line: %q", list, err)
		}
	}
}

func TestPredictionGrowsWithFLOPs(t *testing.T) {
	var c cost
	if c.predict(1e9) != 0 {
		t.Errorf("without a call there is nothing to predict from, got %v", c.predict(1e9))
	}
	c = cost{seconds: 0.25, weight: 1e9}
	if got := c.predict(4e9); got != 1 {
		t.Errorf("four times the work of 0.25 s is predicted as %v s", got)
	}
}

func TestRounds(t *testing.T) {
	for _, tc := range []struct {
		why         string
		seconds     float64
		rounds, per int
	}{
		{"too short to measure", 0, settleRounds, maxEach},
		{"as many as are useful", 1e-6, settleRounds, maxEach},
		{"fill a round", 0.01, settleRounds, 5},
		{"one is a round", 0.1, settleRounds, 1},
		{"fewer of long ones", 0.6, 4, 1},
		{"never fewer than three", 2, 3, 1},
		{"but of those that take very long", 5, 2, 1},
		{"even forever", 1e6, 2, 1},
	} {
		if r, e := leastRounds(tc.seconds), perRound(tc.seconds); r != tc.rounds || e != tc.per {
			t.Errorf("%s: a call of %v s is repeated in %d rounds of %d, should be %d of %d", tc.why, tc.seconds, r, e, tc.rounds, tc.per)
		}
	}
}

func TestAdmit(t *testing.T) {
	for _, tc := range []struct {
		why            string
		seconds, limit float64
		left           time.Duration
		want           string
	}{
		{"fits", 0.1, 1, time.Second, ""},
		{"nothing bounds it", 3600, 0, -1, ""},
		{"unknown cost runs", 0, 1, 0, ""},
		{"over the limit of a sweep", 3.21, 1, -1, "predicted 3.21 s each, a sweep ends at 1.00 s (give --seq for more)"},
		{"warm-up and repetitions exceed what is left", 0.3, 1, time.Second, "predicted 300 ms each, 1.00 s of the budget is left"},
	} {
		if got := admit(tc.seconds, tc.limit, tc.left); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.why, got, tc.want)
		}
	}
}

func TestBackendsShareTheBudget(t *testing.T) {
	if got := share(time.Minute, 3); got != 20*time.Second {
		t.Errorf("three backends get %v each of a minute", got)
	}
	if got := share(time.Minute, 1); got != time.Minute {
		t.Errorf("the last backend gets %v of the minute left", got)
	}
}
