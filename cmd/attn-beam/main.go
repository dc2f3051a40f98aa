// Command attn-beam computes attention over sequences that do not fit one machine, as a
// pipeline of Apache Beam:
//
//	attn-beam plan    print blocks, bytes and the predicted time, of files or of lengths
//	attn-beam run     compute the output
//
// For example, with 4 worker processes on this machine:
//
//	attn-beam run --q 'Q-*.npy' --k 'K-*.npy' --v 'V-*.npy' --out OUT --causal --workers 4
//
// A failure is one line on standard error and an exit code other than 0.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
	"github.com/apache/beam/sdks/v2/go/pkg/beam"

	"github.com/seed90331342/attn/bench/page"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
	"github.com/seed90331342/attn/cmd/internal/flags"

	// Files of object stores, next to local ones.
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem/gcs"
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem/s3"
)

// commands is the grammar of the command line.
type commands struct {
	Run  runCommand  `cmd:"" help:"Compute attention over sharded .npy files."`
	Plan planCommand `cmd:"" help:"Print blocks, units, bytes and the predicted time of a call over files, of which it reads only the headers, or of lengths."`
}

func main() {
	workers.Serve()
	if slices.Contains(os.Args[1:], "--worker=true") || slices.Contains(os.Args[1:], "--worker") {
		// The container of a runner started this process as a worker, with Beam's flags.
		flag.Parse()
		beam.Init() // does not return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run runs a command line and returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) (code int) {
	fail := func(err error, code int) int {
		fmt.Fprintf(stderr, "attn-beam: %s\n", page.Line(err.Error()))
		return code
	}
	args, beams := args, []string(nil)
	if i := slices.Index(args, "--"); i >= 0 {
		args, beams = args[:i], args[i+1:]
	}
	args = flags.JoinNegative(args)
	exited := false
	grammar := &commands{}
	parser, err := kong.New(grammar, kong.Name("attn-beam"),
		kong.Description("Attention, softmax(scale·QKᵀ + bias)·V, over sharded files as a pipeline of Apache Beam. Flags of Beam follow --."),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}), kong.Writers(stdout, stderr),
		kong.Exit(func(c int) { exited, code = true, c }),
		kong.BindTo(ctx, (*context.Context)(nil)), kong.Bind(&streams{stdout, stderr, beams}))
	if err != nil {
		return fail(err, 1)
	}
	parsed, err := parser.Parse(args)
	switch {
	case exited:
		return code
	case err != nil:
		return fail(flags.Reworded(err), flags.ExitUsage)
	}
	if err = parsed.Run(); err == nil {
		return 0
	}
	if ctx.Err() != nil {
		return fail(errors.New("interrupted: the shards that are written stay, --resume continues from them"), 130)
	}
	if flags.IsUsage(err) {
		return fail(err, flags.ExitUsage)
	}
	return fail(err, 1)
}

// streams are the outputs of a command and the flags for Beam.
type streams struct {
	out, err io.Writer
	beam     []string
}

// init parses Beam's flags and initialises Beam.
func (s *streams) init() error {
	flag.CommandLine.Init("attn-beam", flag.ContinueOnError)
	flag.CommandLine.SetOutput(io.Discard)
	if err := flag.CommandLine.Parse(s.beam); err != nil {
		return flags.Usagef("a flag of Beam, after --: %w", err)
	}
	if rest := flag.Args(); len(rest) > 0 {
		return flags.Usagef("%s is not a flag of Beam", strings.Join(rest, " "))
	}
	beam.Init()
	return nil
}
