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
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/shaders"
)

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
		if err == nil {
			err = submit(ctx, dev, commands)
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

// submit runs commands and waits for them.
func submit(ctx context.Context, dev port.Device, commands []port.Command) error {
	t, err := dev.Submit(commands)
	if err == nil {
		_, err = dev.Wait(ctx, t, time.Now())
	}
	return err
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
