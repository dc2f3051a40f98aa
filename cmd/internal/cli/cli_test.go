package cli

import (
	"bytes"
	"fmt"
	"io"
	"testing"

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
