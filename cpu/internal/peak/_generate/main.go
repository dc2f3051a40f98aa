// Command main writes the assembly of package peak:
//
//	go run . -out ../fma_amd64.s -stubs ../fma_amd64.go -pkg peak
//
// It is a module of its own, so that who uses attn never downloads it.
package main

import (
	"fmt"
	"log"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	// 16 chains: an FMA takes 4 or 5 cycles and at most 2 start in each, so 10
	// chains are enough; 16 divide a unit that is narrower as well.
	loop("fmaAVX512", "AVX-512F registers of 16", 16, ZMM)
	// 12 chains of the 16 registers, two of which hold constants.
	loop("fmaAVX2", "AVX2 registers of 8", 12, YMM)
	Generate()
}

// loop writes func name(n int, x, y float32): n times, in each of chains
// registers, c = c*x + y.
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
