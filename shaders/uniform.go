package shaders

import "encoding/binary"

// Params are the parameters of a kernel: a type of params.go.
type Params interface {
	// Size returns the size of the uniform in bytes, a multiple of 16.
	Size() int
	// Append appends the contents of the uniform to b.
	Append(b []byte) []byte
}

// Ranged are the parameters of a kernel whose workgroups may be spread over several
// dispatches.
type Ranged interface {
	Params
	// SetRange sets the number of the dispatch's first workgroup, and of the first
	// workgroup after it.
	SetRange(first, total int)
}

func put32(b []byte, x uint32) []byte { return binary.LittleEndian.AppendUint32(b, x) }
