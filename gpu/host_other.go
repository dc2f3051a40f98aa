//go:build !linux

package gpu

// hostMemory returns a bound on the memory that the machine can have: these
// systems are not asked.
func hostMemory() uint64 { return unknownMemory }
