package vec

import (
	"sync"
	"syscall"

	"golang.org/x/sys/cpu"
)

var pairsAMX = pairKernels{
	unit:  "AMX-BF16",
	tiles: [3]pairTile{{pairScoresAMXx1, pairValuesAMXx1}, {pairScoresAMXx2, pairValuesAMXx2}, {pairScoresAMX, pairValuesAMX}},
	turn:  turnAMX, turnPairs: turnPairsAMX, roundPairs: roundPairsAMX,
}

// availablePairs returns the pair kernels that this machine runs, or nil. The first call asks Linux to let
// the process use tiles: every thread that does so has 8 KiB more state from then on.
var availablePairs = sync.OnceValue(func() *pairKernels {
	const (
		requestPermission = 0x1023 // ARCH_REQ_XCOMP_PERM
		tileData          = 18
	)
	if x := &cpu.X86; !x.HasAMXTile || !x.HasAMXBF16 || !x.HasAVX512BF16 || !x.HasAVX512BW {
		return nil
	}
	if _, _, err := syscall.RawSyscall(syscall.SYS_ARCH_PRCTL, requestPermission, tileData, 0); err != 0 {
		return nil
	}
	return &pairsAMX
})

func (x *Kernels) pairs() *pairKernels { return availablePairs() }
