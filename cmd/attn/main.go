// Command attn computes attention,
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// on any backend that is built in: on .npy files (attn run), step by step on a
// worked example (attn explain), on conformance cases of the ONNX operator (attn
// onnx), it draws the weights (attn heatmap), and it says what it could run on
// (attn devices). Try:
//
//	attn run --q Q.npy --k K.npy --v V.npy --out O.npy --causal
//
// What goes wrong is one line on standard error and an exit code that is not 0.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/bench"
)

// commands is the command line: one field a command, each with a method
//
//	Run(ctx context.Context, out *streams) error
//
// ctx ends on Ctrl-C and SIGTERM; Run returns errors and prints none.
type commands struct {
	Devices devicesCmd `cmd:"" help:"List the backends and adapters, their limits, and what auto picks."`
	Run     runCmd     `cmd:"" help:"Compute attention over .npy files."`
	Explain explainCmd `cmd:"" help:"Show every step of attention on a small example."`
	HeatMap heatmapCmd `cmd:"" name:"heatmap" help:"Draw the weights of chosen heads and of a range of queries and keys."`
	Bench   benchCmd   `cmd:"" help:"Measure speed, distance from the machine's limit, and error."`
	Compare compareCmd `cmd:"" help:"Say what changed between two reports of attn bench, beyond noise."`
	ONNX    onnxCmd    `cmd:"" name:"onnx" help:"Run conformance cases of the ONNX operator Attention."`
	Tune    tuneCmd    `cmd:"" help:"Measure which variants of the GPU kernels are the fastest here, and keep that for later calls."`
}

// streams are where a command writes: results to out, everything that is said
// beside them (notes, progress) to err.
type streams struct {
	out, err io.Writer
	// args are the words of the command line, the command's name first.
	args []string
}

// Exit codes: 130 is what shells give a program that Ctrl-C ended (128 + SIGINT).
const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() {
	quietDrivers()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal cancels; with the handler gone a second one ends a
	// program that a device keeps waiting.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// quietDrivers keeps Mesa's layer that orders Vulkan devices from printing a
// line on standard error each time that it looks for a Wayland session on a
// machine without one (over ssh, in a container): with a place to look in, even
// one that is not there, it fails silently.
func quietDrivers() {
	const name = "XDG_RUNTIME_DIR"
	if os.Getenv(name) == "" {
		os.Setenv(name, "/nonexistent") // cannot fail for this name
	}
}

// run is the whole program but for the process around it. It returns the exit
// code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) (code int) {
	// A bug must not answer a bad input with a page of stack.
	defer func() {
		if bug := recover(); bug != nil {
			code = fail(stderr, fmt.Errorf("internal error, please report it: %v", bug))
		}
	}()
	// kong asks to exit after it printed the help, and then goes on parsing.
	exited := false
	var cli commands
	parser, err := newParser(&cli,
		kong.Writers(stdout, stderr),
		kong.Exit(func(c int) { exited, code = true, c }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(&streams{out: stdout, err: stderr, args: args}),
	)
	if err != nil {
		return fail(stderr, err)
	}
	parsed, err := parser.Parse(args)
	if exited {
		return code
	}
	if err != nil {
		fail(stderr, err)
		return exitUsage
	}
	if err := parsed.Run(); err != nil {
		// Whatever the error says, a cancelled context is why. A benchmark has
		// written what it measured, and says how much that is.
		if ctx.Err() != nil {
			if !errors.Is(err, bench.ErrInterrupted) {
				err = errors.New("interrupted, no file was written")
			}
			fail(stderr, err)
			return exitInterrupted
		}
		if errors.Is(err, errSaid) {
			return exitFailed
		}
		return fail(stderr, err)
	}
	return 0
}

// newParser returns a parser of the command line into cli.
func newParser(cli *commands, options ...kong.Option) (*kong.Kong, error) {
	return kong.New(cli, append(options,
		kong.Name("attn"),
		kong.Description("Attention, softmax(scale·QKᵀ + bias)·V, on a GPU through WebGPU or on the CPU."),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.Vars{"presets": presetHelp()},
	)...)
}

// fail is the one place where errors are printed: a single line, whatever the
// error's own text is.
func fail(stderr io.Writer, err error) int {
	fmt.Fprintf(stderr, "attn: %s\n", oneLine(err))
	return exitFailed
}

// oneLine returns an error's text without line breaks.
func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}
