package peak

import (
	"runtime"
	"unsafe"
)

// generic is the pair of loops in plain Go, whose rates are lower bounds.
var generic = kernel{"go", 8 * 2, fmaGeneric, readGeneric}

// fmaGeneric computes c = c*x + y n times in each of 8 variables.
//
//go:noinline
func fmaGeneric(n int, x, y float32) {
	c0, c1, c2, c3, c4, c5, c6, c7 := x, x, x, x, x, x, x, x
	for range n {
		c0, c1, c2, c3 = c0*x+y, c1*x+y, c2*x+y, c3*x+y
		c4, c5, c6, c7 = c4*x+y, c5*x+y, c6*x+y, c7*x+y
	}
	runtime.KeepAlive(c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7) // else the compiler drops the loop
}

// readGeneric loads n·turnBytes bytes from each of p, p+apart, p+2·apart and p+3·apart on, one after another.
//
//go:noinline
func readGeneric(p *byte, apart, n int) {
	var seen [streams]uint64
	for stream := range streams {
		for _, word := range unsafe.Slice((*uint64)(unsafe.Add(unsafe.Pointer(p), stream*apart)), n*turnBytes/8) {
			seen[stream] |= word
		}
	}
	runtime.KeepAlive(seen) // else the compiler drops the loop
}
