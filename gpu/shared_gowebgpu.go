//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package gpu

import "github.com/rajveermalviya/go-webgpu/wgpu"

// What a program shares are objects of the WebGPU library of its build, which is
// github.com/rajveermalviya/go-webgpu/wgpu here. In builds without cgo, or with the tag gogpu, the types are
// those of the same names in github.com/gogpu/wgpu.
type (
	SharedAdapter = wgpu.Adapter
	SharedDevice  = wgpu.Device
	SharedBuffer  = wgpu.Buffer // see [Backend.Wrap]
)
