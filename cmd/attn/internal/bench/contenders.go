package bench

import (
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// tiers returns the CPU backend with each instruction set, the widest vectors first; the
// last is gonum. The caller closes the devices.
func tiers(threads int) []bench.Contender {
	var list []bench.Contender
	for _, tier := range cpu.Tiers() {
		list = append(list, bench.Contender{Name: tier, Device: kernels.NewDevice(cpu.New(cpu.Options{Threads: threads, Tier: tier}))})
	}
	return list
}

// closeAll closes the devices of contenders.
func closeAll(list []bench.Contender) {
	for _, c := range list {
		c.Device.Close()
	}
}
