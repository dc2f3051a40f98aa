package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
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
	// [CacheBytes] for each thread ([DeviceCacheBytes] where there are none), over
	// and over, in 10^9 bytes a second.
	MemoryGBS *float64 `json:"memory_gbs"`
	CacheGBS  *float64 `json:"cache_gbs"`
	// LaunchS is the time in seconds of a call that does nothing.
	LaunchS *float64 `json:"launch_s"`
	// Others are what else the backend measures of itself.
	Others []Rate `json:"others"`
}

// Rate is a named ceiling, in 10^9 bytes a second.
type Rate struct {
	Name string  `json:"name"`
	GBS  float64 `json:"gbs"`
}

const (
	// MemoryBytes is more than the last cache of most machines holds.
	MemoryBytes = 256 << 20
	// CacheBytes is more than the first cache of a core holds and less than
	// what it has to itself in all.
	CacheBytes = 256 << 10
	// DeviceCacheBytes is less than the last cache of most GPUs holds.
	DeviceCacheBytes = 2 << 20
	// ceilingRounds is how often each ceiling is measured.
	ceilingRounds = 5
)

// Ceilings measures the ceilings of all contenders in turns, round after round, and
// reports them; missing goes into the report as in [Config]. The error is that of a
// measurement, or of ctx.
func Ceilings(ctx context.Context, contenders []Contender, missing ...string) (*Report, error) {
	r, free := newRunner(ctx, Config{Missing: missing}, 1)
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
		r.report.Ceilings = append(r.report.Ceilings, Ceiling{Contender: c.Name, Backend: info.Name, Threads: info.Threads, Others: []Rate{}})
		if _, ok := c.Backend.(backend.BandwidthMeter); !ok {
			continue
		}
		var err error
		if sets[i].memory, err = written(ctx, c.Backend, MemoryBytes); err == nil {
			cache := DeviceCacheBytes
			if info.Threads > 0 {
				cache = CacheBytes * info.Threads
			}
			sets[i].cache, err = written(ctx, c.Backend, cache)
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
		if err := best(&c.CacheGBS, rate, err); err != nil {
			return err
		}
	}
	if meter, ok := be.(backend.LaunchMeter); ok {
		took, err := meter.LaunchTime(ctx)
		if err != nil {
			return err
		}
		if s := took.Seconds(); c.LaunchS == nil || s < *c.LaunchS {
			c.LaunchS = figure(s)
		}
	}
	if meter, ok := be.(backend.CeilingMeter); ok {
		all, err := meter.Ceilings(ctx)
		if err != nil {
			return err
		}
		c.others(all)
	}
	return nil
}

// others keeps the best of each.
func (c *Ceiling) others(all []backend.Ceiling) {
	for _, o := range all {
		i := slices.IndexFunc(c.Others, func(r Rate) bool { return r.Name == o.Name })
		if i < 0 {
			i = len(c.Others)
			c.Others = append(c.Others, Rate{Name: o.Name})
		}
		c.Others[i].GBS = max(c.Others[i].GBS, o.BytesPerSecond/1e9)
	}
}

// writeDevice writes the ceilings that only a device with a queue has.
func (r *Report) writeDevice(b *strings.Builder, c *Ceiling) {
	if c.LaunchS == nil && len(c.Others) == 0 {
		return
	}
	fmt.Fprintf(b, "\n%s", c.Contender)
	for _, info := range r.Environment.Backends {
		if info.Name == c.Backend {
			fmt.Fprintf(b, " · %s · %s · %s", info.Device, info.Provider, info.Driver)
			break
		}
	}
	b.WriteByte('\n')
	if c.LaunchS != nil {
		fmt.Fprintf(b, "  %-18s %9s\n", "empty launch", duration(*c.LaunchS))
	}
	for _, o := range c.Others {
		fmt.Fprintf(b, "  %-18s %9s GB/s\n", o.Name, number3(o.GBS))
	}
}

// writeCeilings writes the table of Ceilings.
func (r *Report) writeCeilings(w io.Writer) error {
	var b strings.Builder
	r.head(&b)
	fmt.Fprintf(&b, "\n%8s %8s %16s %18s %17s\n", "tier", "threads", "FMA, GFLOP/s", "read memory, GB/s", "read cache, GB/s")
	for _, c := range r.Ceilings {
		threads := "-"
		if c.Threads > 0 {
			threads = strconv.Itoa(c.Threads)
		}
		fmt.Fprintf(&b, "%8s %8s %16s %18s %17s\n", c.Contender, threads,
			shown(c.GFLOPS, number3), shown(c.MemoryGBS, number3), shown(c.CacheGBS, number3))
	}
	for _, c := range r.Ceilings {
		r.writeDevice(&b, &c)
	}
	for _, m := range r.Environment.Missing {
		fmt.Fprintf(&b, "\n%s\n", m)
	}
	fmt.Fprintf(&b, `
FMA        float32 fused multiply-adds (2 operations) in registers
memory     %s in all, over and over; cache: %s a thread, %s on a device without threads
All are the best of %d rounds, in which each has its turn.
`, size(MemoryBytes), size(CacheBytes), size(DeviceCacheBytes), ceilingRounds)
	_, err := io.WriteString(w, b.String())
	return err
}
