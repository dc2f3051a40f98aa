// Package meter measures what a device can do at most: multiply-adds, products of matrices, reads of device memory,
// and the time of an empty dispatch. Benchmarks report kernels as a share of these ceilings. It
// also measures how precise the device's exp2 is.
package meter

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/gogpu/gputypes"
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
	probeThreads = 64 // of a workgroup, in all the kernels below

	peakGroups = 4096 // workgroups: 30 for each of the 132 SMs of the largest GPUs, evenly
	peakOps    = 1024 // operations of a thread in a round of peak.wgsl

	readChunk   = 8192 // bytes of a chunk in read.wgsl
	readWindows = 4    // that read.wgsl binds
	// readGroups is a prime, so that a workgroup rarely reads the same chunk again,
	// which would be in the cache of its processor.
	readGroups = 4093
	// readLeast is the fewest bytes that keep all of a large GPU reading.
	readLeast = 1 << 20

	launches = 32 // of which Launch returns the median
)

// output returns a buffer to which a row of workgroups, as many as the limits allow up to most,
// store size bytes a thread.
func output(ctx context.Context, d *queue.Device, most, size int) (groups int, out cut.Window, release func(), err error) {
	size *= probeThreads
	groups = max(min(most, int(d.Limits.MaxComputeWorkgroupsPerDimension), int(queue.MaxWindow(d.Limits)/uint64(size))), 1)
	out.Size = uint64(groups * size)
	buf, err := d.Pool.Get(ctx, out.Size, resource.StorageUsage)
	if err != nil {
		return 0, out, nil, queue.Translate(fmt.Sprintf("%d bytes", out.Size), err)
	}
	out.Buf = buf
	return groups, out, func() { d.Pool.Put(buf, resource.StorageUsage, false) }, nil
}

// Time returns how long what run queues takes by the device's clock, or by the host's where the
// device has none. Of the trace of ctx it keeps Compile alone.
func Time(ctx context.Context, d *queue.Device, run func(r *queue.Runner) error) (took time.Duration, err error) {
	r := d.NewRunner(backend.WithTrace(ctx, &backend.Trace{
		Kernel:  func(kernel time.Duration) { took += kernel },
		Compile: backend.TraceOf(ctx).Compile,
	}))
	defer func() { r.Finish(err) }()
	began := time.Now()
	if err = run(r); err == nil {
		err = r.Flush()
	}
	if took == 0 {
		took = time.Since(began)
	}
	return took, err
}

// fastest calls run, which queues dispatches of a number of rounds. It doubles the rounds until
// they take probeTime, or most is reached, and repeats them. It returns the highest rate of
// units, of which a round has each. Where twice the rounds take less than 1.5 times as long, as
// on a busy machine, the launch of the dispatches dominates, and it goes on to 8·probeTime.
func fastest(ctx context.Context, d *queue.Device, name string, each float64, most int, run func(r *queue.Runner, rounds int) error) (rate float64, err error) {
	ctx = backend.WithTrace(ctx, &backend.Trace{}) // this is no call of the caller's
	before := probeTime                            // of half the rounds
	for n, rounds := -1, 1; n < probeRepeats; {
		took, err := Time(ctx, d, func(r *queue.Runner) error { return run(r, rounds) })
		switch {
		case err != nil:
			return 0, fmt.Errorf("%s: %w", name, err)
		case n < 0: // compiles
			n = 0
		case 2*rounds <= most && (took < probeTime || 2*took < 3*before && took < 8*probeTime):
			rounds, before = 2*rounds, took
		default:
			rate = max(rate, each*float64(rounds)/max(took, 1).Seconds())
			n++
		}
	}
	return rate, nil
}

// Peak returns the float32 operations a second of a kernel of multiply-adds.
func Peak(ctx context.Context, d *queue.Device) (float64, error) {
	groups, out, release, err := output(ctx, d, peakGroups, 4)
	if err != nil {
		return 0, err
	}
	defer release()
	return fastest(ctx, d, "peak", float64(groups*probeThreads*peakOps), cut.MaxLoops, func(r *queue.Runner, rounds int) error {
		return r.Dispatch(shaders.Peak, []cut.Window{out}, &shaders.PeakParams{Rounds: rounds, Factor: 0.999, Addend: 0.001}, groups)
	})
}

