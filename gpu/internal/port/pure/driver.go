//go:build linux || windows || freebsd

package pure

// Importing a driver registers it. The library's software and OpenGL drivers have no compute shaders.
import _ "github.com/gogpu/wgpu/hal/vulkan"
