package cli

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed90331342/attn/cmd/internal/flags"
)

type noReader struct{}

func (noReader) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

type printer struct{ done *bool }

// Run prints, and then does the rest of its work.
func (p *printer) Run(out *Streams) error {
	if _, err := fmt.Fprintln(out.Out, "check"); err != nil {
		return err
	}
	*p.done = true
	return nil
}

// TestClosedOutput: a command whose reader has gone ends its work and fails.
func TestClosedOutput(t *testing.T) {
	done := false
	grammar := struct {
		Print printer `cmd:""`
	}{printer{&done}}
	var stderr bytes.Buffer
	program := Program{Name: "attn", Grammar: func() any { return &grammar }}
	code := program.Run(t.Context(), []string{"print"}, noReader{}, &stderr)
	if code != flags.ExitFailed || stderr.String() != "attn: standard output: io: read/write on closed pipe\n" {
		t.Errorf("exit code %d, %q", code, stderr.String())
	}
	if !done {
		t.Error("the command stopped at the closed output")
	}
}

// TestWatch: the clock goes on within a step, and nothing of it stays.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		Status{&out}.Watch(nil)() // ends at once
		var step atomic.Value
		step.Store("upload")
		text := func() string { return step.Load().(string) }
		stop := Status{&out}.Watch(text)
		time.Sleep(999 * time.Millisecond)
		stop()
		if out.Len() > 0 {
			t.Errorf("short work shows %q", out.String())
		}
		stop = Status{&out}.Watch(text)
		time.Sleep(999 * time.Millisecond)
		time.Sleep(60 * time.Second)
		step.Store("call")
		time.Sleep(time.Second)
		stop()
		shown := out.String()
		if !strings.HasPrefix(shown, "\r\x1b[Kupload  0:01\r") || !strings.HasSuffix(shown, "\r\x1b[Kupload  1:00\r\x1b[Kcall  1:01\r\x1b[K") {
			t.Errorf("%q", shown)
		}
	})
}
