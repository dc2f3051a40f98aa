//go:build !linux

package cpu

// machineMemory returns a bound on the memory that the machine can have: these
// systems are not asked.
func machineMemory() uint64 { return unknownMemory }
