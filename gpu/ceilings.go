package gpu

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
	"github.com/seed90331342/attn/shaders"
)

var (
	_ backend.BandwidthMeter = (*Backend)(nil)
	_ backend.LaunchMeter    = (*Backend)(nil)
	_ backend.CeilingMeter   = (*Backend)(nil)
)

const (
	probeTime    = 20 * time.Millisecond // long against the cost of a submission, 0.1 to 0.5 ms
	probeRepeats = 3
	probeThreads = 64   // of a workgroup, in all the kernels below
	probeGroups  = 4096 // workgroups: 30 for each of the 132 SMs of the largest GPUs, evenly

	peakOps = 64 // operations of a thread in a round, see peak.wgsl

	// copyBytes is several times the last cache of GPUs (50 MiB in an H100);
	// copyBytesCPU keeps a software driver's share of the machine's memory small.
	copyBytes    = 256 << 20
	copyBytesCPU = 64 << 20
	moveBytes    = 64 // of a thread in a round, see copy.wgsl and banks.wgsl

	readChunk   = 8192 // bytes, see read.wgsl
	readWindows = 4    // see read.wgsl
	// readGroups is a prime, so that a workgroup hardly ever meets the same chunk
	// again, which it would find in the cache of its own processor.
	readGroups = 4093
	// readLeast is the fewest bytes that keep all of a large GPU reading.
	readLeast = 1 << 20

	launches = 32 // of which LaunchTime takes the median
	// transferProbe is what upload and download move: two pieces, so that one
	// is prepared while the other moves, and no more than the pool keeps.
	transferProbe = 2 * cut.TransferBytes
)

// PeakFLOPS measures float32 operations a second of an FMA-only kernel: the
// fastest of three runs of 20 ms or more, by the device's clock where it has one.
func (b *Backend) PeakFLOPS(ctx context.Context) (float64, error) {
	if err := b.enter(ctx); err != nil {
		return 0, err
	}
	defer b.leave()
	return b.peak(ctx)
}

// peak is PeakFLOPS in a call.
func (b *Backend) peak(ctx context.Context) (float64, error) {
	return b.onGrid(ctx, shaders.Peak, 4, peakOps, func(rounds int) shaders.Params {
		return &shaders.PeakParams{Rounds: rounds, Factor: 0.999, Addend: 0.001}
	})
}

// onGrid measures a kernel that reads no buffer and stores size bytes a thread:
// each units a second, of which a thread makes as many a round.
func (b *Backend) onGrid(ctx context.Context, k shaders.Kernel, size, each int, params func(rounds int) shaders.Params) (float64, error) {
	groups, bytes := b.grid(probeGroups, probeThreads*size)
	out, err := b.dev.Pool.Get(bytes, queue.StorageUsage)
	if err != nil {
		return 0, queue.Translate(k.Name, err)
	}
	defer b.dev.Pool.Put(out, queue.StorageUsage)
	rounds, took, err := b.fastest(ctx, cut.MaxLoops, func(rounds int) []probe {
		return []probe{{k, []cut.Window{{Buf: out, Size: bytes}}, params(rounds), groups}}
	})
	if err != nil {
		return 0, fmt.Errorf("%s: %w", k.Name, err)
	}
	return float64(groups) * probeThreads * float64(each) * float64(rounds) / took.Seconds(), nil
}

// probe is a dispatch of a kernel on a line of workgroups.
type probe struct {
	kernel  shaders.Kernel
	windows []cut.Window
	params  shaders.Params
	groups  int
}

func (p probe) add(r *queue.Runner) error {
	return r.Dispatch(queue.Variant{Kernel: p.kernel}, p.windows, p.params, [3]uint32{uint32(p.groups), 1, 1})
}

// grid returns how many workgroups, at most most, the limits allow that store size
// bytes each, and how much that is in all.
func (b *Backend) grid(most, size int) (groups int, bytes uint64) {
	groups = min(most, int(b.dev.Limits.MaxComputeWorkgroupsPerDimension), int(queue.MaxWindow(b.dev.Limits)/uint64(size)))
	groups = max(groups, 1)
	return groups, uint64(groups * size)
}

