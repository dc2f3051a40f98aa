package bench

import (
	"fmt"
	"strings"
	"time"

	"github.com/seed90331342/attn/bench"
)

// barWidth is the length of the progress bar in characters: the line fits in 80.
const barWidth = 12

// describe returns the case and its step, the number of finished cases, a bar, the
// elapsed time and the remaining time.
func describe(p bench.Progress) string {
	cases := fmt.Sprintf("case %d", p.Cases+1)
	if p.Of > 0 {
		cases = fmt.Sprintf("case %d of %d", min(p.Cases+1, p.Of), p.Of)
	}
	left := ""
	if p.Remaining > 0 {
		left = clock(p.Remaining) + " left"
	}
	full := min(int(p.Done*barWidth), barWidth)
	bar := strings.Repeat("█", full) + strings.Repeat("░", barWidth-full)
	return fmt.Sprintf("%s · %-5s S=%-7d %-12s %3.0f%% %s %s, %s", cases, p.Backend, p.Case.SeqK, p.Step, 100*min(p.Done, 1), bar, clock(p.Elapsed), left)
}

// clock writes a duration as minutes and seconds: "1:05".
func clock(d time.Duration) string {
	s := int(d.Round(time.Second).Seconds())
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}
