//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package loaded

/*
#include "foreign.h"
*/
import "C"

import (
	"errors"
	"unsafe"
)

// openLibrary returns a handle of a library, by its path or by a name that the system's loader finds.
func openLibrary(name string) (uintptr, error) {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	var message [1024]C.char
	h := C.foreign_open(c, &message[0], C.size_t(len(message)))
	if h == 0 {
		return 0, errors.New(C.GoString(&message[0]))
	}
	return uintptr(h), nil
}

// symbolOf returns an address, 0 if the library lacks it.
func symbolOf(library uintptr, name string) uintptr {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	return uintptr(C.foreign_symbol(C.uintptr_t(library), c))
}

type word = C.uintptr_t

// callWords calls f with the first n words, which are integers and addresses, of C's memory or of Go's heap.
func callWords(f uintptr, _ int, w [6]uintptr) uintptr {
	return uintptr(C.foreign_call(word(f), word(w[0]), word(w[1]), word(w[2]), word(w[3]), word(w[4]), word(w[5])))
}

// callWithInfo calls f with the first one to four words and info, passed by value.
func callWithInfo(f uintptr, info callbackInfo, n int, w [6]uintptr) {
	c := (*C.foreign_info)(unsafe.Pointer(&info)) // the same layout, that of the header
	C.foreign_call_info(word(f), *c, C.int(n), word(w[0]), word(w[1]), word(w[2]), word(w[3]))
}

func newCallbacks() callbackFunctions {
	c := C.foreign_callbacks()
	return callbackFunctions{object: uintptr(c.object), status: uintptr(c.status), device: uintptr(c.device)}
}

//export foreignAnswer
func foreignAnswer(status C.uint32_t, object C.uintptr_t, data *C.char, length C.size_t, user1, user2 C.uintptr_t) {
	message := stringView{uintptr(unsafe.Pointer(data)), uintptr(length)}
	answer([2]uintptr{uintptr(user1), uintptr(user2)}, reply{uint32(status), uintptr(object), message.String()})
}
