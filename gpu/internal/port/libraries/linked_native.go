//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package libraries

import "github.com/seed90331342/attn/gpu/internal/port/native"

// Provider names the library that is linked.
const Provider = native.Provider

// The objects of the library that programs share.
type (
	Adapter = native.Adapter
	Device  = native.Device
	Buffer  = native.Buffer
)

var (
	linked = native.Adapters
	// Share returns a library over a device that the program has opened on an adapter, for port.Share.
	Share = native.Share
)
