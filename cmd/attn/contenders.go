package main

import (
	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/cpu"
)

// blasLibrary is a BLAS that takes the place of gonum's own.
type blasLibrary struct {
	name        string
	impl, gonum blas.Float32
}

// plugged is the BLAS that the program was built with; nil for gonum's own.
var plugged *blasLibrary

// contenders returns the ways in which the CPU backend computes here, the widest
// vectors first. The caller closes their backends.
func contenders(threads int) []bench.Contender {
	list := tiers(threads)
	if plugged != nil {
		gonum := cpu.New(cpu.Options{Threads: threads, Tier: "gonum"})
		list = append(list, bench.Contender{Name: "gonum + " + plugged.name, Backend: gonum, Use: usePlugged})
	}
	return list
}

// tiers returns the tiers of instructions that the CPU backend has here, the last
// of which is gonum with its own BLAS.
func tiers(threads int) []bench.Contender {
	var list []bench.Contender
	for _, tier := range cpu.Tiers() {
		list = append(list, bench.Contender{Name: tier, Backend: cpu.New(cpu.Options{Threads: threads, Tier: tier}), Use: useGonum})
	}
	return list
}

// closeAll closes the backends of contenders.
func closeAll(list []bench.Contender) {
	for _, c := range list {
		c.Backend.Close()
	}
}

// useGonum puts gonum's own BLAS in place.
func useGonum() {
	if plugged != nil {
		blas32.Use(plugged.gonum)
	}
}

// usePlugged puts the BLAS in place that the program was built with.
func usePlugged() { blas32.Use(plugged.impl) }
