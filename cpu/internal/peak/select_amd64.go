package peak

import "golang.org/x/sys/cpu"

// best is the widest loop that the machine runs.
var best = kernels()[0]

// kernels returns the loops that this machine runs, the widest first.
func kernels() []kernel {
	var list []kernel
	if cpu.X86.HasAVX512F {
		list = append(list, kernel{"AVX-512F", 16 * 16 * 2, fmaAVX512})
	}
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		list = append(list, kernel{"AVX2", 12 * 8 * 2, fmaAVX2})
	}
	return append(list, generic)
}
