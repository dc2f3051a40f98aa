package gpu

import (
	"context"
	"fmt"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/meter"
)

var (
	_ backend.PeakMeter      = (*Backend)(nil)
	_ backend.BandwidthMeter = (*Backend)(nil)
	_ backend.LaunchMeter    = (*Backend)(nil)
	_ backend.CeilingMeter   = (*Backend)(nil)
)

// measured returns the result of f, as a call of b.
func measured[T any](ctx context.Context, b *Backend, name string, f func() (T, error)) (result T, err error) {
	err = b.within(ctx, name, func() error {
		if err := b.dev.Idle(ctx); err != nil { // f measures the device alone
			return err
		}
		result, err = f()
		return err
	})
	return result, err
}

// PeakFLOPS measures the float32 operations a second of a kernel of multiply-adds: the
// fastest of three runs of 20 ms or more, by the device's clock where it has one.
func (b *Backend) PeakFLOPS(ctx context.Context) (float64, error) {
	return measured(ctx, b, "peak", func() (float64, error) { return meter.Peak(ctx, b.dev) })
}

// ReadBandwidth measures the bytes a second that the whole device reads of the operands:
// the fastest of three runs of 20 ms or more. It returns 0 for less than 1 MiB, which
// does not keep a large GPU reading.
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

// Ceilings measures, in bytes a second: "copy", reads and writes of device memory, each
// byte counted twice; "workgroup memory", vec4 loads; "upload" and "download", between
// host memory and the device.
func (b *Backend) Ceilings(ctx context.Context) ([]backend.Ceiling, error) {
	ctx = backend.WithTrace(ctx, &backend.Trace{}) // these are no calls of the caller's
	var all []backend.Ceiling
	within := func(measure func() (float64, error)) func() (float64, error) {
		return func() (float64, error) { return measured(ctx, b, "ceilings", measure) }
	}
	for _, c := range []struct {
		name    string
		measure func() (float64, error)
	}{
		{"copy", within(func() (float64, error) { return meter.Copy(ctx, b.dev, b.info.Type == backend.CPU) })},
		{"workgroup memory", within(func() (float64, error) { return meter.WorkgroupMemory(ctx, b.dev) })},
		// Upload and Download of b are calls of their own.
		{"upload", func() (float64, error) { return meter.Upload(ctx, b.dev, b) }},
		{"download", func() (float64, error) { return meter.Download(ctx, b.dev, b) }},
	} {
		rate, err := c.measure()
		if err != nil {
			return nil, err
		}
		all = append(all, backend.Ceiling{Name: c.name, BytesPerSecond: rate})
	}
	return all, nil
}
