//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package loaded

import (
	"runtime"
	"sync"
	"unsafe"

	"github.com/go-webgpu/goffi/ffi"
	"github.com/go-webgpu/goffi/types"
)

// The functions are those of foreign_cgo.go, through goffi.

func openLibrary(name string) (uintptr, error) {
	h, err := ffi.LoadLibrary(name)
	return uintptr(h), err
}

func symbolOf(library uintptr, name string) uintptr {
	p, err := ffi.GetSymbol(pointer(library), name)
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
	info   callbackInfo
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

func callWords(f uintptr, n int, words [6]uintptr) uintptr {
	x := frames.Get().(*frame)
	defer frames.Put(x)
	return x.call(f, &shapes()[0][n], n, words)
}

func callWithInfo(f uintptr, info callbackInfo, n int, words [6]uintptr) {
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
	if _, err := ffi.CallFunction(shape, pointer(f), unsafe.Pointer(&x.result), x.at[:shape.ArgCount]); err != nil {
		panic(err) // of the shape, not of the function
	}
	return uintptr(x.result)
}

func newCallbacks() callbackFunctions {
	tell := func(status, object, data, length, user1, user2 uintptr) uintptr {
		answer([2]uintptr{user1, user2}, reply{uint32(status), object, stringView{data, length}.String()})
		return 0
	}
	if runtime.GOOS != "windows" {
		return callbackFunctions{
			object: ffi.NewCallback(tell),
			status: ffi.NewCallback(func(status, data, length, user1, user2 uintptr) uintptr {
				return tell(status, 0, data, length, user1, user2)
			}),
			device: ffi.NewCallback(func(_, kind, data, length, user1, user2 uintptr) uintptr {
				return tell(kind, 0, data, length, user1, user2)
			}),
		}
	}
	view := func(status, object, message, user1, user2 uintptr) uintptr { // Windows passes a structure of two words by its address
		m := (*[2]uintptr)(pointer(message))
		return tell(status, object, m[0], m[1], user1, user2)
	}
	return callbackFunctions{
		object: ffi.NewCallback(view),
		status: ffi.NewCallback(func(status, message, user1, user2 uintptr) uintptr { return view(status, 0, message, user1, user2) }),
		device: ffi.NewCallback(func(_, kind, message, user1, user2 uintptr) uintptr { return view(kind, 0, message, user1, user2) }),
	}
}
