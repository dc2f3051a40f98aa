package cli

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"time"

	"golang.org/x/term"

	"github.com/seed90331342/attn/kernels"
)

// inBytes matches the WebGPU names of limits in bytes; maxWorkgroupSizeX counts threads.
var inBytes = regexp.MustCompile(`(?i)bytes|memory|(buffer|binding|storage)size`)

// Limit formats a limit of a device, in bytes also with a binary unit.
func Limit(l kernels.Limit) string {
	if l.Value >= 1024 && inBytes.MatchString(l.Name) {
		return fmt.Sprintf("%d (%s)", l.Value, Bytes(l.Value))
	}
	return fmt.Sprint(l.Value)
}

// Bytes formats a number of bytes: 3 KiB, 1.5 GiB.
func Bytes(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	x := float64(n)
	for x >= 1024 && len(units) > 1 {
		x, units = x/1024, units[1:]
	}
	if x == float64(int64(x)) {
		return fmt.Sprintf("%.0f %s", x, units[0])
	}
	return fmt.Sprintf("%.1f %s", x, units[0])
}

// SI formats a number with three digits and a decimal prefix: 1.50 GFLOP.
func SI(x float64, unit string) string {
	prefixes := []string{"", "k", "M", "G", "T", "P", "E", "Z"}
	n := 0
	for ; x >= 999.5 && n < len(prefixes)-1; n++ {
		x /= 1000
	}
	digits := 2
	for limit := 9.995; x >= limit && digits > 0; limit *= 10 {
		digits--
	}
	if n == 0 && x == float64(int64(x)) {
		digits = 0
	}
	s := strconv.FormatFloat(x, 'f', digits, 64)
	if unit = prefixes[n] + unit; unit == "" {
		return s
	}
	return s + " " + unit
}

// Status is a line of progress on a terminal. It writes nothing to a pipe or a file.
type Status struct{ w io.Writer }

// NewStatus returns the status line of w.
func NewStatus(w io.Writer) Status {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return Status{w}
	}
	return Status{io.Discard}
}

// Active reports whether anyone sees the line.
func (s Status) Active() bool { return s.w != io.Discard }

// Show replaces the line.
func (s Status) Show(text string) { fmt.Fprintf(s.w, "\r\x1b[K%s", text) }

// Clear removes the line.
func (s Status) Clear() { fmt.Fprint(s.w, "\r\x1b[K") }

// Watch shows text() and the time since its call in the line, anew each second, until the caller calls stop. Work of
// less than a second shows nothing. Nothing else may write to the terminal meanwhile. text runs in another goroutine.
func (s Status) Watch(text func() string) (stop func()) {
	if !s.Active() {
		return func() {}
	}
	began, done, ended := time.Now(), make(chan struct{}), make(chan struct{})
	shown := false
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				at := int(time.Since(began).Seconds())
				s.Show(fmt.Sprintf("%s  %d:%02d", text(), at/60, at%60))
				shown = true
			case <-done:
				if shown {
					s.Clear()
				}
				return
			}
		}
	}()
	return func() { close(done); <-ended }
}

// Device is the flag of the backend.
type Device struct {
	Backend string `name:"backend" default:"auto" help:"Device: auto (a hardware GPU, else the CPU), cpu, gpu, gpu:N or gpu:NAME."`
}

// Open opens the device.
func (d Device) Open() (*kernels.Device, error) { return kernels.Open(d.Backend) }
