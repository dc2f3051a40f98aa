// Command main writes the assembly of package peak. Each run writes one kind of loop:
//
//	go run . -kernels fma -out ../fma_amd64.s -stubs ../fma_amd64.go -pkg peak
//	go run . -kernels read -out ../read_amd64.s -stubs ../read_amd64.go -pkg peak
//
// It is a module of its own, so programs that import attn do not download it.
package main

import (
	"flag"
	"fmt"
	"log"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	kernels := flag.String("kernels", "", "fma or read")
	flag.Parse()
	switch *kernels {
	case "fma":
		// 16 chains: an FMA takes 4 or 5 cycles and at most 2 start in each, so 10
		// chains are enough; 16 also suit narrower units.
		loop("fmaAVX512", "AVX-512F registers of 16", 16, ZMM)
		// 12 chains of the 16 registers, two of which hold constants.
		loop("fmaAVX2", "AVX2 registers of 8", 12, YMM)
	case "read":
		read("readAVX512", "AVX-512F", 64, ZMM)
		read("readAVX2", "AVX2", 32, YMM)
	default:
		log.Fatalf("-kernels is %q, it must be fma or read", *kernels)
	}
	Generate()
}

// loop writes func name(n int, x, y float32), which computes c = c*x + y n times in
// each of chains registers.
func loop(name, what string, chains int, register func() reg.VecVirtual) {
	TEXT(name, NOSPLIT, "func(n int, x, y float32)")
	Doc(fmt.Sprintf("%s computes c = c*x + y n times in each of %d %s.", name, chains, what))
	n := Load(Param("n"), GP64())
	x, y := register(), register()
	for _, c := range []struct {
		param string
		to    reg.VecVirtual
	}{{"x", x}, {"y", y}} {
		arg, err := Param(c.param).Resolve()
		if err != nil {
			log.Fatalf("%s: parameter %s: %v", name, c.param, err)
		}
		VBROADCASTSS(arg.Addr, c.to)
	}
	acc := make([]reg.VecVirtual, chains)
	for i := range acc {
		acc[i] = register()
		VMOVUPS(x, acc[i])
	}
	Label("next")
	for _, c := range acc {
		VFMADD213PS(y, x, c)
	}
	DECQ(n)
	JNZ(LabelRef("next"))
	VZEROUPPER()
	RET()
}

const (
	// streams is the number of places that a read loop reads at once. A core reads a
	// tenth faster with four than with one, and no faster with eight.
	streams = 4
	// turn is the number of bytes of each stream that one turn reads.
	turn = 256
)

// read writes func name(p *byte, apart, n int), which loads n*turn bytes from each of p,
// p+apart, p+2*apart and p+3*apart on, into registers of width bytes. The values are not
// used; the processor loads them nevertheless.
func read(name, what string, width int, register func() reg.VecVirtual) {
	TEXT(name, NOSPLIT, "func(p *byte, apart, n int)")
	Pragma("noescape")
	Doc(fmt.Sprintf("%s loads n*%d bytes at each of p, p+apart, p+2*apart and p+3*apart, with %s.", name, turn, what))
	p, apart, n := Load(Param("p"), GP64()), Load(Param("apart"), GP64()), Load(Param("n"), GP64())
	at := [streams]reg.Register{p}
	for i := 1; i < streams; i++ {
		next := GP64()
		MOVQ(at[i-1], next)
		ADDQ(apart, next)
		at[i] = next
	}
	to := register()
	Label("next")
	for _, from := range at {
		for off := 0; off < turn; off += width {
			VMOVUPS(Mem{Base: from, Disp: off}, to)
		}
		ADDQ(U32(turn), from)
	}
	DECQ(n)
	JNZ(LabelRef("next"))
	VZEROUPPER()
	RET()
}
