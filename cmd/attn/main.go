// Command attn computes attention,
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// on the CPU or on a GPU through WebGPU:
//
//	attn devices    list the backends and their devices
//	attn run        compute attention over .npy and .safetensors files
//	attn explain    print every step of attention on a small example
//	attn heatmap    draw attention weights
//	attn bench      measure speed and error
//	attn compare    compare two reports of attn bench
//	attn onnx       run conformance cases of ONNX's and ONNX Runtime's operators of attention
//	attn tune       choose the fastest GPU kernels of this machine
//
// For example:
//
//	attn run --q Q.npy --k K.npy --v V.npy --out O.npy --causal
//
// A failure is one line on standard error and an exit code other than 0.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/seed90331342/attn/cmd/attn/internal/bench"
	"github.com/seed90331342/attn/cmd/attn/internal/cli"
	"github.com/seed90331342/attn/cmd/attn/internal/devices"
	"github.com/seed90331342/attn/cmd/attn/internal/explain"
	"github.com/seed90331342/attn/cmd/attn/internal/heatmap"
	"github.com/seed90331342/attn/cmd/attn/internal/onnx"
	"github.com/seed90331342/attn/cmd/attn/internal/run"
	"github.com/seed90331342/attn/cmd/attn/internal/tune"

	// Register the backends.
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
)

// commands is the grammar of the command line.
type commands struct {
	Devices devices.Command `cmd:"" help:"List the backends, their devices and limits, and the choice of auto."`
	Run     run.Command     `cmd:"" help:"Compute attention over .npy and .safetensors files."`
	Explain explain.Command `cmd:"" help:"Print every step of attention on a small example."`
	HeatMap heatmap.Command `cmd:"" name:"heatmap" help:"Draw the attention weights of chosen heads, queries and keys."`
	Bench   bench.Command   `cmd:"" help:"Measure speed, percent of the machine's limit, and error."`
	Compare bench.Compare   `cmd:"" help:"Report changes between two reports of attn bench that are larger than the noise."`
	ONNX    onnx.Command    `cmd:"" name:"onnx" help:"Run conformance cases of operators of attention, of ONNX and ONNX Runtime."`
	Tune    tune.Command    `cmd:"" help:"Measure the variants of the GPU kernels and store the fastest for later calls."`
}

func main() {
	quietDrivers()
	signal.Ignore(syscall.SIGPIPE) // a closed output is an error of Write
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal cancels. A second one ends the program, even where a
	// device keeps it waiting.
	context.AfterFunc(ctx, stop)
	os.Exit(cli.Run(ctx, &commands{}, os.Args[1:], os.Stdout, os.Stderr, bench.Vars()))
}

// quietDrivers stops Mesa's device selection layer from printing a line to
// standard error on machines without a Wayland session (over ssh, in a
// container): with a folder to search, even a missing one, it fails silently.
func quietDrivers() {
	const name = "XDG_RUNTIME_DIR"
	if os.Getenv(name) == "" {
		os.Setenv(name, "/nonexistent") // cannot fail for this name
	}
}
