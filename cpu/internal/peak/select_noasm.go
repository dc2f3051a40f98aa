//go:build !amd64 && !arm64

package peak

// kernels returns the loops that this machine runs, the widest first.
func kernels() []kernel { return []kernel{generic} }
