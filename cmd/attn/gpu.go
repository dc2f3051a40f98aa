//go:build !nogpu

package main

import (
	"github.com/seed90331342/attn/cmd/attn/internal/tune"

	// Register the backend.
	_ "github.com/seed90331342/attn/gpu"
)

// gpuCommands are the commands that need the GPU backend. Builds with the tag nogpu leave it out: these link no
// WebGPU library, are static on Linux, and compile for systems for which there is none.
type gpuCommands struct {
	Tune tune.Command `cmd:"" help:"Measure the variants of the GPU kernels and store the fastest for later calls."`
}
