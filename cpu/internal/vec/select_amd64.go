package vec

import "golang.org/x/sys/cpu"

// assembly lists the tables of assembly kernels that this machine runs, the
// widest first.
var assembly = func() []*Kernels {
	x := &cpu.X86
	if !x.HasAVX2 || !x.HasFMA {
		return nil
	}
	// F16C has no flag in x/sys/cpu: every processor with AVX2 has it.
	kernelsAVX2.narrow = []*Kernels{narrowAVX2x1(kernelsAVX2), narrowAVX2x2(kernelsAVX2)}
	if !x.HasAVX512F || !x.HasAVX512BW || !x.HasAVX512DQ || !x.HasAVX512VL || !x.HasBMI2 {
		return []*Kernels{&kernelsAVX2}
	}
	const authenticAMD = 0x68747541 // its first letters
	model, _ := cpuid(1)
	_, vendor := cpuid(0)
	if !x.HasAVX512BF16 || vendor != authenticAMD {
		return []*Kernels{tablesAVX512(x.HasAVX512VNNI, x.HasAVX512VBMI, 0), &kernelsAVX2}
	}
	wide := tablesAVX512(x.HasAVX512VNNI, x.HasAVX512VBMI, 15+model>>20&0xff).WithoutTiles()
	return []*Kernels{wide, &kernelsAVX2}
}()

// The families of AMD's processors with bf16.
const zen4, zen5 = 25, 26

// tablesAVX512 returns the tables of AVX-512 for a family of AMD's, or 0 for others. Narrow tables are copies of the widest
// one: a kernel that it does not have is missing in them too. Zen 4 has units of 256 bits: pairs of keys are no faster there.
func tablesAVX512(vnni, vbmi bool, family uint32) *Kernels {
	x, half := kernelsAVX512, narrowAVX512Half(kernelsAVX2)
	x.ordered, x.zen5 = &kernelsAVX512Ordered, family == zen5
	if vbmi {
		x.vbmi = &kernelsAVX512VBMI
	}
	if !vnni {
		x.dots[Fixed] = nil
	}
	if x.zen4 = family == zen4; x.zen4 {
		half.tile.scores = half.tile.scores[1:]
	}
	x.narrow = []*Kernels{half, narrowAVX512x1(x), narrowAVX512x2(x)}
	for _, narrow := range x.narrow {
		narrow.RowOutputs = narrow.tile.rowValues != nil
	}
	return &x
}
