package bench

import (
	"testing"
	"time"

	"github.com/seed90331342/attn/bench"
)

func TestProgressSaysWhatRunsAndHowLong(t *testing.T) {
	p := bench.Progress{Backend: "cpu", Case: bench.Case{SeqK: 4096}, Step: "round 3", Cases: 1, Of: 5,
		Elapsed: 65 * time.Second, Done: 0.5, Remaining: 3599600 * time.Millisecond}
	for _, tc := range []struct {
		change func()
		want   string
	}{
		{func() {}, "case 2 of 5 · cpu   S=4096    round 3       50% ██████░░░░░░ 1:05, 60:00 left"},
		{func() { p.Of, p.Remaining = 0, 0 }, "case 2 · cpu   S=4096    round 3       50% ██████░░░░░░ 1:05, "},
	} {
		tc.change()
		if got := describe(p); got != tc.want {
			t.Errorf("%q, want %q", got, tc.want)
		}
	}
}
