//go:build !js

package gpu_test

import (
	"context"
	"fmt"
	"log"
	"math"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// A program computes 4 tokens of size 8 by a shader of its own, attends to them in its own buffers, and goes on with
// the result. openDevice, newBuffer and compute are plain WebGPU: example_gogpu_test.go has them for
// github.com/gogpu/wgpu, example_gowebgpu_test.go for github.com/rajveermalviya/go-webgpu/wgpu.
func Example_shared() {
	o, err := attendInOwnBuffers()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", o)
}

func attendInOwnBuffers() ([]float32, error) {
	ctx, shape := context.Background(), backend.Shape{1, 1, 4, 8}
	adapter, device, release, err := openDevice()
	if err != nil {
		return nil, err
	}
	defer release()
	be, err := gpu.Open("", gpu.Options{Shared: &gpu.Shared{Adapter: adapter, Device: device}})
	if err != nil {
		return nil, err
	}
	dev := kernels.NewDevice(be)
	defer dev.Close() // before the program releases the device

	const usage = gputypes.BufferUsageStorage | gputypes.BufferUsageCopySrc | gputypes.BufferUsageCopyDst
	tokens, err := newBuffer(device, 4*4*8, usage)
	if err != nil {
		return nil, err
	}
	defer tokens.Release()
	result, err := newBuffer(device, 4*4*8, usage)
	if err != nil {
		return nil, err
	}
	defer result.Release()
	x, err := be.Wrap(tokens, backend.F32, shape)
	if err != nil {
		return nil, err
	}
	defer x.Release()
	o, err := be.Wrap(result, backend.F32, shape)
	if err != nil {
		return nil, err
	}
	defer o.Release()

	// Work on one queue runs in order, whoever submits it.
	if err := compute(device, tokens, `x[i] = f32(i * 5u % 8u) / 4.0;`); err != nil {
		return nil, err
	}
	call, err := dev.Prepare(x, x, x, kernels.Options{Causal: true})
	if err != nil {
		return nil, err
	}
	if err := call.RunInto(ctx, kernels.Result{O: o}); err != nil {
		return nil, err
	}
	if err := compute(device, result, `x[i] = 2.0 * x[i];`); err != nil {
		return nil, err
	}
	return dev.ToFloat32(ctx, o)
}

// TestExampleShared runs the example of a shared device, which has no Output because there
// are machines without an adapter, and compares its result with that of the CPU.
func TestExampleShared(t *testing.T) {
	needAdapter(t)
	got := must.Get(attendInOwnBuffers())(t)
	x := make([]float32, 4*8)
	for i := range x {
		x[i] = float32(i*5%8) / 4
	}
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	o := must.Get(dev.AttentionFloat32(t.Context(), kernels.Dims{SeqQ: 4, Dim: 8}, kernels.BHSD, x, x, x, kernels.Options{Causal: true}))(t)
	for i := range o {
		if want := 2 * o[i]; !(math.Abs(float64(got[i]-want)) <= 1e-5) {
			t.Errorf("row %d, column %d: %v, want %v", i/8, i%8, got[i], want)
		}
	}
}
