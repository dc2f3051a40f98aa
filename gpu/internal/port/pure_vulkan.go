//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))) && (linux || windows || freebsd)

package port

// Importing a driver registers it. The library's software and OpenGL drivers have no
// compute shaders.
import _ "github.com/gogpu/wgpu/hal/vulkan"
