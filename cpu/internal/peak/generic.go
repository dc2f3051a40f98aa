package peak

import "runtime"

// generic is the loop in plain Go, a lower bound on every machine.
var generic = kernel{"Go", 8 * 2, fmaGeneric}

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