// fastest runs the steps that make returns for a number of rounds, twice as many
// until that takes long enough or the next would be over most, and then some times
// more. It returns the rounds and the shortest time.
func (b *Backend) fastest(ctx context.Context, most int, make func(rounds int) []probe) (rounds int, best time.Duration, err error) {
	var kernel time.Duration
	ctx = backend.WithTrace(ctx, &backend.Trace{Kernel: func(took time.Duration) { kernel += took }})
	r := b.dev.NewRunner(ctx)
	defer func() { r.Finish(err) }()
	run := func(rounds int) (time.Duration, error) {
		kernel = 0
		begin := time.Now()
		for _, s := range make(rounds) {
			if err := s.add(r); err != nil {
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
		return 0, 0, err
	}
	best = math.MaxInt64
	for n, rounds := 0, 1; ; {
		took, err := run(rounds)
		if err != nil {
			return 0, 0, err
		}
		if took < probeTime && 2*rounds <= most {
			rounds *= 2
			continue
		}
		best = min(best, max(took, 1))
		if n++; n == probeRepeats {
			return rounds, best, nil
		}
	}
}

// ReadBandwidth measures bytes a second that all of the device reads of the
// operands, together as often as 20 ms take: the fastest of three runs. It is 0
// for less than 1 MiB, which does not keep a large GPU reading.
func (b *Backend) ReadBandwidth(ctx context.Context, operands ...backend.Tensor) (float64, error) {
	if err := b.enter(ctx); err != nil {
		return 0, err
	}
	defer b.leave()
	in := make([]backend.Operand, len(operands))
	for i, t := range operands {
		in[i] = backend.Operand{Name: fmt.Sprintf("operand %d", i), Tensor: t}
	}
	var pins backend.Pinned
	if err := pins.Pin(b, b.info.Name, nil, in); err != nil {
		return 0, fmt.Errorf("bandwidth: %w", err)
	}
	defer pins.Unpin()
	var spans []cut.Window
	bytes := uint64(0)
	for _, t := range operands {
		for _, w := range b.spans(t) {
			spans = append(spans, w)
			bytes += w.Size
		}
	}
	if bytes < readLeast {
		return 0, nil
	}
	groups, size := b.grid(readGroups, probeThreads*16)
	out, err := b.dev.Pool.Get(size, queue.StorageUsage)
	if err != nil {
		return 0, queue.Translate("bandwidth", err)
	}
	defer b.dev.Pool.Put(out, queue.StorageUsage)

	var parts []readPart
	most := cut.MaxLoops
	for some := range slices.Chunk(spans, readWindows) {
		p := newReadPart(some, cut.Window{Buf: out, Size: size})
		parts = append(parts, p)
		// A thread takes part in every so-many-th chunk, whose number has 32 bits.
		most = min(most, min(cut.MaxLoops, math.MaxUint32/groups-1)*groups/p.chunks)
	}
	rounds, took, err := b.fastest(ctx, max(most, 1), func(rounds int) []probe {
		steps := make([]probe, len(parts))
		for i, p := range parts {
			steps[i] = p.step(rounds, groups)
		}
		return steps
	})
	if err != nil {
		return 0, fmt.Errorf("bandwidth: %w", err)
	}
	return float64(bytes) * float64(rounds) / took.Seconds(), nil
}

// spans returns the windows that reach from t's first element to its last, as far
// as they are whole vec4; none of a tensor in host memory.
func (b *Backend) spans(t backend.Tensor) []cut.Window {
	if t.IsZero() || t.Shape().Elements() == 0 || cut.StoreOf(t).Host != nil {
		return nil
	}
	size := uint64(t.DType().Size())
	first := uint64(t.Offset()) * size
	end := first + uint64(cut.Extent(t.Shape(), t.Strides()))*size
	align := max(uint64(b.dev.Limits.MinStorageBufferOffsetAlignment), 16)
	most := queue.MaxWindow(b.dev.Limits) / align * align
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
	windows []cut.Window // four, and the output
	chunks  int          // of all of them
	ends    [readWindows]int
	last    [readWindows]int // vec4
}

func newReadPart(some []cut.Window, out cut.Window) readPart {
	p := readPart{windows: make([]cut.Window, readWindows, readWindows+1)}
	copy(p.windows, some)
	for i, w := range p.windows {
		if w.Size > 0 {
			p.chunks += int((w.Size + readChunk - 1) / readChunk)
			p.last[i] = int(w.Size/16) - 1
		}
		p.ends[i] = p.chunks
	}
	p.windows = append(p.windows, out)
	return p
}

func (part *readPart) step(rounds, groups int) probe {
	p := shaders.ReadParams{
		All: rounds * part.chunks, Chunks: part.chunks, End0: part.ends[0], End1: part.ends[1], End2: part.ends[2],
		Last0: part.last[0], Last1: part.last[1], Last2: part.last[2], Last3: part.last[3],
	}
	return probe{shaders.Read, part.windows, &p, groups}
}

// LaunchTime measures how long an empty dispatch of one workgroup takes from its
// submission to its end, its pipeline, bindings and parameters in place.
func (b *Backend) LaunchTime(ctx context.Context) (time.Duration, error) {
	if err := b.enter(ctx); err != nil {
		return 0, err
	}
	defer b.leave()
	took, err := b.launchTime(ctx)
	if err != nil {
		return 0, fmt.Errorf("launch: %w", queue.Translate(b.info.Name, err))
	}
	return took, nil
}

func (b *Backend) launchTime(ctx context.Context) (time.Duration, error) {
	peak := b.dev.Pipeline(queue.Variant{Kernel: shaders.Peak})
	p, err := b.dev.Acquire(ctx, peak)
	if err != nil {
		return 0, err
	}
	defer b.dev.Release(peak)
	uniform, err := b.dev.Pool.Get(16, queue.UniformUsage)
	if err != nil {
		return 0, err
	}
	defer b.dev.Pool.Put(uniform, queue.UniformUsage)
	if err := b.dev.Port.Write(uniform, 0, make([]byte, 16)); err != nil { // no rounds
		return 0, err
	}
	empty := []port.Command{{Pipeline: p, Groups: [3]uint32{1, 1, 1}, Bindings: []port.Binding{
		{Buffer: b.dev.Blank(), Size: queue.BlankBytes}, {Buffer: uniform, Size: 16},
	}}}
	times := make([]time.Duration, launches)
	for i := range times {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		begin := time.Now()
		t, err := b.dev.Port.Submit(empty)
		if err == nil {
			err = b.dev.Port.Wait(t)
		}
		if err != nil {
			return 0, err
		}
		times[i] = time.Since(begin)
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// Ceilings measures, in bytes a second: "copy", what is read and written of device
// memory, each byte counted both times; "workgroup memory", vec4 loads; "upload"
// and "download", between host memory and the device.
func (b *Backend) Ceilings(ctx context.Context) ([]backend.Ceiling, error) {
	var all []backend.Ceiling
	for _, c := range []struct {
		name    string
		measure func(context.Context) (float64, error)
	}{
		{"copy", b.copyRate}, {"workgroup memory", b.workgroupRate}, {"upload", b.uploadRate}, {"download", b.downloadRate},
	} {
		rate, err := c.measure(backend.WithTrace(ctx, &backend.Trace{})) // nobody's call
		if err != nil {
			return nil, err
		}
		all = append(all, backend.Ceiling{Name: c.name, BytesPerSecond: rate})
	}
	return all, nil
}

func (b *Backend) workgroupRate(ctx context.Context) (float64, error) {
	if err := b.enter(ctx); err != nil {
		return 0, err
	}
	defer b.leave()
	return b.onGrid(ctx, shaders.Banks, 16, moveBytes, func(rounds int) shaders.Params { return &shaders.BanksParams{Rounds: rounds} })
}

func (b *Backend) copyRate(ctx context.Context) (rate float64, err error) {
	if err := b.enter(ctx); err != nil {
		return 0, err
	}
	defer b.leave()
	most := min(copyBytes, queue.MaxWindow(b.dev.Limits), b.dev.Limits.MaxBufferSize)
	if b.info.Type == backend.CPU {
		most = min(most, copyBytesCPU)
	}
	groups, lap := b.grid(probeGroups, probeThreads*moveBytes)
	laps := max(most/lap, 1)
	bytes := laps * lap
	var windows []cut.Window
	defer func() {
		for _, w := range windows {
			b.dev.Pool.Put(w.Buf, queue.StorageUsage)
		}
	}()
	for range 2 {
		buf, err := b.dev.Pool.Get(bytes, queue.StorageUsage)
		if err != nil {
			return 0, queue.Translate("copy", err)
		}
		windows = append(windows, cut.Window{Buf: buf, Size: bytes})
	}
	rounds, took, err := b.fastest(ctx, cut.MaxLoops, func(rounds int) []probe {
		p := &shaders.CopyParams{Rounds: rounds, Laps: int(laps), Threads: groups * probeThreads}
		return []probe{{shaders.Copy, windows, p, groups}}
	})
	if err != nil {
		return 0, fmt.Errorf("copy: %w", err)
	}
	return 2 * float64(lap) * float64(rounds) / took.Seconds(), nil
}

func (b *Backend) uploadRate(ctx context.Context) (float64, error) {
	return b.transferRate(ctx, func(host backend.Tensor) (time.Duration, error) {
		begin := time.Now()
		t, err := b.Upload(ctx, host)
		if err != nil {
			return 0, err
		}
		defer t.Release()
		// The last piece goes with the next submission.
		ticket, err := b.dev.Port.Submit(nil)
		if err == nil {
			err = b.dev.Port.Wait(ticket)
		}
		return time.Since(begin), queue.Translate("upload", err)
	})
}

func (b *Backend) downloadRate(ctx context.Context) (float64, error) {
	return b.transferRate(ctx, func(host backend.Tensor) (time.Duration, error) {
		t, err := b.Alloc(ctx, host.DType(), host.Shape())
		if err != nil {
			return 0, err
		}
		defer t.Release()
		begin := time.Now()
		err = b.Download(ctx, host, t)
		return time.Since(begin), err
	})
}

// transferRate returns the bytes a second of the fastest of a few transfers, the
// first of which makes buffers.
func (b *Backend) transferRate(ctx context.Context, transfer func(host backend.Tensor) (time.Duration, error)) (float64, error) {
	bytes := int(min(transferProbe, b.dev.Limits.MaxBufferSize) &^ 3)
	host, err := backend.HostF32(make([]float32, bytes/4), backend.Shape{1, 1, 1, bytes / 4})
	if err != nil {
		return 0, err
	}
	best := time.Duration(math.MaxInt64)
	for range 1 + probeRepeats {
		took, err := transfer(host)
		if err != nil {
			return 0, err
		}
		best = max(min(best, took), 1)
	}
	return float64(bytes) / best.Seconds(), nil
}
