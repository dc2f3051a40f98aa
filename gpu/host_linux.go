package gpu

import (
	"sync"

	"golang.org/x/sys/unix"
)

// hostMemory returns the bytes of memory and swap that the machine has: Go ends a
// program that asks for more than the system gives, so Alloc asks first.
var hostMemory = sync.OnceValue(func() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return unknownMemory
	}
	return (uint64(info.Totalram) + uint64(info.Totalswap)) * uint64(info.Unit)
})
