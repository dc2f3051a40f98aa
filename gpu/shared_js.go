package gpu

import "syscall/js"

// A page's own objects cannot be shared yet: Open returns an error for them.
type (
	SharedAdapter = js.Value
	SharedDevice  = js.Value
	SharedBuffer  = js.Value // see [Backend.Wrap]
)
