package gpu

import (
	"context"
	"fmt"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

const (
	peakOps     = 64                    // operations of a thread in a round, see peak.wgsl
	peakGroups  = 4096                  // workgroups: 30 for each of the 132 SMs of the largest GPUs, evenly
	peakTime    = 20 * time.Millisecond // long against the cost of a submission, 0.1 to 0.5 ms
	peakRepeats = 3
	peakThreads = 64
)

// PeakFLOPS measures float32 operations a second of an FMA-only kernel: the
// fastest of three runs of 20 ms or more, by the clock on the wall.
func (b *Backend) PeakFLOPS(ctx context.Context) (float64, error) {
	if err := b.enter(ctx); err != nil {
		return 0, err
	}
	defer b.leave()
	r := &runner{b: b, ctx: ctx}
	groups := min(peakGroups, int(b.limits.MaxComputeWorkgroupsPerDimension))
	size := uint64(groups * peakThreads * 4)
	if size > maxWindow(b.limits) {
		groups = max(int(maxWindow(b.limits)/(peakThreads*4)), 1)
		size = uint64(groups * peakThreads * 4)
	}
	buf, err := b.pool.get(size, storageUsage)
	if err != nil {
		return 0, translate("peak", err)
	}
	defer b.pool.put(buf, storageUsage)

	run := func(rounds int) (time.Duration, error) {
		var p params
		p.u32(rounds)
		p.f32(0.999)
		p.f32(0.001)
		p.pad()
		start := time.Now()
		if err := r.add(step{variant: variant{shaders.Peak, nil}, windows: []window{{buf, 0, size}}, params: p, groups: [3]uint32{uint32(groups), 1, 1}}); err != nil {
			return 0, err
		}
		err := r.flush()
		return time.Since(start), err
	}
	if _, err := run(1); err != nil { // compiles
		return 0, fmt.Errorf("peak: %w", err)
	}
	best := 0.0
	for rounds, n := 8, 0; n < peakRepeats; {
		took, err := run(rounds)
		if err != nil {
			return 0, fmt.Errorf("peak: %w", err)
		}
		if took < peakTime && 2*rounds < maxLoops {
			rounds *= 2
			continue
		}
		n++
		best = max(best, float64(groups)*peakThreads*peakOps*float64(rounds)/took.Seconds())
	}
	if best == 0 {
		return 0, fmt.Errorf("peak: %s: %w", b.info.Name, backend.ErrUnsupported)
	}
	return best, nil
}
