// Package cpu is the backend that computes attention in host memory, on any
// machine that Go runs on:
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// The kernels (package vec) are generated assembly for AVX-512, AVX2 and NEON, and gonum's
// blas32.Gemm for all other machines. A program that plugs another BLAS into
// gonum (blas32.Use) speeds the gonum kernels up. A call needs some hundred KiB
// of memory a thread in addition to its operands, whatever their lengths.
//
// This package decides what a call becomes: its layout, its chunks, one to a task, and what is
// done after the last of them. The rooms below it know one thing each:
//
//	attention.go ──► partition.go ──► internal/pool ──► internal/tile ──► internal/vec
//	a call           its chunks       workers, tasks    scores, softmax   one product of a
//	                                  and scratch       and values        tile and a block
//
// Package internal/backward uses the scores of internal/tile, and
// internal/strided reads and writes tensors for all of them.
//
// Importing the package registers it:
//
//	import _ "github.com/seed90331342/attn/cpu"
//
//	be, err := backend.Open("cpu") // all of GOMAXPROCS
//
// [New] returns a backend with another number of threads. [Options.Tier] and the
// environment variable ATTN_CPU_TIER select one of the [Tiers] of the machine:
// avx512, avx2, neon, gonum. Backend.Plan reports how a call is computed, and why.
//
// On one tier results have the same bits whatever the number of threads. A row's result depends neither on the rows,
// heads and batches around it nor on their number, nor on the addresses and strides of the operands. (For the gonum
// tier this holds with gonum's own BLAS. Another one may sum a row differently when there are fewer rows.)
//
// In low precision, with operands of bf16 and more than 8 query rows for each key head, products are
// those of the processor's unit for pairs of bf16: AMX-BF16, which the first such call asks Linux for,
// or AMD's AVX512-BF16. Such calls have bits of their own.
//
// All backends of a process share goroutines that help their calls, and end when the last
// backend is closed. At most GOMAXPROCS goroutines compute at one time; calls
// take turns (package cpu/internal/pool). A panic while a call computes becomes its
// error, ErrInternal with the stack, or ErrCallback if a score mod panics.
//
// Keys and values may have other types than the queries, for example int8 with a scale for each row, and they may lie
// in pages. With few query rows the kernels read them in place if head sizes and pages are multiples of the lanes of a
// vector; otherwise a block of them is converted for up to some hundred query rows at a time.
package cpu

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// name is the backend's name in the registry, where that of its memory in errors.
const (
	name  = "cpu"
	where = "the CPU"
)

// Options are the settings of a [Backend]. The zero value uses all of
// GOMAXPROCS.
type Options struct {
	// Threads is the maximum number of goroutines that compute a call, never more than GOMAXPROCS at its start; 0 or
	// less means as many as that. Info and Plan report the number that computes.
	Threads int
	// Tier selects the kernels: one of [Tiers], or "" for the value of the environment variable ATTN_CPU_TIER, or the
	// fastest tier where that is not set. With a tier that the machine does not have, every call returns [ErrTier];
	// [Open] returns it at once.
	Tier string
}

// Backend computes in host memory. It implements backend.Backend, backend.Projector, backend.Rotator,
// backend.Normaliser, backend.Gater, backend.LinearAttender, backend.Convolver, backend.Indexer, backend.Merger,
// backend.Scorer, backend.Copier, backend.Differentiator and backend.Meter.
type Backend struct {
	opt     Options
	err     error // why the backend cannot be used
	kernels *vec.Kernels
	leave   func() // ends the use of workers; later calls do nothing

	// Every call holds running for reading. The first Close locks it for good, which waits for
	// the calls inside and refuses others meanwhile.
	running sync.RWMutex
	closing sync.Once
}

var (
	_ backend.Backend        = (*Backend)(nil)
	_ backend.Projector      = (*Backend)(nil)
	_ backend.Rotator        = (*Backend)(nil)
	_ backend.Normaliser     = (*Backend)(nil)
	_ backend.Gater          = (*Backend)(nil)
	_ backend.LinearAttender = (*Backend)(nil)
	_ backend.Convolver      = (*Backend)(nil)
	_ backend.Indexer        = (*Backend)(nil)
	_ backend.Merger         = (*Backend)(nil)
	_ backend.Scorer         = (*Backend)(nil)
	_ backend.Copier         = (*Backend)(nil)
	_ backend.Differentiator = (*Backend)(nil)
	_ backend.Meter          = (*Backend)(nil)
)

// New returns a backend with the given options. The caller must Close it.
func New(opt Options) *Backend {
	sharedPool.Open()
	be := &Backend{opt: opt, leave: sync.OnceFunc(sharedPool.Close)}
	be.kernels, be.err = kernelsOf(opt.Tier)
	// Safety net for callers that forget Close.
	runtime.AddCleanup(be, func(leave func()) { leave() }, be.leave)
	return be
}

// Open is New, but it returns ErrTier when the machine does not have the tier that opt.Tier or ATTN_CPU_TIER names.
func Open(opt Options) (*Backend, error) {
	be := New(opt)
	return be, be.err
}

// threads returns the maximum number of goroutines for a call that starts now. The pool grants
// no more than GOMAXPROCS, so more would only cost scratch memory.
func (be *Backend) threads() int {
	if all := runtime.GOMAXPROCS(0); be.opt.Threads <= 0 || be.opt.Threads > all {
		return all
	}
	return be.opt.Threads
}

// Alloc implements backend.Backend. It returns ErrShape for a shape that is
// negative or too large to index, and ErrMemory when there is not enough memory.
func (be *Backend) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (t backend.Tensor, err error) {
	return result(ctx, be, "alloc", func() (backend.Tensor, error) { return backend.AllocHost(dtype, shape) })
}

// Upload implements backend.Backend: it returns an alias of host, without a
// copy. It returns ErrDevice when host is not in host memory, and ErrReleased after
// Release.
func (be *Backend) Upload(ctx context.Context, host backend.Tensor) (t backend.Tensor, err error) {
	return result(ctx, be, "upload", host.Alias)
}

// Wait implements backend.Backend. Calls return when they are complete, so it returns at once.
func (be *Backend) Wait(ctx context.Context) error {
	return be.do(ctx, "wait", func() error { return nil })
}

// Close implements backend.Backend. It waits for running calls. With the last backend of
// the process the goroutines that help its calls end, too.
func (be *Backend) Close() error {
	be.closing.Do(be.running.Lock) // a second Close waits, too
	be.leave()
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

// Open implements backend.Driver. There is one CPU, so a selector is an error, ErrNoDevice.
func (driver) Open(selector string) (backend.Backend, error) {
	if selector != "" {
		return nil, fmt.Errorf("cpu: there is one device, open it as \"cpu\", not \"cpu:%s\": %w", selector, backend.ErrNoDevice)
	}
	return Open(Options{})
}

// tierEnv is the environment variable that selects the tier where Options.Tier is "".
const tierEnv = "ATTN_CPU_TIER"

// ErrTier reports a tier that the machine does not have. It wraps backend.ErrOption.
var ErrTier = fmt.Errorf("this machine has no such tier: %w", backend.ErrOption)

// Tiers returns the values of Options.Tier that this machine supports, the fastest first: "avx512" (AVX-512F, DQ and
// VL), "avx2" (with FMA and F16C), "neon" (every arm64, run on an emulator only), and always "gonum".
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
