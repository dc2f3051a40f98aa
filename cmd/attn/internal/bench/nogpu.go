//go:build nogpu

package bench

import "github.com/seed90331342/attn/kernels"

func openGPU(string, int64, bool) (*kernels.Device, error) { return kernels.Open("gpu") }
