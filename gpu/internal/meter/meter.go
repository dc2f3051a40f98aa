// Package meter measures what a device can do at most: multiply-adds, reads and copies
// of device memory, loads of workgroup memory, transfers, and the time of an empty
// dispatch. Benchmarks report kernels as a share of these ceilings.
package meter

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/shaders"
)

const (
	probeTime    = 20 * time.Millisecond // long compared with a submission, 0.1 to 0.5 ms
	probeRepeats = 3
	probeThreads = 64   // of a workgroup, in all the kernels below
	probeGroups  = 4096 // workgroups: 30 for each of the 132 SMs of the largest GPUs, evenly

	peakOps = 64 // operations of a thread in a round of peak.wgsl

	// copyBytes is several times the last cache of GPUs (50 MiB in an H100).
	// copyBytesCPU keeps a software driver's share of the machine's memory small.
	copyBytes    = 256 << 20
	copyBytesCPU = 64 << 20
	moveBytes    = 64 // of a thread in a round of copy.wgsl and banks.wgsl

	readChunk   = 8192 // bytes of a chunk in read.wgsl
	readWindows = 4    // that read.wgsl binds
	// readGroups is a prime, so that a workgroup rarely reads the same chunk again,
	// which would be in the cache of its processor.
	readGroups = 4093
	// readLeast is the fewest bytes that keep all of a large GPU reading.
	readLeast = 1 << 20

	launches = 32 // of which Launch returns the median
	// transferBytes is the size of a transfer: two pieces, so that one is prepared while
	// the other is copied, and no more than the pool keeps.
	transferBytes = 2 * cut.TransferBytes
)

// probe is a dispatch of a kernel on a row of workgroups.
type probe struct {
	kernel  shaders.Variant
	windows []cut.Window
	params  shaders.Params
	groups  int
}

func (p probe) queue(r *queue.Runner) error {
	return r.Dispatch(p.kernel, p.windows, p.params, [3]uint32{uint32(p.groups), 1, 1})
}

// fastest runs the probes of a number of rounds. It doubles the rounds until they take
// probeTime, or most is reached, and repeats them. It returns the highest rate of units,
// of which a round has each.
func fastest(ctx context.Context, d *queue.Device, name string, each float64, most int, probes func(rounds int) []probe) (rate float64, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", name, err)
		}
	}()
	var kernel time.Duration
	r := d.NewRunner(backend.WithTrace(ctx, &backend.Trace{Kernel: func(took time.Duration) { kernel += took }}))
	defer func() { r.Finish(err) }()
	run := func(rounds int) (time.Duration, error) {
		kernel = 0
		begin := time.Now()
		for _, p := range probes(rounds) {
			if err := p.queue(r); err != nil {
				return 0, err
			}
		}
		err := r.Flush()
		if kernel > 0 {
			return kernel, err
		}
		return time.Since(begin), err
	}
	if _, err := run(1); err != nil { // compiles
		return 0, err
	}
	for n, rounds := 0, 1; n < probeRepeats; {
		took, err := run(rounds)
		if err != nil {
			return 0, err
		}
		if took < probeTime && 2*rounds <= most {
			rounds *= 2
			continue
		}
		rate = max(rate, each*float64(rounds)/max(took, 1).Seconds())
		n++
	}
	return rate, nil
}

// grid returns the number of workgroups, up to most, that store size bytes each within
// the limits, and the bytes of all of them.
func grid(d *queue.Device, most, size int) (groups int, bytes uint64) {
	groups = min(most, int(d.Limits.MaxComputeWorkgroupsPerDimension), int(queue.MaxWindow(d.Limits)/uint64(size)))
	groups = max(groups, 1)
	return groups, uint64(groups * size)
}

// borrow calls f with windows on n buffers of so many bytes.
func borrow(ctx context.Context, d *queue.Device, n int, bytes uint64, f func(w []cut.Window) (float64, error)) (float64, error) {
	var windows []cut.Window
	for range n {
		buf, err := d.Pool.Get(ctx, bytes, resource.StorageUsage)
		if err != nil {
			return 0, queue.Translate(fmt.Sprintf("%d bytes", bytes), err)
		}
		defer d.Pool.Put(buf, resource.StorageUsage, false)
		windows = append(windows, cut.Window{Buf: buf, Size: bytes})
	}
	return f(windows)
}

