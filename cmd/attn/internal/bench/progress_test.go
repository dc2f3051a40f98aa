package bench

import (
	"testing"

	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
)

func TestProgressSaysWhatRuns(t *testing.T) {
	p := &bench.Progress{Backend: "cpu", Case: report.Case{SeqK: 4096}, Step: "round 3", Cases: 1, Of: 5}
	if got, want := describe(p), "case 2 of 5 · cpu   S=4096    round 3     "; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	p.Of = 0
	if got, want := describe(p), "case 2 · cpu   S=4096    round 3     "; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
