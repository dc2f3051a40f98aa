//go:build !nogpu

package bench

import (
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

// openGPU opens the GPU that selector chooses, with a limit on its memory in bytes.
func openGPU(selector string, bytes int64) (*kernels.Device, error) {
	be, err := gpu.Open(selector, gpu.Options{MemoryBytes: bytes})
	return kernels.NewDevice(be), err
}
