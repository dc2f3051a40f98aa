package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/seed90331342/attn/bench"
)

// benchBar shows how far a run is, on a terminal; its zero value shows nothing.
type benchBar struct{ bar *progressbar.ProgressBar }

// benchBarSteps is finer than any terminal is wide.
const benchBarSteps = 1000

// newBenchBar returns a bar on w when w is a terminal: in a pipe or a log file it
// would be noise.
func newBenchBar(w io.Writer) *benchBar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return &benchBar{}
	}
	return &benchBar{progressbar.NewOptions(benchBarSteps,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetWidth(24),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionSetPredictTime(false), // bench predicts from costs, the bar only from steps
		progressbar.OptionClearOnFinish(),
		// The library's own Unicode theme needs glyphs of special fonts.
		progressbar.OptionSetTheme(progressbar.Theme{Saucer: "█", SaucerPadding: "░"}),
	)}
}

// show moves the bar.
func (b *benchBar) show(p bench.Progress) {
	if b.bar == nil {
		return
	}
	b.bar.Describe(describe(p))
	// A bar that cannot be drawn is no reason to stop measuring. It ends by
	// clear alone, so that it never claims to be done.
	_ = b.bar.Set(min(int(p.Done*benchBarSteps), benchBarSteps-1))
}

// clear takes the bar off the screen.
func (b *benchBar) clear() {
	if b.bar != nil {
		_ = b.bar.Clear()
	}
}

// describe says what runs: the case and its step, how many are done, the time that has
// passed and the time that is left.
func describe(p bench.Progress) string {
	cases := fmt.Sprintf("case %d", p.Cases+1)
	if p.Of > 0 {
		cases = fmt.Sprintf("case %d of %d", min(p.Cases+1, p.Of), p.Of)
	}
	left := ""
	if p.Remaining > 0 {
		left = clock(p.Remaining) + " left"
	}
	return fmt.Sprintf("%s · %-5s S=%-7d %-12s %s, %-10s", cases, p.Backend, p.Case.Dims.SeqK, p.Step, clock(p.Elapsed), left)
}

// clock writes a duration as minutes and seconds: "1:05".
func clock(d time.Duration) string {
	s := int(d.Round(time.Second).Seconds())
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}
