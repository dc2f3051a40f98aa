//go:build !(cgo && !gogpu && amd64 && !android)

package port

import (
	"os"
	"path/filepath"
	"unsafe"

	"github.com/go-webgpu/goffi/ffi"
	"github.com/go-webgpu/goffi/types"
)

// Mesa's layer that orders devices looks for a Wayland display, and without XDG_RUNTIME_DIR
// libwayland prints an error at each look. The folder does not exist. The C library alone
// gets the variable: child processes get Go's environment.
func init() {
	quiet = func() {
		if filepath.IsAbs(os.Getenv("XDG_RUNTIME_DIR")) {
			return
		}
		libc, err := ffi.LoadLibrary("libc.so.6")
		if err != nil {
			return // another C library: the message remains
		}
		setenv, err := ffi.GetSymbol(libc, "setenv")
		if err != nil {
			return
		}
		var call types.CallInterface
		pointer, number := types.PointerTypeDescriptor, types.SInt32TypeDescriptor
		if ffi.PrepareCallInterface(&call, types.DefaultCall, number, []*types.TypeDescriptor{pointer, pointer, number}) != nil {
			return
		}
		name, value := unsafe.Pointer(unsafe.StringData("XDG_RUNTIME_DIR\x00")), unsafe.Pointer(unsafe.StringData("/nonexistent\x00"))
		overwrite, failed := int32(1), int32(0)
		_, _ = ffi.CallFunction(&call, setenv, unsafe.Pointer(&failed), []unsafe.Pointer{unsafe.Pointer(&name), unsafe.Pointer(&value), unsafe.Pointer(&overwrite)})
	}
}
