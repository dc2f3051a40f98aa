//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package gpu_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

// A program computes 4 tokens of size 8 with gogpu/wgpu, attends to them in the same
// buffers, and goes on with the result. It is built with CGO_ENABLED=0.
func Example_shared() {
	o, err := attendToOwnBuffer()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", o)
}

func attendToOwnBuffer() ([]float32, error) {
	const tokens, dim, bytes = 4, 8, 4 * 8 * 4
	// The program's own device, buffers and shader.
	instance, err := wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12})
	if err != nil {
		return nil, err
	}
	defer instance.Release()
	adapter, err := instance.RequestAdapter(nil)
	if err != nil {
		return nil, err
	}
	defer adapter.Release()
	device, err := adapter.RequestDevice(nil)
	if err != nil {
		return nil, err
	}
	defer device.Release()
	var buffers [2]*wgpu.Buffer // x and o
	for i := range buffers {
		buffers[i], err = device.CreateBuffer(&wgpu.BufferDescriptor{
			Size: bytes, Usage: wgpu.BufferUsageStorage | wgpu.BufferUsageCopySrc | wgpu.BufferUsageCopyDst,
		})
		if err != nil {
			return nil, err
		}
		defer buffers[i].Release()
	}
	if err := compute(device, buffers[0], `x[i] = f32(i * 5u % 8u) / 4.0;`); err != nil {
		return nil, err
	}

	// attn reads the tokens where they are, and writes its result to the other buffer.
	be, err := gpu.Open("", gpu.Options{Shared: &gpu.Shared{Adapter: adapter, Device: device}})
	if err != nil {
		return nil, err
	}
	dev := kernels.NewDevice(be)
	defer dev.Close() // before the device is released
	var tensors [2]backend.Tensor
	for i, b := range buffers {
		if tensors[i], err = be.Wrap(b, backend.F32, backend.Shape{1, 1, tokens, dim}); err != nil {
			return nil, err
		}
		defer tensors[i].Release()
	}
	x, o := tensors[0], tensors[1]
	call, err := dev.Prepare(x, x, x, kernels.Options{Causal: true})
	if err != nil {
		return nil, err
	}
	if err := call.RunInto(context.Background(), kernels.Result{O: o}); err != nil {
		return nil, err
	}

	// The program goes on with the result. Work on one queue runs in order, also where attn
	// reads what the program has changed.
	if err := compute(device, buffers[1], `x[i] = 2.0 * x[i];`); err != nil {
		return nil, err
	}
	return dev.Float32s(context.Background(), o)
}

// compute runs a statement for each element i of a buffer x.
func compute(device *wgpu.Device, buffer *wgpu.Buffer, statement string) error {
	module, err := device.CreateShaderModule(&wgpu.ShaderModuleDescriptor{WGSL: `
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(32)
fn main(@builtin(global_invocation_id) id: vec3<u32>) { let i = id.x; ` + statement + ` }`})
	if err != nil {
		return err
	}
	defer module.Release()
	layout, err := device.CreateBindGroupLayout(&wgpu.BindGroupLayoutDescriptor{Entries: []gputypes.BindGroupLayoutEntry{{
		Visibility: wgpu.ShaderStageCompute, Buffer: &gputypes.BufferBindingLayout{Type: gputypes.BufferBindingTypeStorage},
	}}})
	if err != nil {
		return err
	}
	defer layout.Release()
	pipelineLayout, err := device.CreatePipelineLayout(&wgpu.PipelineLayoutDescriptor{BindGroupLayouts: []*wgpu.BindGroupLayout{layout}})
	if err != nil {
		return err
	}
	defer pipelineLayout.Release()
	pipeline, err := device.CreateComputePipeline(&wgpu.ComputePipelineDescriptor{Layout: pipelineLayout, Module: module, EntryPoint: "main"})
	if err != nil {
		return err
	}
	defer pipeline.Release()
	group, err := device.CreateBindGroup(&wgpu.BindGroupDescriptor{Layout: layout, Entries: []wgpu.BindGroupEntry{{Buffer: buffer, Size: buffer.Size()}}})
	if err != nil {
		return err
	}
	defer group.Release()
	encoder, err := device.CreateCommandEncoder(nil)
	if err != nil {
		return err
	}
	pass, err := encoder.BeginComputePass(nil)
	if err != nil {
		return err
	}
	pass.SetPipeline(pipeline)
	pass.SetBindGroup(0, group, nil)
	pass.Dispatch(uint32(buffer.Size()/4/32), 1, 1)
	if err := pass.End(); err != nil {
		return err
	}
	commands, err := encoder.Finish()
	if err != nil {
		return err
	}
	_, err = device.Queue().Submit(commands)
	return err
}
