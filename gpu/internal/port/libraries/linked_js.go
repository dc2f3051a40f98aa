package libraries

import (
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/web"
)

// Provider names the library that is linked.
const Provider = web.Provider

// The objects of the library that programs share.
type (
	Adapter = web.Adapter
	Device  = web.Device
	Buffer  = web.Buffer
)

var foreign port.Foreign // none

var (
	linked = web.Adapters
	share  = web.Share
)
