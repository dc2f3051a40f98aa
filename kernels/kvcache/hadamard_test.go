package kvcache_test

import (
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// TestHadamardRefuses checks the error of head sizes without a matrix.
func TestHadamardRefuses(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	for size, c := range map[string]kvcache.Config{
		"48":   {Dim: 48, ValueDim: 64},
		"80":   {Dim: 64, ValueDim: 80},
		"8192": {Dim: 8192},
	} {
		c.Capacity, c.Hadamard = 4, true
		must.Fail(t, size, must.Err(kvcache.New(t.Context(), dev, c)), kernels.ErrOption, "head size "+size+" has no Hadamard matrix, it must be a power of two up to 4096")
	}
}
