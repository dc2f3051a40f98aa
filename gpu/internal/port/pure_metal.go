//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))) && darwin

package port

import _ "github.com/gogpu/wgpu/hal/metal" // registers the driver
