//go:build !js

package pure

import (
	"runtime"
	"sync"
	"unsafe"

	"github.com/go-webgpu/goffi/ffi"
	"github.com/go-webgpu/goffi/types"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Foreign is port.Foreign through goffi.
var Foreign port.Foreign = foreign{}

type foreign struct{}

func (foreign) Open(name string) (uintptr, error) {
	h, err := ffi.LoadLibrary(name)
	return uintptr(h), err
}

func (foreign) Symbol(library uintptr, name string) uintptr {
	p, err := ffi.GetSymbol(port.Pointer(library), name)
	if err != nil {
		return 0
	}
	return uintptr(p)
}

const mostWords = len(frame{}.words)

// frame holds the arguments and the result of a call on the heap.
type frame struct {
	words  [6]uintptr
	at     [7]unsafe.Pointer
	info   port.CallbackInfo
	result uint64
}

var frames = sync.Pool{New: func() any { return new(frame) }}

// shapes are the shapes of calls by the number of words, without and with a callback info.
var shapes = sync.OnceValue(func() *[2][mostWords + 1]types.CallInterface {
	var all [2][mostWords + 1]types.CallInterface
	word := types.UInt64TypeDescriptor
	info := &types.TypeDescriptor{Kind: types.StructType, Members: []*types.TypeDescriptor{word, word, word, word, word}}
	for n := range mostWords + 1 {
		var words []*types.TypeDescriptor
		for range n {
			words = append(words, word)
		}
		for i, arguments := range [][]*types.TypeDescriptor{words, append(words, info)} {
			if err := ffi.PrepareCallInterface(&all[i][n], types.DefaultCall, word, arguments); err != nil {
				panic(err) // no system that the library compiles for
			}
		}
	}
	return &all
})

func (foreign) Call(f uintptr, n int, words [6]uintptr) uintptr {
	x := frames.Get().(*frame)
	defer frames.Put(x)
	return x.call(f, &shapes()[0][n], n, words)
}

func (foreign) CallInfo(f uintptr, info port.CallbackInfo, n int, words [6]uintptr) {
	x := frames.Get().(*frame)
	defer frames.Put(x)
	x.info = info
	x.at[n] = unsafe.Pointer(&x.info)
	x.call(f, &shapes()[1][n], n, words)
}

func (x *frame) call(f uintptr, shape *types.CallInterface, n int, words [6]uintptr) uintptr {
	x.words = words
	for i := range n {
		x.at[i] = unsafe.Pointer(&x.words[i])
	}
	if _, err := ffi.CallFunction(shape, port.Pointer(f), unsafe.Pointer(&x.result), x.at[:shape.ArgCount]); err != nil {
		panic(err) // of the shape, not of the function
	}
	return uintptr(x.result)
}

func (foreign) Callbacks(answer func(user [2]uintptr, a port.Answer)) port.Callbacks {
	tell := func(status, object, data, length, user1, user2 uintptr) uintptr {
		answer([2]uintptr{user1, user2}, port.Answer{Status: uint32(status), Object: object, Message: port.StringView(data, length)})
		return 0
	}
	if runtime.GOOS != "windows" {
		return port.Callbacks{
			Object: ffi.NewCallback(tell),
			Status: ffi.NewCallback(func(status, data, length, user1, user2 uintptr) uintptr {
				return tell(status, 0, data, length, user1, user2)
			}),
			Device: ffi.NewCallback(func(_, kind, data, length, user1, user2 uintptr) uintptr {
				return tell(kind, 0, data, length, user1, user2)
			}),
		}
	}
	view := func(status, object, message, user1, user2 uintptr) uintptr { // Windows passes a structure of two words by its address
		m := (*[2]uintptr)(port.Pointer(message))
		return tell(status, object, m[0], m[1], user1, user2)
	}
	return port.Callbacks{
		Object: ffi.NewCallback(view),
		Status: ffi.NewCallback(func(status, message, user1, user2 uintptr) uintptr { return view(status, 0, message, user1, user2) }),
		Device: ffi.NewCallback(func(_, kind, message, user1, user2 uintptr) uintptr { return view(kind, 0, message, user1, user2) }),
	}
}
