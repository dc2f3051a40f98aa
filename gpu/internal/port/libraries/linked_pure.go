//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package libraries

import "github.com/seed90331342/attn/gpu/internal/port/pure"

// Provider names the library that is linked.
const Provider = pure.Provider

// The objects of the library that programs share.
type (
	Adapter = pure.Adapter
	Device  = pure.Device
	Buffer  = pure.Buffer
)

var (
	linked = pure.Adapters
	// Share returns a library over a device that the program has opened on an adapter, for port.Share.
	Share = pure.Share
)
