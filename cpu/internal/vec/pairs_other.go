//go:build !linux || !amd64

package vec

func (x *Kernels) pairs() *pairKernels { return nil }
