package gpu

import (
	"context"
	"fmt"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/meter"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/gpu/internal/tunefile"
)

// Tuning selects how a device chooses among the variants of the prefill kernel. It changes the speed of calls and not the
// bits of their results, except that TunePlain has bits of its own.
type Tuning = tune.Mode

const (
	// TuneDefault is the value of the environment variable ATTN_GPU_TUNE (off, stored, first, plain). Without it, it is
	// TuneFirst on a GPU and TuneStored on a software driver, which takes seconds to compile a variant.
	TuneDefault = tune.Default
	// TuneOff applies a rule to the shape and the device's limits, and reads no file.
	TuneOff = tune.Off
	// TuneStored applies what attn tune or TuneFirst measured earlier, and the rule to other shapes.
	TuneStored = tune.Stored
	// TuneFirst also measures: the first call of a class of shapes, and Warmup for it,
	// take longer by about Options.TuneBudget. The choice is kept in Options.TuneFile.
	TuneFirst = tune.First
	// TunePlain runs the plain kernel, which is slower, for comparison.
	TunePlain = tune.Plain
)

type (
	// TuneEntry is the choice for a class of shapes on a device.
	TuneEntry = tune.Entry
	// TuneOptions are the options of [Backend.Tune].
	TuneOptions = tune.MeasureOptions
)

// TuneFile returns the default path of the tuning file: attn/tuning.json in the user's
// cache folder. It returns backend.ErrFile where the system names no such folder.
func TuneFile() (string, error) {
	return ofFile(tunefile.Path())
}

// ReadTuneFile returns the entries of a tuning file, none when it does not exist. Errors wrap backend.ErrFile.
func ReadTuneFile(path string) ([]TuneEntry, error) {
	return ofFile(tunefile.Read(path))
}

// ClearTuneFile removes a tuning file and returns the number of its entries. It leaves
// any other file and returns backend.ErrFile.
func ClearTuneFile(path string) (int, error) {
	return ofFile(tunefile.Clear(path))
}

// ofFile wraps an error of the tuning file.
func ofFile[T any](result T, err error) (T, error) {
	if err != nil {
		err = fmt.Errorf("%w: %w", err, backend.ErrFile)
	}
	return result, err
}

// Tune measures the variants for calls like c, even if that was done before, and keeps the choice in Options.TuneFile
// and for later calls. A variant counts if its results agree with those of the plain kernel within twice the error
// bound of package oracle, and with those of the other variants in every bit. c's operands need no memory.
//
// Tune returns the entry also with the error of a file that could not be written. It returns backend.ErrUnsupported
// when the register-tiled kernel cannot run c, and backend.ErrOption when tuning is off or plain.
func (b *Backend) Tune(ctx context.Context, c *backend.Call, opt TuneOptions) (TuneEntry, error) {
	return resultWithin(ctx, b, "tune", func() (e TuneEntry, err error) {
		if m := b.tuner.Mode; m == tune.Off || m == tune.Plain {
			return e, fmt.Errorf("tuning of %s is %s: %w", b.info.Name, m, backend.ErrOption)
		}
		a, err := b.newPrefill(c, b.choose)
		if err != nil {
			return e, err
		}
		s := a.shape()
		if len(s.Candidates()) == 0 {
			return e, fmt.Errorf("no variant of the register-tiled kernel fits (%s): %w", a.why, backend.ErrUnsupported)
		}
		return b.tuner.Measure(ctx, tuneRunner{b.dev, b}, s, opt)
	})
}

// tuneRunner runs the calls of package tune within a call of b.
type tuneRunner struct {
	*queue.Device
	b *Backend
}

func (r tuneRunner) Peak(ctx context.Context) (float64, error) { return meter.Peak(ctx, r.b.dev) }

func (r tuneRunner) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	return r.b.alloc(ctx, dtype, shape)
}

func (r tuneRunner) Download(ctx context.Context, host, src backend.Tensor) error {
	return r.b.read(ctx, host, src)
}

func (r tuneRunner) Run(ctx context.Context, c *backend.Call, v tune.Variant, rounds int) (time.Duration, error) {
	a, err := r.b.newPrefill(c, func(tune.Shape) (tune.Variant, string) { return v, "asked for" })
	if err != nil {
		return 0, err
	}
	if a.tiled != (v.Name != "") {
		return 0, fmt.Errorf("another kernel would run: %s", a.why)
	}
	return meter.Time(ctx, r.b.dev, func(run *queue.Runner) error {
		for range rounds {
			if err := run.Queue(a.op()); err != nil {
				return err
			}
		}
		return nil
	})
}

// measured returns the result of f, as a call of b.
func measured[T any](ctx context.Context, b *Backend, name string, f func() (T, error)) (T, error) {
	return resultWithin(ctx, b, name, func() (result T, err error) {
		if err := b.dev.Idle(ctx); err != nil { // f measures the device alone
			return result, err
		}
		return f()
	})
}

// PeakFLOPS measures the float32 operations a second of a kernel of multiply-adds: the
// fastest of three runs of 20 ms or more, by the device's clock where it has one.
func (b *Backend) PeakFLOPS(ctx context.Context) (float64, error) {
	return measured(ctx, b, "peak", func() (float64, error) { return meter.Peak(ctx, b.dev) })
}

// MatrixFLOPS measures the operations a second of a kernel of products of f16 matrices, as PeakFLOPS does. It returns
// backend.ErrUnsupported without matrix units.
func (b *Backend) MatrixFLOPS(ctx context.Context) (float64, error) {
	return measured(ctx, b, "peak of matrices", func() (float64, error) {
		m, why := b.matrices.Largest()
		if why != "" {
			return 0, fmt.Errorf("%s: %w", why, backend.ErrUnsupported)
		}
		return meter.MatrixPeak(ctx, b.dev, m)
	})
}

// ReadBandwidth measures the bytes a second that the whole device reads of the operands: the fastest of three runs of
// 20 ms or more. It returns 0 for less than 1 MiB, which does not keep a large GPU reading.
func (b *Backend) ReadBandwidth(ctx context.Context, operands ...backend.Tensor) (float64, error) {
	return measured(ctx, b, "bandwidth", func() (float64, error) {
		in := make([]backend.Operand, len(operands))
		for i, t := range operands {
			in[i] = backend.Operand{Name: fmt.Sprintf("operand %d", i), Tensor: t}
		}
		var pins backend.Pinned
		if err := pins.Pin(b, b.info.Name, nil, in); err != nil {
			return 0, err
		}
		defer pins.Unpin()
		return meter.Read(ctx, b.dev, operands)
	})
}

// LaunchTime measures the time from the submission to the end of an empty dispatch of one
// workgroup, with its pipeline, bindings and parameters in place.
func (b *Backend) LaunchTime(ctx context.Context) (time.Duration, error) {
	return measured(ctx, b, "launch", func() (time.Duration, error) { return meter.Launch(ctx, b.dev) })
}
