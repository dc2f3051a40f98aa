package peak

import "golang.org/x/sys/cpu"

// kernels returns the loops that this machine runs, the widest first.
func kernels() []kernel {
	var list []kernel
	if cpu.X86.HasAVX512F {
		list = append(list, kernel{"avx512", 16 * 16 * 2, fmaAVX512, readAVX512})
	}
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		list = append(list, kernel{"avx2", 12 * 8 * 2, fmaAVX2, readAVX2})
	}
	return append(list, generic)
}
