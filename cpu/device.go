package cpu

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"

	"gonum.org/v1/gonum/blas/blas32"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/seed90331342/attn/backend"
)

// Info implements backend.Backend.
func (be *Backend) Info() backend.Info {
	return backend.Info{
		Name:     name,
		Device:   modelName(),
		Type:     backend.CPU,
		Provider: fmt.Sprintf("%s (of %s), %s", be.tierName(), strings.Join(Tiers(), ", "), provider()),
		Threads:  be.threads(),
		Limits:   []backend.Limit{{Name: "memory", Value: int64(machineMemory())}},
	}
}

// modelName returns what the processor calls itself, where the system says so
// (Linux on x86), else the architecture.
var modelName = sync.OnceValue(func() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
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

// provider names the BLAS behind blas32, with its version when it is gonum's
// and the binary knows.
func provider() string {
	if impl := blas32.Implementation(); impl != blas32Default {
		return fmt.Sprintf("blas32 of %T", impl)
	}
	return "gonum blas32" + gonumVersion()
}

var blas32Default any = gonum.Implementation{}

// gonumVersion returns " v0.17.0", or nothing where the binary does not know.
var gonumVersion = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, m := range info.Deps {
		if m.Path == "gonum.org/v1/gonum" {
			if m.Replace != nil {
				m = m.Replace
			}
			return " " + m.Version
		}
	}
	return ""
})