// onGrid measures a kernel that reads no buffer and stores size bytes a thread. It
// returns a rate of units, of which a thread has each in a round.
func onGrid(ctx context.Context, d *queue.Device, k shaders.Variant, size, each int, params func(rounds int) shaders.Params) (float64, error) {
	groups, bytes := grid(d, probeGroups, probeThreads*size)
	return borrow(ctx, d, 1, bytes, func(out []cut.Window) (float64, error) {
		return fastest(ctx, d, k.Name(), float64(groups*probeThreads*each), cut.MaxLoops, func(rounds int) []probe {
			return []probe{{k, out, params(rounds), groups}}
		})
	})
}

// Peak returns the float32 operations a second of a kernel of multiply-adds.
func Peak(ctx context.Context, d *queue.Device) (float64, error) {
	return onGrid(ctx, d, shaders.Peak, 4, peakOps, func(rounds int) shaders.Params {
		return &shaders.PeakParams{Rounds: rounds, Factor: 0.999, Addend: 0.001}
	})
}

// WorkgroupMemory returns the bytes a second of vec4 loads from workgroup memory.
func WorkgroupMemory(ctx context.Context, d *queue.Device) (float64, error) {
	return onGrid(ctx, d, shaders.Banks, 16, moveBytes, func(rounds int) shaders.Params { return &shaders.BanksParams{Rounds: rounds} })
}

// Copy returns the bytes a second that are read and written in a copy of device memory.
// Each byte counts twice.
func Copy(ctx context.Context, d *queue.Device, software bool) (float64, error) {
	most := min(copyBytes, queue.MaxWindow(d.Limits), d.Limits.MaxBufferSize)
	if software {
		most = min(most, copyBytesCPU)
	}
	groups, lap := grid(d, probeGroups, probeThreads*moveBytes)
	laps := max(most/lap, 1)
	return borrow(ctx, d, 2, laps*lap, func(w []cut.Window) (float64, error) {
		return fastest(ctx, d, "copy", 2*float64(lap), cut.MaxLoops, func(rounds int) []probe {
			return []probe{{shaders.Copy, w, &shaders.CopyParams{Rounds: rounds, Laps: int(laps), Threads: groups * probeThreads}, groups}}
		})
	})
}

// Read returns the bytes a second that the device reads of the operands. It returns 0
// for less than 1 MiB, which does not keep a large GPU reading.
func Read(ctx context.Context, d *queue.Device, operands []backend.Tensor) (float64, error) {
	var all []cut.Window
	bytes := uint64(0)
	for _, t := range operands {
		for _, w := range spans(d, t) {
			all = append(all, w)
			bytes += w.Size
		}
	}
	if bytes < readLeast {
		return 0, nil
	}
	groups, size := grid(d, readGroups, probeThreads*16)
	return borrow(ctx, d, 1, size, func(out []cut.Window) (float64, error) {
		var parts []readPart
		most := cut.MaxLoops
		for some := range slices.Chunk(all, readWindows) {
			p := newReadPart(some, out[0])
			parts = append(parts, p)
			// The numbers of a thread's chunks have 32 bits.
			most = min(most, min(cut.MaxLoops, math.MaxUint32/groups-1)*groups/p.params.Chunks)
		}
		return fastest(ctx, d, "bandwidth", float64(bytes), max(most, 1), func(rounds int) []probe {
			probes := make([]probe, len(parts))
			for i, p := range parts {
				probes[i] = p.probe(rounds, groups)
			}
			return probes
		})
	})
}

// spans returns the windows from t's first element to its last, in whole vec4. There
// are none of a tensor in host memory.
func spans(d *queue.Device, t backend.Tensor) []cut.Window {
	if t.IsZero() || t.Shape().Elements() == 0 || cut.StoreOf(t).Host != nil {
		return nil
	}
	size := uint64(t.DType().Size())
	first := uint64(t.Offset()) * size
	end := first + uint64(cut.Extent(t.Shape(), t.Strides()))*size
	align := max(uint64(d.Limits.MinStorageBufferOffsetAlignment), 16)
	most := queue.MaxWindow(d.Limits) / align * align
	var all []cut.Window
	_ = cut.StoreOf(t).Each(first/align*align, end, func(buf cut.Buffer, at, n uint64) error { // f never fails
		for stop := at + n; at < stop; at += most {
			if n := min(stop-at, most) &^ 15; n > 0 {
				all = append(all, cut.Window{Buf: buf, Offset: at, Size: n})
			}
		}
		return nil
	})
	return all
}

