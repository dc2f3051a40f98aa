//go:build !nogpu

package bench

import (
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

// openGPU opens the GPU that selector chooses, with a limit on its memory in bytes, and for the plain kernel alone if
// plain is set.
func openGPU(selector string, bytes int64, plain bool) (*kernels.Device, error) {
	opt := gpu.Options{MemoryBytes: bytes}
	if plain {
		opt.Tune = gpu.TunePlain
	}
	be, err := gpu.Open(selector, opt)
	return kernels.NewDevice(be), err
}
