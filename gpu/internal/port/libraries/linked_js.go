package libraries

import "github.com/seed90331342/attn/gpu/internal/port/web"

// Provider names the library that is linked.
const Provider = web.Provider

// The objects of the library that programs share.
type (
	Adapter = web.Adapter
	Device  = web.Device
	Buffer  = web.Buffer
)

var (
	linked = web.Adapters
	// Share returns a library over a device that the program has opened on an adapter, for port.Share.
	Share = web.Share
)
