package vec

import (
	"sync"
	"syscall"

	"golang.org/x/sys/cpu"
)

// tilesPermitted reports whether the process may use the tiles of AMX for bf16. The first call asks
// Linux: threads that use them have 8 KiB more state from then on.
var tilesPermitted = sync.OnceValue(func() bool {
	const (
		requestPermission = 0x1023 // ARCH_REQ_XCOMP_PERM
		tileData          = 18
	)
	if x := &cpu.X86; !x.HasAMXTile || !x.HasAMXBF16 || !x.HasAVX512BF16 || !x.HasAVX512BW {
		return false
	}
	_, _, err := syscall.RawSyscall(syscall.SYS_ARCH_PRCTL, requestPermission, tileData, 0)
	return err == 0
})
