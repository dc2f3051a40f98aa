package bench

import (
	"testing"

	"github.com/seed90331342/attn/bench/report"
)

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

// Every option reaches the call, whose rows are checked in float64 with the same options,
// and the report.
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
