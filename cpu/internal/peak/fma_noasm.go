//go:build !amd64

package peak

// best is the only loop that there is.
var best = generic

// kernels returns the loops that this machine runs, the widest first.
func kernels() []kernel { return []kernel{generic} }
