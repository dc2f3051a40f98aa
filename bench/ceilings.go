package bench

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

const (
	// memoryBytes is larger than the last cache of most machines.
	memoryBytes = 256 << 20
	// cacheBytes is larger than the first cache of a core and smaller than its last one of
	// its own; deviceCacheBytes is smaller than the last cache of most GPUs.
	cacheBytes       = 256 << 10
	deviceCacheBytes = 2 << 20
	// ceilingRounds is the number of measurements of each ceiling.
	ceilingRounds = 5
)

// Contender is one of several devices whose ceilings are measured.
type Contender struct {
	// Name identifies it in a report.
	Name   string
	Device *kernels.Device
}

// Ceilings measures the ceilings of all contenders in turns; missing is as in [Config].
// The error is that of a measurement, or of ctx.
func Ceilings(ctx context.Context, contenders []Contender, missing ...string) (*report.Report, error) {
	r := newReport(Config{Missing: missing})
	var tensors []kernels.Tensor // for each contender one that fits no cache, and one that does
	defer func() {
		for _, t := range tensors {
			t.Release()
		}
	}()
	for _, c := range contenders {
		info := c.Device.Info()
		r.Environment.Backends = append(r.Environment.Backends, info)
		r.Ceilings = append(r.Ceilings, report.Ceiling{Contender: c.Name, Backend: info.Name, Threads: info.Threads})
		sizes := [2]int{memoryBytes, deviceCacheBytes}
		if info.Threads > 0 {
			sizes[1] = cacheBytes * info.Threads
		}
		for _, size := range sizes {
			var t kernels.Tensor
			if _, ok := c.Device.Backend().(backend.BandwidthMeter); ok {
				var err error
				if t, err = ones(ctx, c.Device, size); err != nil {
					return nil, fmt.Errorf("ceilings of %s: %w", c.Name, err)
				}
			}
			tensors = append(tensors, t)
		}
	}
	for range ceilingRounds {
		for i, c := range contenders {
			if err := measureCeiling(ctx, &r.Ceilings[i], c.Device.Backend(), tensors[2*i], tensors[2*i+1]); err != nil {
				return nil, fmt.Errorf("ceilings of %s: %w", c.Name, err)
			}
		}
	}
	r.Interrupted = ctx.Err() != nil
	return r, nil
}

// ones returns a tensor of that many bytes filled with ones: pages that are never written
// may all be the same page of memory.
func ones(ctx context.Context, dev *kernels.Device, bytes int) (kernels.Tensor, error) {
	data := slices.Repeat([]float32{1}, bytes/4)
	return dev.FromFloat32(ctx, kernels.F32, data, kernels.Shape{1, 1, 1, len(data)})
}

// measureCeiling measures once and keeps the best values.
func measureCeiling(ctx context.Context, c *report.Ceiling, be backend.Backend, memory, cache kernels.Tensor) error {
	best := func(to **float64, rate float64) {
		if rate > 0 && (*to == nil || rate/1e9 > **to) {
			*to = new(rate / 1e9)
		}
	}
	peak, read, launch, err := meters(ctx, be, memory)
	if err != nil {
		return err
	}
	best(&c.GFLOPS, peak)
	best(&c.MemoryGBS, read)
	if launch > 0 && (c.LaunchS == nil || launch < *c.LaunchS) {
		c.LaunchS = report.Figure(launch)
	}
	if meter, ok := be.(backend.BandwidthMeter); ok {
		read, err := meter.ReadBandwidth(ctx, cache)
		if err != nil {
			return err
		}
		best(&c.CacheGBS, read)
	}
	return nil
}
