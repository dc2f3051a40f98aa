package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestPlain: no escape, line break, direction mark or broken UTF-8 reaches a terminal.
func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"Größe 東京":           "Größe 東京",
		"a\x1b[31mb\x00\x7f": "a\ufffd[31mb\ufffd\ufffd",
		"a\u009bb\u202ec":    "a\ufffdb\ufffdc",
		"a\xffb\n":           "a\ufffdb\ufffd",
	} {
		if got := Plain(text); got != want {
			t.Errorf("%q becomes %q, should be %q", text, got, want)
		}
	}
	if got := Label(strings.Repeat("é", 65000)); utf8.RuneCountInString(got) != maxLabel || !strings.HasSuffix(got, "…") {
		t.Errorf("a long label becomes %q", got)
	}
	if got, want := OneLine(errors.New("one\ntwo \x1b[2J")), "one; two \ufffd[2J"; got != want {
		t.Errorf("an error becomes %q, should be %q", got, want)
	}
}

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
	code := Run(t.Context(), &grammar, []string{"print"}, noReader{}, &stderr)
	if code != ExitFailed || stderr.String() != "attn: standard output: io: read/write on closed pipe\n" {
		t.Errorf("exit code %d, %q", code, stderr.String())
	}
	if !done {
		t.Error("the command stopped at the closed output")
	}
}