// MatrixPeak returns the operations a second of a kernel of products of matrices.
func MatrixPeak(ctx context.Context, d *queue.Device, k shaders.MatrixPeak) (float64, error) {
	groups, out, release, err := output(ctx, d, peakGroups, 4)
	if err != nil {
		return 0, err
	}
	defer release()
	each := float64(groups * (probeThreads / k.Lanes) * 128 * k.M * k.N * k.K)
	return fastest(ctx, d, "peak of matrices", each, cut.MaxLoops, func(r *queue.Runner, rounds int) error {
		return r.Dispatch(k, []cut.Window{out}, &shaders.MatrixPeakParams{Rounds: rounds, Factor: 0x04000400}, groups) // 2^-14
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
	groups, out, release, err := output(ctx, d, readGroups, 16)
	if err != nil {
		return 0, err
	}
	defer release()
	parts := slices.Collect(slices.Chunk(all, readWindows))
	most := cut.MaxLoops
	for _, part := range parts {
		// The numbers of a thread's chunks have 32 bits.
		most = min(most, min(cut.MaxLoops, math.MaxUint32/groups-1)*groups/readParams(part, 1).Chunks)
	}
	return fastest(ctx, d, "bandwidth", float64(bytes), max(most, 1), func(r *queue.Runner, rounds int) error {
		for _, part := range parts {
			// 8 chunks or more a workgroup: to start one takes a software driver as long as to read some.
			// An odd number of workgroups takes turns at the chunks.
			some := min(groups, readParams(part, rounds).All/8|1)
			if err := read(r, part, out, some, rounds); err != nil {
				return err
			}
		}
		return nil
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
	for w := range cut.StoreOf(t).Spans(first/align*align, end) {
		for stop := w.Offset + w.Size; w.Offset < stop; w.Offset += most {
			if w.Size = min(stop-w.Offset, most) &^ 15; w.Size > 0 {
				all = append(all, w)
			}
		}
	}
	return all
}

// readParams returns the parameters of a dispatch of read.wgsl, which binds some windows.
func readParams(windows []cut.Window, rounds int) *shaders.ReadParams {
	chunks := 0
	var ends, last [readWindows]int // last is in vec4
	for i := range ends {
		if i < len(windows) {
			chunks += int((windows[i].Size + readChunk - 1) / readChunk)
			last[i] = int(windows[i].Size/16) - 1
		}
		ends[i] = chunks
	}
	return &shaders.ReadParams{
		All: rounds * chunks, Chunks: chunks, End0: ends[0], End1: ends[1], End2: ends[2], Last0: last[0], Last1: last[1], Last2: last[2], Last3: last[3],
	}
}

// read queues a dispatch of read.wgsl.
func read(r *queue.Runner, windows []cut.Window, out cut.Window, groups, rounds int) error {
	bound := make([]cut.Window, readWindows, readWindows+1)
	copy(bound, windows)
	return r.Dispatch(shaders.Read, append(bound, out), readParams(windows, rounds), groups)
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

// MaxExp2Error is the largest error, in units in the last place, with which kernels use the
// exp2 of a device. It is that of exp2_acc in package shaders.
const MaxExp2Error = 2

// Exp2 compares the exponentials of package shaders with exact ones where the device's exp2
// computes them. It returns the largest error in units in the last place, and an error where
// a result breaks a rule that kernels rely on whatever the bound:
//
//   - 2^0 is 1, which keeps a row as it is in tiles that it does not see;
//   - 2^x is +0 below -126, where the next operation may or may not flush a subnormal;
//   - 2^x is finite for all finite x;
//   - 2^NaN is NaN.
//
// Buffers and the pipeline are released before it returns.
func Exp2(ctx context.Context, dev port.Device) (ulp float64, err error) {
	if ulp, err = exp2Error(ctx, dev, shaders.OwnExp2{Variant: shaders.Exponentials}); err != nil {
		return 0, fmt.Errorf("exp2: %w", err)
	}
	return ulp, nil
}

// exp2Group is the number of arguments of a workgroup, and exp2Bytes the size of its results.
const (
	exp2Group = 4 * probeThreads
	exp2Bytes = 2 * 4 * exp2Group
)

func exp2Error(ctx context.Context, dev port.Device, k shaders.Variant) (ulp float64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	desc, err := resource.Desc(k)
	if err != nil {
		return 0, err
	}
	p, err := dev.CreatePipeline(desc)
	if err != nil {
		return 0, err
	}
	defer p.Release()
	args, l := exp2Arguments(), dev.Limits()
	n := int(min(uint64(len(args)/exp2Group), uint64(l.MaxComputeWorkgroupsPerDimension), l.MaxStorageBufferBindingSize/exp2Bytes, l.MaxBufferSize/exp2Bytes))
	if n == 0 {
		return 0, fmt.Errorf("limits leave no room for a workgroup: %w", backend.ErrUnsupported)
	}
	bytes := uint64(n * exp2Bytes)
	var buffers [3]port.Buffer // arguments, results, and their copy
	for i, usage := range []gputypes.BufferUsage{resource.StorageUsage, resource.StorageUsage, resource.StagingUsage} {
		if buffers[i], err = dev.CreateBuffer(bytes, usage); err != nil {
			return 0, err
		}
		defer buffers[i].Release()
	}
	commands := []port.Command{
		{Pipeline: p, Groups: [3]uint32{uint32(n), 1, 1}, Bindings: []port.Binding{{Buffer: buffers[0], Size: bytes / 2}, {Buffer: buffers[1], Size: bytes}}},
		{Src: buffers[1], Dst: buffers[2], Size: bytes},
	}
	out, results := make([]byte, bytes), make([]float32, bytes/4)
	for some := range slices.Chunk(args, n*exp2Group) {
		in, err := binary.Append(nil, binary.LittleEndian, some)
		if err == nil {
			err = dev.Write(buffers[0], 0, in)
		}
		var t port.Ticket
		if err == nil {
			t, err = dev.Submit(commands, false)
		}
		if err == nil {
			_, err = dev.Wait(ctx, t, time.Now())
		}
		if err == nil {
			err = dev.Read(buffers[2], 0, out)
		}
		if err == nil {
			_, err = binary.Decode(out, binary.LittleEndian, results)
		}
		if err != nil {
			return 0, err
		}
		for i, x := range some {
			at, exact := i/4*8+i%4, math.Exp2(float64(x)) // of exp2_acc; exp2_down follows after a vec4
			for down, got := range []float32{results[at], results[at+4]} {
				off, ok := exp2Off(x, got, exact, down == 1)
				if !ok {
					return 0, fmt.Errorf("2^%v is %v", x, got)
				}
				ulp = max(ulp, off)
			}
		}
	}
	return ulp, nil
}

// mostExp2 is the argument up to which results are exact to the bound; greater ones are finite.
// The products of weights with values stay finite where weights are at most mostWeight.
const (
	mostExp2   = 63
	mostWeight = 0x1p65
)

// exp2Off returns how far got, a result for x, is off, and whether it keeps the rules.
func exp2Off(x, got float32, exact float64, down bool) (ulp float64, ok bool) {
	switch {
	case x != x:
		return 0, got != got
	case x < -126:
		return 0, math.Float32bits(got) == 0
	case x == 0:
		return 0, got == 1
	case x > mostExp2:
		return 0, got >= 1 && got <= math.MaxFloat32 && (!down || got <= mostWeight)
	}
	ulp = math.Abs(float64(got)-exact) / math.Ldexp(1, int(math.Floor(float64(x)))-23)
	return ulp, ulp < math.Inf(1) // not for NaN
}

// exp2Arguments returns what kernels may ask for, in whole workgroups: special numbers, a
// grid from -126 to 63 and one of all binades.
var exp2Arguments = sync.OnceValue(func() []float32 {
	inf := float32(math.Inf(1))
	args := []float32{0, float32(math.Copysign(0, -1)), -inf, -math.MaxFloat32, -126, math.Nextafter32(-126, 0), math.Nextafter32(-126, -inf), math.MaxFloat32}
	for _, bits := range []uint32{0x7fc00000, 0xffc00000, 0x7fffffff, 0xffffffff, 0x7f800001} {
		args = append(args, math.Float32frombits(bits))
	}
	const steps = 1 << 16
	for i := range steps {
		args = append(args, -126*(float32(i)+0.5)/steps)
	}
	for i := range steps / 16 {
		args = append(args, mostExp2*(float32(i)+0.5)/(steps/16))
	}
	for n := float32(1); n <= 200; n++ {
		args = append(args, -n, -n-0.5, n)
	}
	for bits := uint32(1); bits < 0x7f800000; bits += 0x7f7f7 { // 4,100 of each sign
		x := math.Float32frombits(bits)
		args = append(args, x, -x)
	}
	for len(args)%exp2Group != 0 {
		args = append(args, 0)
	}
	return args
})
