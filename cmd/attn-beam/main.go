// Command attn-beam computes attention over sequences that do not fit one machine, as a pipeline of Apache Beam:
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
	"flag"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/apache/beam/sdks/v2/go/pkg/beam"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
	"github.com/seed90331342/attn/cmd/internal/cli"
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
	own := os.Args[1:]
	var beams beamFlags
	if i := slices.Index(own, "--"); i >= 0 {
		own, beams = own[:i], own[i+1:]
	}
	cli.Program{
		Name:    "attn-beam",
		Help:    "Attention, softmax(scale·QKᵀ + bias)·V, over sharded files as a pipeline of Apache Beam. Flags of Beam follow --.",
		Grammar: func() any { return &commands{} },
		Options: []kong.Option{kong.Bind(beams)},
	}.Main(own)
}

// beamFlags are the flags for Beam.
type beamFlags []string

// init parses the flags and initialises Beam.
func (f beamFlags) init() error {
	flag.CommandLine.Init("attn-beam", flag.ContinueOnError)
	flag.CommandLine.SetOutput(io.Discard)
	if err := flag.CommandLine.Parse(f); err != nil {
		return flags.Usagef("a flag of Beam, after --: %w", err)
	}
	if rest := flag.Args(); len(rest) > 0 {
		return flags.Usagef("%s is not a flag of Beam", strings.Join(rest, " "))
	}
	beam.Init()
	return nil
}
