// Package fronttest has the tests of package kernels that open devices, on the CPU and on the
// GPU. They are apart because go mod tidy loads what the tests of an imported package import: a
// program that uses kernels and cpu must not download the WebGPU libraries.
package fronttest

import (
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
)
