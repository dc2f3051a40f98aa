package bench

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/seed90331342/attn/bench"
)

// bar is a progress bar on a terminal. Its zero value shows nothing.
type bar struct{ *progressbar.ProgressBar }

// barSteps is more than the width of any terminal.
const barSteps = 1000

// newBar returns a bar on w if w is a terminal: in a pipe or a log file it would
// be noise.
func newBar(w io.Writer) bar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return bar{}
	}
	return bar{progressbar.NewOptions(barSteps,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetWidth(24),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionSetPredictTime(false), // package bench predicts from costs, the bar only from steps
		progressbar.OptionClearOnFinish(),
		// The library's own Unicode theme needs glyphs of special fonts.
		progressbar.OptionSetTheme(progressbar.Theme{Saucer: "█", SaucerPadding: "░"}),
	)}
}

// show moves the bar. An error does not stop the measurement. The bar never
// reaches its end: only clear removes it.
func (b bar) show(p bench.Progress) {
	if b.ProgressBar != nil {
		b.Describe(describe(p))
		_ = b.Set(min(int(p.Done*barSteps), barSteps-1))
	}
}

// clear removes the bar from the screen.
func (b bar) clear() {
	if b.ProgressBar != nil {
		_ = b.Clear()
	}
}

// describe returns the case and its step, the number of finished cases, the
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
	return fmt.Sprintf("%s · %-5s S=%-7d %-12s %s, %-10s", cases, p.Backend, p.Case.SeqK, p.Step, clock(p.Elapsed), left)
}

// clock writes a duration as minutes and seconds: "1:05".
func clock(d time.Duration) string {
	s := int(d.Round(time.Second).Seconds())
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}
