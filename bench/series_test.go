package bench

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
)

func TestPresetsAreWhatTheySay(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range Presets() {
		if seen[p.Name] || p.About == "" || p.Budget <= 0 || len(p.Series) == 0 {
			t.Errorf("%+v", p)
		}
		seen[p.Name] = true
		if err := (Config{Series: p.Series, Budget: p.Budget}).Check(); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
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
		s, err := p.Series[1].withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		be := cpu.New(cpu.Options{})
		defer be.Close()
		plan, err := s.at(1 << 20).plan(be)
		if err != nil {
			t.Fatal(err)
		}
		if want := int64(s.Heads) * (4096<<20 - 4096*4095/2); plan.Pairs != want {
			t.Errorf("%d pairs are visible, want %d", plan.Pairs, want)
		}
	}
}

func TestSeriesAreRunOneAfterTheOther(t *testing.T) {
	cfg := Config{Series: []Series{
		{Seqs: []int{16, 32}, Heads: 2, Dim: 4},
		{Seqs: []int{16}, Heads: 2, Dim: 4, Causal: true},
		{Name: "few", Seqs: []int{24}, SeqQ: 3, Heads: 2, Dim: 4},
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
	var out strings.Builder
	if err := r.WriteTable(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"· 3 series\n", "\nB=1 H=2 D=4 f32\n", "\nB=1 H=2 D=4 f32 causal\n", "\nfew · B=1 H=2 D=4 f32 Sq=3\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &out)
		}
	}
	cfg.Series[1] = cfg.Series[0]
	if err := cfg.Check(); !errors.Is(err, backend.ErrOption) || !strings.Contains(err.Error(), "two series") {
		t.Errorf("the same series twice: %v", err)
	}
}

// Each stage alone is timed and checked; one that is wrong has no figure.
func TestVariants(t *testing.T) {
	for _, v := range Variants {
		cfg := small(24)
		cfg.Series[0].Variant, cfg.Series[0].Causal, cfg.Series[0].Mask, cfg.Series[0].KVHeads = v, true, true, 1
		c := runOn(t, cfg, &fake{name: "cpu"}).Cases[0]
		if c.Status != OK || c.MedianS == nil || c.Variant != v || (c.GFLOPS == nil) != (v == Softmax) || (c.StagesS != nil) != (v == Fused) {
			t.Errorf("%s: %+v", v, c)
		}
	}
	for _, v := range []string{Stages, QK, Softmax, PV} {
		cfg := small(24)
		cfg.Series[0].Variant = v
		if c := runOn(t, cfg, &wrongStage{fake: fake{name: "cpu"}, stage: v}).Cases[0]; c.Status != Wrong || c.MedianS != nil {
			t.Errorf("%s: %+v", v, c)
		}
	}
}

// TestHostMemoryIsMeasured takes what a call keeps, and sees at least that.
func TestHostMemoryIsMeasured(t *testing.T) {
	if resident() == 0 || !resetPeak() {
		t.Skip("this system does not tell a program's memory")
	}
	be := &fake{name: "cpu"}
	be.before = func(int64) error { // 64 MiB, written
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

func TestPacerIsAsLongAsACall(t *testing.T) {
	for _, threads := range []int{1, 3} {
		p := newPacer(threads, 2e-3)
		best := 1.0
		for range 50 {
			best = min(best, p.run())
		}
		p.close()
		// Between half and twice the length, as the length was found on a machine that
		// may have been busier.
		if best < 0.5e-3 || best > 20e-3 {
			t.Errorf("%d goroutines take %v s, should be about 2 ms", threads, best)
		}
	}
}

func TestOthersAreSeen(t *testing.T) {
	l := loadNow()
	if l.cpus == 0 {
		t.Skip("this system does not tell what others do")
	}
	if got := l.others(1); got >= 0 {
		t.Errorf("no time has passed, others took %v", got)
	}
	// As if the machine had been idle, or others had used all of it, for a while.
	idle, full := l, l
	idle.all -= 1000
	full.all -= 1000
	full.busy -= 1000
	if got := idle.others(l.cpus); got < 0 || got > 0.2 {
		t.Errorf("an idle machine: others took %v", got)
	}
	if got := full.others(l.cpus); got < 0.9 {
		t.Errorf("a full machine: others took %v", got)
	}
	full.busy += 500 // half of it, so that one thread has its own where there are two
	if got := full.others(1); l.cpus >= 2 && got > 0.2 {
		t.Errorf("half a machine of %d: others took %v of one thread", l.cpus, got)
	}
}

// What a case may take to become precise leaves the later lengths theirs.
func TestPatience(t *testing.T) {
	cfg, err := of(Series{Seqs: []int{1024, 2048, 4096, 1 << 20}}).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	r := &runner{cfg: cfg}
	r.enter(0)
	if got := r.patience(1024); got != caseSeconds {
		t.Errorf("without a budget: %v s", got)
	}
	r.end = time.Now().Add(100 * time.Second)
	if got := r.patience(1024); got < 19 || got > 20 {
		t.Errorf("100 s for four lengths of unknown cost: %v s, want a fifth", got)
	}
	// 2048 takes 2 s a call, 8 s in all, 4096 takes 8 s a call, 24 s; a million does not fit.
	r.call, r.seq = cost{0.5, 1}, 1024
	want := (100 - leastSeconds(2) - leastSeconds(8)) / 5
	if got := r.patience(1024); got < want-1 || got > want {
		t.Errorf("%v s, want %v", got, want)
	}
}
