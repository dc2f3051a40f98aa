package vec

import "golang.org/x/sys/cpu"

// assembly lists the tables of assembly kernels that this machine runs, the
// widest first.
var assembly = func() (list []*Kernels) {
	x := &cpu.X86
	if !x.HasAVX2 || !x.HasFMA {
		return nil
	}
	if x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL && x.HasBMI2 {
		list = append(list, &kernelsAVX512)
		const authenticAMD = 0x68747541 // its first letters
		model, _ := cpuid(1)
		if _, vendor := cpuid(0); x.HasAVX512BF16 && x.HasAVX512BW && vendor == authenticAMD {
			// Zen 4, family 25, has units of 256 bits: pairs of keys do not pay for their interleaving.
			if all := &kernelsAVX512Half.tile.scores; model>>20&0xff == 25-15 {
				*all = (*all)[1:]
			}
			kernelsAVX512 = *kernelsAVX512.WithoutTiles()
		}
		if !x.HasAVX512VNNI {
			kernelsAVX512.dots[Fixed] = nil
		}
	}
	// F16C has no flag in x/sys/cpu: every processor with AVX2 has it.
	return append(list, &kernelsAVX2)
}()
