package bench

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Ceiling is what a contender reaches at most, whatever it computes. Rates are the
// best of a few measurements; null is 'cannot be measured'.
type Ceiling struct {
	// Contender is its name, Backend that of its device.
	Contender string `json:"contender"`
	Backend   string `json:"backend"`
	// Threads is how many threads it computes with; 0 when not on a CPU's.
	Threads int `json:"threads"`
	// GFLOPS is the peak of fused multiply-adds in registers, in 10^9
	// operations a second.
	GFLOPS *float64 `json:"gflops"`
	// MemoryGBS and CacheGBS are the rates of reading [MemoryBytes] in all, and
	// [CacheBytes] for each thread, over and over, in 10^9 bytes a second.
	MemoryGBS *float64 `json:"memory_gbs"`
	CacheGBS  *float64 `json:"cache_gbs"`
}

const (
	// MemoryBytes is more than the last cache of most machines holds.
	MemoryBytes = 256 << 20
	// CacheBytes is more than the first cache of a core holds and less than
	// what it has to itself in all.
	CacheBytes = 256 << 10
	// ceilingRounds is how often each ceiling is measured.
	ceilingRounds = 5
)

// Ceilings measures the ceilings of all contenders in turns, round after round, and
// reports them. The error is that of a measurement, or of ctx.
func Ceilings(ctx context.Context, contenders []Contender) (*Report, error) {
	r, free := newRunner(ctx, Config{}, 1)
	defer free()
	type tensors struct{ memory, cache backend.Tensor }
	sets := make([]tensors, len(contenders))
	defer func() {
		for _, s := range sets {
			s.memory.Release()
			s.cache.Release()
		}
	}()
	for i, c := range contenders {
		info := c.Backend.Info()
		r.report.Environment.Backends = append(r.report.Environment.Backends, info)
		r.report.Ceilings = append(r.report.Ceilings, Ceiling{Contender: c.Name, Backend: info.Name, Threads: info.Threads})
		if _, ok := c.Backend.(backend.BandwidthMeter); !ok {
			continue
		}
		var err error
		if sets[i].memory, err = written(ctx, c.Backend, MemoryBytes); err == nil {
			sets[i].cache, err = written(ctx, c.Backend, CacheBytes*max(info.Threads, 1))
		}
		if err != nil {
			return nil, fmt.Errorf("ceilings of %s: %w", c.Name, err)
		}
	}
	for range ceilingRounds {
		for i, c := range contenders {
			c.use()
			if err := r.report.Ceilings[i].measure(ctx, c.Backend, sets[i].memory, sets[i].cache); err != nil {
				return nil, fmt.Errorf("ceilings of %s: %w", c.Name, err)
			}
		}
	}
	return r.report, nil
}

// written returns a tensor of so many bytes in be's memory that were written: pages
// that were not are all the same one.
func written(ctx context.Context, be backend.Backend, bytes int) (backend.Tensor, error) {
	data := make([]float32, bytes/4)
	for i := range data {
		data[i] = 1
	}
	return kernels.FromFloat32(ctx, be, backend.F32, data, backend.Shape{1, 1, 1, len(data)})
}

// measure measures what be can measure, once, and keeps the best.
func (c *Ceiling) measure(ctx context.Context, be backend.Backend, memory, cache backend.Tensor) error {
	best := func(to **float64, rate float64, err error) error {
		if err == nil && rate > 0 && (*to == nil || rate/1e9 > **to) {
			*to = figure(rate / 1e9)
		}
		return err
	}
	if meter, ok := be.(backend.PeakMeter); ok {
		rate, err := meter.PeakFLOPS(ctx)
		if err := best(&c.GFLOPS, rate, err); err != nil {
			return err
		}
	}
	if meter, ok := be.(backend.BandwidthMeter); ok {
		rate, err := meter.ReadBandwidth(ctx, memory)
		if err := best(&c.MemoryGBS, rate, err); err != nil {
			return err
		}
		rate, err = meter.ReadBandwidth(ctx, cache)
		return best(&c.CacheGBS, rate, err)
	}
	return nil
}

// writeCeilings writes the table of Ceilings.
func (r *Report) writeCeilings(w io.Writer) error {
	var b strings.Builder
	r.head(&b)
	fmt.Fprintf(&b, "\n%8s %8s %16s %18s %17s\n", "tier", "threads", "FMA, GFLOP/s", "read memory, GB/s", "read cache, GB/s")
	for _, c := range r.Ceilings {
		fmt.Fprintf(&b, "%8s %8d %16s %18s %17s\n", c.Contender, c.Threads,
			shown(c.GFLOPS, number3), shown(c.MemoryGBS, number3), shown(c.CacheGBS, number3))
	}
	fmt.Fprintf(&b, `
FMA        float32 fused multiply-adds (2 operations) in registers
memory     %s in all, over and over; cache: %s a thread
All are the best of %d rounds, in which each has its turn.
`, size(MemoryBytes), size(CacheBytes), ceilingRounds)
	_, err := io.WriteString(w, b.String())
	return err
}
