package cpu

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"

	"gonum.org/v1/gonum/blas/blas32"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/peak"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Info implements backend.Backend.
func (be *Backend) Info() backend.Info {
	_, memory := backend.HostMemory()
	return backend.Info{
		Name:     name,
		Device:   modelName(),
		Type:     backend.CPU,
		Provider: fmt.Sprintf("%s (of %s), %s", be.kernels.Tier, strings.Join(Tiers(), ", "), provider()),
		Threads:  be.threads(),
		Limits:   []backend.Limit{{Name: "memory", Value: memory}},
	}
}

// modelName returns the name of the processor where the system reports it (Linux
// on x86), else the architecture.
var modelName = sync.OnceValue(func() string {
	info, _ := os.ReadFile("/proc/cpuinfo")
	return parseModel(info)
})

// parseModel finds the first model name in the text of /proc/cpuinfo.
func parseModel(info []byte) string {
	for line := range bytes.Lines(info) {
		key, value, _ := bytes.Cut(line, []byte(":"))
		if value = bytes.TrimSpace(value); string(bytes.TrimSpace(key)) == "model name" && len(value) > 0 {
			return string(value)
		}
	}
	return runtime.GOARCH
}

// provider names the BLAS behind blas32.
func provider() string {
	if impl := blas32.Implementation(); impl != blas32Default {
		return fmt.Sprintf("blas32 of %T", impl)
	}
	return "gonum blas32"
}

var blas32Default any = gonum.Implementation{}

// PeakFLOPS implements backend.Meter: the best of five measurements of 8
// milliseconds each, in the instructions of the backend's tier. For the gonum tier
// these are the widest that the machine has, because another BLAS may use them.
// On machines without vector kernels a plain Go loop yields a lower bound.
func (be *Backend) PeakFLOPS(ctx context.Context) (flops float64, err error) {
	return result(ctx, be, "peak", func() (float64, error) { return peak.FLOPS(ctx, be.loops(), be.threads()) })
}

// ReadBandwidth implements backend.Meter: the best of three measurements
// of 8 milliseconds each, in which every thread reads its own share of the
// operands with the load instructions of the tier that PeakFLOPS uses.
func (be *Backend) ReadBandwidth(ctx context.Context, operands ...backend.Tensor) (rate float64, err error) {
	in := make([]backend.Operand, len(operands))
	for i, t := range operands {
		in[i] = backend.Operand{Name: fmt.Sprintf("operand %d", i), Tensor: t}
	}
	err = be.doPinned(ctx, "bandwidth", nil, in, func() error {
		var spans [][]byte
		for _, o := range in {
			spans = append(spans, memoryOf(&o.Tensor))
		}
		rate, err = peak.Bandwidth(ctx, be.loops(), spans, be.threads())
		return err
	})
	return rate, err
}

// loops returns the kernels that measure the backend's ceilings.
func (be *Backend) loops() *vec.Kernels {
	if be.kernels.OnlyKeyLanes {
		return vec.Tiers()[0]
	}
	return be.kernels
}

// memoryOf returns the bytes of t from its first element to its last; nil for no tensor.
func memoryOf(t *backend.Tensor) []byte {
	n, shape, strides := 1, t.Shape(), t.Strides()
	if shape.Elements() == 0 {
		return nil
	}
	shape[backend.Dim] = t.DType().Row(shape[backend.Dim])
	for i, length := range shape {
		n += (length - 1) * strides[i]
	}
	data, _ := backend.HostBytes(*t) // t is pinned
	return data[:n*t.DType().Size()]
}
