//go:build !linux

package cpu

// machineMemory returns a bound on the memory that a machine can have.
func machineMemory() uint64 { return unknownMemory }
