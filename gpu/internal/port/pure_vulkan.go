//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))) && (linux || windows || freebsd)

package port

// The library finds a driver through what is imported. Its own software and
// OpenGL drivers are left out: they do not compute.
import _ "github.com/gogpu/wgpu/hal/vulkan"
