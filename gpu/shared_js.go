package gpu

import "syscall/js"

// What a program shares are objects of the WebGPU library of its build. A page's own objects
// cannot be shared yet: Open returns ErrOption for them.
type (
	SharedAdapter = js.Value
	SharedDevice  = js.Value
	SharedBuffer  = js.Value // see [Backend.Wrap]
)
