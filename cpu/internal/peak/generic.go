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

// readGeneric loads n·turnBytes bytes from each of p, p+apart, p+2·apart and p+3·apart on.
//
//go:noinline
func readGeneric(p *byte, apart, n int) {
	var c0, c1, c2, c3 uint64
	length := 3*apart + n*turnBytes
	all := unsafe.Slice((*uint64)(unsafe.Pointer(p)), length/8)
	words, apart := n*turnBytes/8, apart/8
	w0, w1, w2, w3 := all[:words], all[apart:][:words], all[2*apart:][:words], all[3*apart:][:words]
	for i := range w0 {
		c0, c1, c2, c3 = c0|w0[i], c1|w1[i], c2|w2[i], c3|w3[i]
	}
	runtime.KeepAlive(c0 | c1 | c2 | c3) // else the compiler drops the loop
}
