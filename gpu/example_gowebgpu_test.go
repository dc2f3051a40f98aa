//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package gpu_test

import (
	"github.com/gogpu/gputypes"
	"github.com/rajveermalviya/go-webgpu/wgpu"
)

// openDevice opens a device as a program does that is built with cgo.
func openDevice() (adapter *wgpu.Adapter, device *wgpu.Device, release func(), err error) {
	instance := wgpu.CreateInstance(&wgpu.InstanceDescriptor{Backends: wgpu.InstanceBackend_Primary})
	if adapter, err = instance.RequestAdapter(&wgpu.RequestAdapterOptions{}); err == nil {
		device, err = adapter.RequestDevice(&wgpu.DeviceDescriptor{})
	}
	return adapter, device, func() {
		device.Release()
		adapter.Release()
		instance.Release()
	}, err
}

func newBuffer(device *wgpu.Device, size uint64, usage gputypes.BufferUsage) (*wgpu.Buffer, error) {
	return device.CreateBuffer(&wgpu.BufferDescriptor{Size: size, Usage: wgpu.BufferUsage(usage)})
}

// compute runs a statement for each element i of a buffer x.
func compute(device *wgpu.Device, buffer *wgpu.Buffer, statement string) error {
	module, err := device.CreateShaderModule(&wgpu.ShaderModuleDescriptor{WGSLDescriptor: &wgpu.ShaderModuleWGSLDescriptor{Code: `
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(32)
fn main(@builtin(global_invocation_id) id: vec3<u32>) { let i = id.x; ` + statement + ` }`}})
	if err != nil {
		return err
	}
	defer module.Release()
	pipeline, err := device.CreateComputePipeline(&wgpu.ComputePipelineDescriptor{
		Compute: wgpu.ProgrammableStageDescriptor{Module: module, EntryPoint: "main"},
	})
	if err != nil {
		return err
	}
	defer pipeline.Release()
	layout := pipeline.GetBindGroupLayout(0)
	defer layout.Release()
	group, err := device.CreateBindGroup(&wgpu.BindGroupDescriptor{
		Layout: layout, Entries: []wgpu.BindGroupEntry{{Buffer: buffer, Size: buffer.GetSize()}},
	})
	if err != nil {
		return err
	}
	defer group.Release()
	encoder, err := device.CreateCommandEncoder(nil)
	if err != nil {
		return err
	}
	defer encoder.Release()
	pass := encoder.BeginComputePass(nil)
	defer pass.Release()
	pass.SetPipeline(pipeline)
	pass.SetBindGroup(0, group, nil)
	pass.DispatchWorkgroups(uint32(buffer.GetSize()/4/32), 1, 1)
	if err := pass.End(); err != nil {
		return err
	}
	commands, err := encoder.Finish(nil)
	if err != nil {
		return err
	}
	defer commands.Release()
	queue := device.GetQueue()
	defer queue.Release()
	queue.Submit(commands)
	return nil
}
