//go:build !amd64 && !arm64

package vec

// assembly lists the tables of assembly kernels that this machine runs: none.
var assembly []*Kernels
