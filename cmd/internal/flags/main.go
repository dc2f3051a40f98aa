package flags

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Exit codes of all programs. 130 is the shells' code for a program that Ctrl-C ended (128 + SIGINT).
const (
	ExitFailed      = 1
	ExitUsage       = 2
	ExitInterrupted = 130
)

// ExitCode returns the exit code of a program whose work under ctx, which a signal ends, returned err.
func ExitCode(ctx context.Context, err error) int {
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil: // the cause of err, whatever its text
		return ExitInterrupted
	case IsUsage(err):
		return ExitUsage
	}
	return ExitFailed
}

// Context returns the context of a program, which ends on Ctrl-C and SIGTERM. A second signal ends the
// program, even where a device keeps it waiting.
func Context() context.Context {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx
}

// Main runs a program with the flags of package flag, prints its error as one line, and exits.
func Main(name string, run func(ctx context.Context, args []string, out, messages io.Writer) error) {
	ctx := Context()
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	code := ExitCode(ctx, err)
	if code == ExitInterrupted {
		err = errors.New("interrupted")
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	}
	os.Exit(code)
}

// Parse parses the arguments of a program. It reports whether they ask for help, which it prints to messages.
func Parse(f *flag.FlagSet, args []string, messages io.Writer) (help bool, err error) {
	f.SetOutput(io.Discard)
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		f.SetOutput(messages)
		f.PrintDefaults()
		return true, nil
	case err != nil:
		return false, Usagef("%w; %s --help lists the flags", err, f.Name())
	}
	return false, nil
}
