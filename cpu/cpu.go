// Package cpu is the backend that computes attention in host memory, on any
// machine that Go runs on:
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// Where the machine has AVX-512 or AVX2 it is done by vector kernels (generated
// assembly, package vec): register tiles with query rows as lanes, or with keys
// as lanes where there are few queries, an online softmax in between, K and V read
// where they lie. Elsewhere, and for head sizes over 576, both products go
// through gonum's blas32.Gemm in tiles of 64 queries x 128 keys; a program that
// plugs another BLAS into gonum (blas32.Use) speeds that path up. Memory beside
// the operands is some hundred KiB a thread whatever the lengths are.
//
// Importing the package registers it:
//
//	import _ "github.com/seed90331342/attn/cpu"
//
//	be, err := backend.Open("cpu") // all of GOMAXPROCS
//
// and [New] makes one with another number of threads. [Options.Tier] and the
// environment variable ATTN_CPU_TIER choose among the [Tiers] of the machine:
// avx512, avx2, gonum. Backend.Plan says which path a call takes, and why.
//
// On one tier results are the same bits whatever the number of threads is, and a
// row's result depends neither on the rows, heads and batches around it nor on how
// many rows there are. Where in memory an operand lies, and its strides, do not
// matter either. (For the gonum path that is so with gonum's own BLAS; another one
// may sum a row differently when it comes with fewer others.)
//
// A backend keeps the goroutines that help its calls until it is closed, one fewer
// than its threads; they sleep while there is nothing to do.
//
// Keys and values may be of another type than the queries, int8 with a scale a row
// among them, and lie in pages. With few query rows they are read where they lie, where
// head sizes and pages are multiples of the lanes of a vector (16 or 8); otherwise a
// block of them is converted for up to some hundred query rows at a time.
//
// Not here: on the gonum path, calls with few query rows are not cut along their
// keys.
package cpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// name opens the backend, where names its memory in errors.
const (
	name  = "cpu"
	where = "the CPU"
)

// Options are the settings of a [Backend]. The zero value uses all of
// GOMAXPROCS.
type Options struct {
	// Threads is how many goroutines compute a call, at most; 0 (and less)
	// follows GOMAXPROCS as it is when the call starts.
	Threads int
	// Tier chooses the instructions: one of [Tiers], or "" for what the
	// environment variable ATTN_CPU_TIER says, and the fastest where that is
	// not set. With a tier that the machine does not have every call returns
	// [ErrTier]; [Open] returns it at once.
	Tier string
}

// Backend computes in host memory. It implements backend.Backend,
// backend.Projector, backend.Rotator, backend.Merger, backend.Batcher, backend.Scorer,
// backend.Copier, backend.PeakMeter and backend.BandwidthMeter.
type Backend struct {
	opt     Options
	gate    gate
	workers *workers
	kernels *vec.Kernels
}

var (
	_ backend.Backend        = (*Backend)(nil)
	_ backend.Projector      = (*Backend)(nil)
	_ backend.Merger         = (*Backend)(nil)
	_ backend.PeakMeter      = (*Backend)(nil)
	_ backend.BandwidthMeter = (*Backend)(nil)
)

// New returns a backend with the given options, for the caller to Close.
func New(opt Options) *Backend {
	opt.Threads = max(0, opt.Threads)
	be := &Backend{opt: opt, workers: newWorkers()}
	be.kernels, be.gate.err = kernelsOf(opt.Tier)
	// For who forgets to close it.
	runtime.AddCleanup(be, (*workers).close, be.workers)
	return be
}

// Open is New that returns ErrTier where the machine does not have opt.Tier, or
// what ATTN_CPU_TIER says.
func Open(opt Options) (*Backend, error) {
	be := New(opt)
	return be, be.gate.err
}

// Alloc implements backend.Backend. It returns ErrShape for a shape that is
// negative or too large to index, and ErrMemory for one that exceeds the memory of
// the machine.
func (be *Backend) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (t backend.Tensor, err error) {
	err = be.do(ctx, "alloc", func() error {
		if n, have := shape.Elements(), machineMemory(); n > 0 && uint64(n) > have/uint64(dtype.Size()) || uint64(max(dtype.Bytes(shape), 0)) > have {
			return fmt.Errorf("shape %v of %v takes %d elements of %d bytes, the machine has %d bytes: %w",
				shape, dtype, n, dtype.Size(), have, backend.ErrMemory)
		}
		t, err = backend.AllocHost(dtype, shape)
		return err
	})
	return t, err
}

// Upload implements backend.Backend: it returns an alias of host, without a
// copy. It returns ErrDevice when host is not in host memory, and ErrReleased after
// Release.
func (be *Backend) Upload(ctx context.Context, host backend.Tensor) (t backend.Tensor, err error) {
	err = be.do(ctx, "upload", func() error {
		t, err = host.Alias()
		return err
	})
	return t, err
}

// Close implements backend.Backend: it waits for running calls, and for the
// backend's goroutines to end.
func (be *Backend) Close() error {
	be.gate.close()
	be.workers.close()
	be.workers.ended.Wait()
	return nil
}

// driver opens the one device of the family "cpu".
type driver struct{}

func init() { backend.Register(name, driver{}) }

// Devices implements backend.Driver.
func (driver) Devices() ([]backend.Info, error) {
	be, err := Open(Options{})
	if err != nil {
		return nil, err
	}
	return []backend.Info{be.Info()}, nil
}

// Open implements backend.Driver. There is one CPU: a selector is ErrNoDevice.
func (driver) Open(selector string) (backend.Backend, error) {
	if selector != "" {
		return nil, fmt.Errorf("cpu: there is one device, open it as \"cpu\", not \"cpu:%s\": %w", selector, backend.ErrNoDevice)
	}
	be, err := Open(Options{})
	if err != nil {
		return nil, err
	}
	return be, nil
}

// The tiers of Options.Tier and of the environment variable ATTN_CPU_TIER.
const (
	tierGonum = "gonum"
	tierEnv   = "ATTN_CPU_TIER"
)

// ErrTier reports a tier of instructions that the machine does not have.
var ErrTier = errors.New("no such tier of instructions on this machine")

// Tiers returns the names that Options.Tier takes on this machine, the fastest
// first: of "avx512" (AVX-512F, DQ and VL), "avx2" (with FMA and F16C) and, always
// and last, "gonum".
func Tiers() []string {
	var names []string
	for _, k := range vec.Tiers() {
		names = append(names, k.Tier)
	}
	return names
}

// kernelsOf returns the kernels of a tier. "" selects the tier that the environment
// variable names, or the fastest where it is not set. With an error they are the gonum kernels.
func kernelsOf(tier string) (*vec.Kernels, error) {
	source := "Options.Tier"
	if tier == "" {
		tier, source = os.Getenv(tierEnv), tierEnv
	}
	for _, k := range vec.Tiers() {
		if tier == "" || k.Tier == tier {
			return k, nil
		}
	}
	return vec.Tiers()[len(vec.Tiers())-1], fmt.Errorf("cpu: %s is %q, this machine has %s: %w", source, tier, strings.Join(Tiers(), ", "), ErrTier)
}
