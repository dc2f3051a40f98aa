package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// fma computes c = c*x + y n times in each of chains registers, and returns the operations.
func (a *isa) fma(chains int) {
	a.kernel("fma")
	n, x, y, acc := param("n"), a.broadcastParam("x"), a.broadcastParam("y"), a.vecs(chains)
	operations := GP64()
	IMUL3Q(U32(uint32(2*a.lanes*chains)), n, operations)
	for i := range acc {
		VMOVUPS(x, acc[i])
	}
	loop("next", n, 1, func() {
		for _, c := range acc {
			VFMADD213PS(y, x, c)
		}
	})
	Store(operations, ReturnIndex(0))
	end()
}

const (
	// streams is the number of places that a read loop reads at once. A core reads a
	// tenth faster with four than with one, and no faster with eight.
	streams = 4
	// turn is the number of bytes of each stream that one turn reads.
	turn = 256
)

// read loads n*turn bytes from each of p, p+apart, p+2*apart and p+3*apart on. The values are not
// used; the processor loads them nevertheless.
func (a *isa) read() {
	a.kernel("read")
	p, apart, n := param("p"), param("apart"), param("n")
	at := [streams]reg.Register{p}
	for i := 1; i < streams; i++ {
		next := GP64()
		MOVQ(at[i-1], next)
		ADDQ(apart, next)
		at[i] = next
	}
	to := a.vec()
	loop("next", n, 1, func() {
		for _, from := range at {
			for i := range turn / a.bytes() {
				VMOVUPS(a.at(from, i), to)
			}
			ADDQ(U32(turn), from)
		}
	})
	end()
}
