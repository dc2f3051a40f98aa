//go:build !amd64

package vec

// Tiers returns the kernels that this machine runs in assembly: none.
func Tiers() []*Kernels { return nil }
