package native

/*
#include "foreign.h"
*/
import "C"

import (
	"errors"
	"unsafe"

	"github.com/seed90331342/attn/gpu/internal/port"
)

// Foreign is port.Foreign through cgo.
var Foreign port.Foreign = foreign{}

type foreign struct{}

func (foreign) Open(name string) (uintptr, error) {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	var message [1024]C.char
	h := C.foreign_open(c, &message[0], C.size_t(len(message)))
	if h == 0 {
		return 0, errors.New(C.GoString(&message[0]))
	}
	return uintptr(h), nil
}

func (foreign) Symbol(library uintptr, name string) uintptr {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	return uintptr(C.foreign_symbol(C.uintptr_t(library), c))
}

type word = C.uintptr_t

func (foreign) Call(f uintptr, _ int, w [6]uintptr) uintptr {
	return uintptr(C.foreign_call(word(f), word(w[0]), word(w[1]), word(w[2]), word(w[3]), word(w[4]), word(w[5])))
}

func (foreign) CallInfo(f uintptr, info port.CallbackInfo, n int, w [6]uintptr) {
	c := C.foreign_info{
		next: word(info.Next), mode: C.uint32_t(info.Mode), callback: word(info.Callback),
		user: [2]word{word(info.User[0]), word(info.User[1])},
	}
	C.foreign_call_info(word(f), c, C.int(n), word(w[0]), word(w[1]), word(w[2]), word(w[3]))
}

// answered is the function of Callbacks, which is called once.
var answered func(user [2]uintptr, a port.Answer)

func (foreign) Callbacks(answer func(user [2]uintptr, a port.Answer)) port.Callbacks {
	answered = answer
	c := C.foreign_callbacks()
	return port.Callbacks{Object: uintptr(c.object), Status: uintptr(c.status), Device: uintptr(c.device)}
}

//export foreignAnswer
func foreignAnswer(status C.uint32_t, object C.uintptr_t, data *C.char, length C.size_t, user1, user2 C.uintptr_t) {
	answered([2]uintptr{uintptr(user1), uintptr(user2)}, port.Answer{
		Status: uint32(status), Object: uintptr(object), Message: port.StringView(uintptr(unsafe.Pointer(data)), uintptr(length)),
	})
}
