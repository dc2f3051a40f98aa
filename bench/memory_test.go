package bench

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestOutOfMemory refuses requests for memory: each of the first, which differ, and one of
// eleven or, with -short, of fifty of the others, which calls and checked rows repeat. A run
// ends with ErrMemory, or its report names the case that lacked memory and has the other.
func TestOutOfMemory(t *testing.T) {
	cfg := small(16, 32)
	bench := func() (*report.Report, error) {
		return inBubble(t, func() (*report.Report, error) {
			return Run(context.Background(), devices(&fake{name: "cpu"}), cfg)
		})
	}
	refused, every := 0, 11
	if testing.Short() {
		every = 50
	}
	for n := 1; ; n++ {
		if n > 20 {
			n += every - 1
		}
		stop := backend.FailMemory(n)
		r, err := bench()
		if requests := stop(); requests < n {
			if err != nil || r.Err() != nil {
				t.Errorf("nothing refused: %v, %v", err, r.Err())
			}
			break
		}
		refused++
		if err != nil {
			must.Fail(t, fmt.Sprintf("request %d refused", n), err, kernels.ErrMemory)
			continue
		}
		lacking, ok := 0, 0
		for _, c := range r.Cases {
			switch {
			case strings.Contains(c.Note, "out of memory"):
				lacking++
			case c.Status == report.OK:
				ok++
			default:
				t.Errorf("request %d refused: %s: %s %q", n, c.Shape(), c.Status, c.Note)
			}
		}
		if lacking != 1 || ok != 1 {
			t.Errorf("request %d refused: %d cases lack memory, %d are ok, want one of each", n, lacking, ok)
		}
	}
	t.Logf("%d requests refused", refused)
	if refused == 0 {
		t.Error("no request was refused")
	}
}
