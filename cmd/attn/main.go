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
//	attn tune       choose the fastest GPU kernels of this machine
//	attn version    print the version, the modules in the binary and their licences
//
// For example:
//
//	attn run --q Q.npy --k K.npy --v V.npy --out O.npy --causal
//
// A failure is one line on standard error and an exit code other than 0.
package main

import (
	"os"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/cmd/attn/internal/bench"
	"github.com/seed90331342/attn/cmd/attn/internal/devices"
	"github.com/seed90331342/attn/cmd/attn/internal/explain"
	"github.com/seed90331342/attn/cmd/attn/internal/heatmap"
	"github.com/seed90331342/attn/cmd/attn/internal/run"
	"github.com/seed90331342/attn/cmd/attn/internal/version"
	"github.com/seed90331342/attn/cmd/internal/cli"

	// Register the backend.
	_ "github.com/seed90331342/attn/cpu"
)

// commands is the grammar of the command line.
type commands struct {
	Devices devices.Command `cmd:"" help:"List the backends, their devices and limits, and the choice of auto."`
	Run     run.Command     `cmd:"" help:"Compute attention over .npy and .safetensors files."`
	Explain explain.Command `cmd:"" help:"Print every step of attention on a small example."`
	HeatMap heatmap.Command `cmd:"" name:"heatmap" help:"Draw the attention weights of chosen heads, queries and keys."`
	Bench   bench.Command   `cmd:"" help:"Measure speed, percent of the machine's limit, and error."`
	Compare bench.Compare   `cmd:"" help:"Report changes between two reports of attn bench that are larger than the noise."`
	gpuCommands
	Version version.Command `cmd:"" help:"Print the version, the modules in the binary and their licences."`
}

func main() { program.Main(os.Args[1:]) }

var program = cli.Program{
	Name:    "attn",
	Help:    "Attention, softmax(scale·QKᵀ + bias)·V, on a GPU through WebGPU or on the CPU.",
	Grammar: func() any { return &commands{} },
	Options: []kong.Option{bench.Vars()},
}
