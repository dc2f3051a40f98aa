package cpu

import (
	"sync"

	"golang.org/x/sys/unix"
)

// machineMemory returns the bytes of memory and swap of the machine. Alloc checks it
// because Go ends a program whose allocation fails.
var machineMemory = sync.OnceValue(func() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return unknownMemory
	}
	return (uint64(info.Totalram) + uint64(info.Totalswap)) * uint64(info.Unit)
})
