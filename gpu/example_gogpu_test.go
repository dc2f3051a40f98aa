//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package gpu_test

import (
	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
)

// openDevice opens a device as a program does that is built without cgo.
func openDevice() (adapter *wgpu.Adapter, device *wgpu.Device, release func(), err error) {
	instance, err := wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12})
	if err != nil {
		return nil, nil, nil, err
	}
	if adapter, err = instance.RequestAdapter(nil); err == nil {
		device, err = adapter.RequestDevice(nil)
	}
	return adapter, device, func() {
		device.Release()
		adapter.Release()
		instance.Release()
	}, err
}

func newBuffer(device *wgpu.Device, size uint64, usage gputypes.BufferUsage) (*wgpu.Buffer, error) {
	return device.CreateBuffer(&wgpu.BufferDescriptor{Size: size, Usage: usage})
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
