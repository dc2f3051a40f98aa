// Package shaders holds attn's WGSL, one kernel a file, and renders variants of it. It does not use a device.
//
// A variant is a struct with the choices of its kernel:
//
//	src, err := shaders.Render(shaders.Attention{KV: shaders.F16, DVB: 4})
//
// Each field becomes a constant, such as
//
//	const DVB: u32 = 4u;
//
// Constants of a file may be expressions of these. The oldest supported WGSL compiler has neither
// override declarations nor constant expressions, so Render writes the values. Render also removes
// comments and replaces attributes that WGSL does not have:
//
//	@binding var<...> x: T;             numbers the bindings of group 0 in their order
//	@binding var<...> a, b: T;          declares several names of a type, as do variables and fields of parameters
//	@ranged struct A { ... }            parameters of a kernel with @main: adds first, total and padding
//	@main(n) { ... }                    the entry point, for n threads; it has t, the thread, and id, see [Ranged],
//	                                    and on matrix units subgroup and lane
//	@if(IN == 1u) ... @else ...         keeps one of two declarations or statements; @else is optional
//	@unroll for (...) { ... }           copies the body for each value of the counter, see [Expand]
//	@each($x $T: q IN, k KV) fn f_$x    copies a declaration or statement: WGSL has no pointers to bindings
//	@inline f(a);                       inserts the body of a function @inline fn f($x) { ... } as text
//
// Conditions and the bounds of unrolled loops consist of constants. An inline function sees the
// variables of its caller, and its caller sees those that it declares. The main function of a large
// kernel is a list of inline functions in the order of the formula.
//
// A folder with the name of a kernel has more of that kernel. Declarations that several kernels use are in
// common; Render adds those that a variant uses.
//
// Lengths, strides and visibility are parameters, not constants: calls of different lengths run the same code.
// [AttentionParams] and the other parameter types are generated from the WGSL structures of the same names.
package shaders

//go:generate go run ./_generate

import "encoding/binary"

// Params are the parameters of a kernel: a type of params.go.
type Params interface {
	// Size returns the size of the uniform in bytes, a multiple of 16.
	Size() int
	// Append appends the contents of the uniform to b.
	Append(b []byte) []byte
}

// Ranged are the parameters of a kernel whose workgroups may be spread over several dispatches.
type Ranged interface {
	Params
	// SetRange sets the number of the dispatch's first workgroup, and of the first workgroup after it.
	SetRange(first, total int)
}

func put32(b []byte, x uint32) []byte { return binary.LittleEndian.AppendUint32(b, x) }
