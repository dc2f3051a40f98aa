//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package gpu

import "github.com/gogpu/wgpu"

// What a program shares are objects of the WebGPU library of its build, which is
// github.com/gogpu/wgpu here. In builds with cgo, the types are
// those of the same names in github.com/rajveermalviya/go-webgpu/wgpu.
type (
	SharedAdapter = wgpu.Adapter
	SharedDevice  = wgpu.Device
	SharedBuffer  = wgpu.Buffer // see [Backend.Wrap]
)
