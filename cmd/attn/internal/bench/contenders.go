package bench

import (
	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// blasLibrary is a BLAS that replaces gonum's own.
type blasLibrary struct {
	name        string
	impl, gonum blas.Float32
}

// plugged is the BLAS of the build; nil for gonum's own.
var plugged *blasLibrary

// contenders returns the CPU backend with each instruction set, the widest
// vectors first, and with the BLAS of the build. The caller closes the devices.
func contenders(threads int) []bench.Contender {
	list := tiers(threads)
	if plugged != nil {
		gonum := kernels.NewDevice(cpu.New(cpu.Options{Threads: threads, Tier: "gonum"}))
		list = append(list, bench.Contender{Name: "gonum + " + plugged.name, Device: gonum, Use: func() { blas32.Use(plugged.impl) }})
	}
	return list
}

// tiers returns the CPU backend with each instruction set; the last is gonum
// with its own BLAS.
func tiers(threads int) []bench.Contender {
	useGonum := func() {
		if plugged != nil {
			blas32.Use(plugged.gonum)
		}
	}
	var list []bench.Contender
	for _, tier := range cpu.Tiers() {
		list = append(list, bench.Contender{Name: tier, Device: kernels.NewDevice(cpu.New(cpu.Options{Threads: threads, Tier: tier})), Use: useGonum})
	}
	return list
}

// closeAll closes the devices of contenders.
func closeAll(list []bench.Contender) {
	for _, c := range list {
		c.Device.Close()
	}
}
