// Package cli runs command lines: it parses the arguments, calls the chosen command, and prints its error as one line.
//
// A command is a struct of flags with the method
//
//	Run(ctx context.Context, out *cli.Streams) error
//
// ctx ends on Ctrl-C and SIGTERM. Run returns errors and prints none. Errors of the command line
// are those of flags.Usagef.
package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/internal/flags"
)

// Streams are the outputs of a command: results go to Out, which replaces characters that
// are not safe on a terminal, notes and progress to Err.
type Streams struct {
	Out, Err io.Writer
	Args     []string // the arguments, starting with the command's name
	program  string
}

// ErrReported fails a command whose output has described the failure already.
var ErrReported = errors.New("failed")

// Interrupted is the error of an interrupted command that kept part of its results.
type Interrupted struct{ Err error }

// Error implements error.
func (e Interrupted) Error() string { return e.Err.Error() }

// Program is a program with a command line.
type Program struct {
	Name, Help string
	// Grammar returns a pointer to a struct with a field for each command, or to the only command.
	Grammar func() any
	Options []kong.Option
}

// Main runs the program and exits. args are those of the process without the program's name.
func (p Program) Main(args []string) {
	// Mesa's device selection layer prints a line to standard error on machines without a Wayland
	// session (over ssh, in a container). With a folder to search, even a missing one, it is silent.
	if os.Getenv("XDG_RUNTIME_DIR") == "" {
		os.Setenv("XDG_RUNTIME_DIR", "/nonexistent") // cannot fail for this name
	}
	signal.Ignore(syscall.SIGPIPE) // a closed output is an error of Write
	os.Exit(p.Run(flags.Context(), args, os.Stdout, os.Stderr))
}

// Run parses args, runs the chosen command, and returns the exit code.
func (p Program) Run(ctx context.Context, args []string, stdout, stderr io.Writer) (code int) {
	// fail prints err as one line. No other function prints errors.
	fail := func(err error) int {
		fmt.Fprintf(stderr, "%s: %s\n", p.Name, plain.Line(err.Error()))
		return flags.ExitCode(ctx, err)
	}
	// A bug must not answer bad input with a page of stack.
	defer func() {
		if bug := recover(); bug != nil {
			fail(fmt.Errorf("internal error, please report it: %v", bug))
			code = flags.ExitFailed
		}
	}()
	args = flags.JoinNegative(args)
	printed := &output{w: stdout}
	out := &plain.Writer{W: printed}
	// kong calls Exit after it has printed the help, and then goes on parsing.
	exited := false
	parser, err := kong.New(p.Grammar(), append(slices.Clip(p.Options),
		kong.Name(p.Name),
		kong.Description(p.Help),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.Writers(out, stderr),
		kong.Exit(func(c int) { exited, code = true, c }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(&Streams{Out: out, Err: stderr, Args: args, program: p.Name}),
	)...)
	if err != nil {
		return fail(err)
	}
	parsed, err := parser.Parse(args)
	switch {
	case exited:
		return code
	case err != nil:
		return fail(flags.Reworded(err))
	}
	err = parsed.Run()
	if err == nil && printed.err != nil {
		err = fmt.Errorf("standard output: %w", printed.err)
	}
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil && !errors.As(err, new(Interrupted)):
		err = errors.New("interrupted, no file was written")
	case ctx.Err() == nil && errors.Is(err, ErrReported):
		return flags.ExitFailed
	}
	return fail(err)
}

// Note prints a line that is not an error.
func (s *Streams) Note(format string, args ...any) {
	fmt.Fprintf(s.Err, "%s: note: %s\n", s.program, plain.Line(fmt.Sprintf(format, args...)))
}

// PrintJSON prints v as JSON.
func (s *Streams) PrintJSON(v any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := s.Out.Write(plain.JSON(text.Bytes()))
	return err
}

// output is standard output. After an error it drops what follows, so that a command
// whose reader has gone still writes its files; Run returns the error in the end.
type output struct {
	w   io.Writer
	err error
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	if o.err == nil {
		_, o.err = o.w.Write(p)
	}
	return len(p), nil
}