// readPart is one dispatch of read.wgsl.
type readPart struct {
	windows []cut.Window // readWindows, and the output
	params  shaders.ReadParams
}

func newReadPart(some []cut.Window, out cut.Window) readPart {
	windows := make([]cut.Window, readWindows, readWindows+1)
	copy(windows, some)
	chunks := 0
	var ends, last [readWindows]int // last is in vec4
	for i, w := range windows {
		if w.Size > 0 {
			chunks += int((w.Size + readChunk - 1) / readChunk)
			last[i] = int(w.Size/16) - 1
		}
		ends[i] = chunks
	}
	return readPart{append(windows, out), shaders.ReadParams{
		Chunks: chunks, End0: ends[0], End1: ends[1], End2: ends[2], Last0: last[0], Last1: last[1], Last2: last[2], Last3: last[3],
	}}
}

func (part readPart) probe(rounds, groups int) probe {
	part.params.All = rounds * part.params.Chunks
	return probe{shaders.Read, part.windows, &part.params, groups}
}

// Launch returns the median time from the submission to the end of an empty dispatch of
// one workgroup, with its pipeline, bindings and parameters in place.
func Launch(ctx context.Context, d *queue.Device) (median time.Duration, err error) {
	peak := d.Pipelines.Of(shaders.Peak)
	p, err := d.Pipelines.Acquire(ctx, peak)
	if err != nil {
		return 0, err
	}
	defer d.Pipelines.Release(peak)
	uniform, err := d.Pool.Get(ctx, 16, resource.UniformUsage)
	if err != nil {
		return 0, queue.Translate("launch", err)
	}
	defer d.Pool.Put(uniform, resource.UniformUsage, false)
	if err := d.Port.Write(uniform, 0, make([]byte, 16)); err != nil { // no rounds
		return 0, queue.Translate("launch", err)
	}
	empty := []port.Command{{Pipeline: p, Groups: [3]uint32{1, 1, 1}, Bindings: []port.Binding{
		{Buffer: d.Blank(), Size: resource.MinBytes}, {Buffer: uniform, Size: 16},
	}}}
	times := make([]time.Duration, launches)
	for i := range times {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		begin := time.Now()
		if err := d.Submit(ctx, empty); err != nil {
			return 0, err
		}
		times[i] = time.Since(begin)
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// Upload returns the bytes a second of [backend.Backend.Upload] to d.
func Upload(ctx context.Context, d *queue.Device, be backend.Backend) (float64, error) {
	return transfer(d, func(host backend.Tensor) (time.Duration, error) {
		begin := time.Now()
		t, err := be.Upload(ctx, host)
		if err != nil {
			return 0, err
		}
		defer t.Release()
		err = d.Submit(ctx, nil) // the last piece starts with the next submission
		return time.Since(begin), err
	})
}

// Download returns the bytes a second of [backend.Backend.Download] from d.
func Download(ctx context.Context, d *queue.Device, be backend.Backend) (float64, error) {
	return transfer(d, func(host backend.Tensor) (time.Duration, error) {
		t, err := be.Alloc(ctx, host.DType(), host.Shape())
		if err != nil {
			return 0, err
		}
		defer t.Release()
		begin := time.Now()
		err = be.Download(ctx, host, t)
		return time.Since(begin), err
	})
}

// transfer returns the rate of the fastest of a few transfers. The first one creates
// buffers.
func transfer(d *queue.Device, move func(host backend.Tensor) (time.Duration, error)) (float64, error) {
	bytes := int(min(transferBytes, d.Limits.MaxBufferSize) &^ 3)
	host, err := backend.HostF32(make([]float32, bytes/4), backend.Shape{1, 1, 1, bytes / 4})
	if err != nil {
		return 0, err
	}
	best := time.Duration(math.MaxInt64)
	for range 1 + probeRepeats {
		took, err := move(host)
		if err != nil {
			return 0, err
		}
		best = max(min(best, took), 1)
	}
	return float64(bytes) / best.Seconds(), nil
}
