// Package wgsl compiles WGSL to other languages as gogpu does, without that compiler's defects. It needs no device.
package wgsl

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"

	"github.com/gogpu/naga"
	"github.com/gogpu/naga/ir"
	"github.com/gogpu/naga/msl"
)

// SPIR-V numbers, from its specification, unified1.
const (
	spirvHeader       = 5 // words before the first instruction
	opExtInst         = 12
	opConstantNull    = 46
	opVariable        = 59
	opStore           = 62
	storageClassGroup = 4 // Workgroup
	extRound          = 1 // of GLSL.std.450, the only set that gogpu imports
	extRoundEven      = 2
)

var unset = regexp.MustCompile(`\bvar (\w+): ([^=;]+);`)

var letOfValue = regexp.MustCompile(`\blet (\w+[^=\n]*= *[^&\s])`)

// Mended returns WGSL of the same meaning that gogpu compiles correctly. It replaces let
// declarations with var declarations: gogpu compiles a component of a let of a memory location
// (let v = x[i]) as another read of memory. It therefore returns values that were written later,
// and a vec4 of workgroup memory takes four reads, more than half of a kernel's time. A var keeps
// its value. Variables without a value get the zero that WGSL gives them: gogpu leaves them undefined.
func Mended(wgsl string) string {
	return unset.ReplaceAllString(letOfValue.ReplaceAllString(wgsl, "var $1"), "var $1: $2 = $2();")
}

// SPIRV compiles WGSL to SPIR-V as gogpu does for Vulkan, and removes the stores that clear workgroup memory. Each of
// them clears a whole array in one thread, and drivers expand it element by element. Mesa's software driver takes ten
// times as long to compile it as the rest of the kernel, and every workgroup repeats the work. attn's kernels write
// their workgroup memory before they read it. WGSL's round becomes RoundEven, as Round may take either integer for a
// half.
func SPIRV(wgsl string) ([]uint32, error) {
	code, err := naga.Compile(Mended(wgsl))
	if err != nil {
		return nil, err
	}
	if len(code)%4 != 0 || len(code) < 4*spirvHeader {
		return nil, fmt.Errorf("compiled to %d bytes, which is not SPIR-V", len(code))
	}
	words := make([]uint32, len(code)/4)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(code[4*i:])
	}
	null, group := map[uint32]bool{}, map[uint32]bool{}
	out := words[:spirvHeader:spirvHeader]
	for i := spirvHeader; i < len(words); {
		op, n := words[i]&0xffff, int(words[i]>>16)
		if n == 0 || i+n > len(words) {
			return nil, fmt.Errorf("instruction %d at word %d exceeds the module", op, i)
		}
		in := words[i : i+n]
		i += n
		switch {
		case op == opConstantNull && n == 3:
			null[in[2]] = true
		case op == opVariable && n >= 4 && in[3] == storageClassGroup:
			group[in[2]] = true
		case op == opStore && n >= 3 && group[in[1]] && null[in[2]]:
			continue
		case op == opExtInst && n >= 5 && in[4] == extRound:
			in[4] = extRoundEven
		}
		out = append(out, in...)
	}
	return out, nil
}

var bufferSize = regexp.MustCompile(`\bsize(\d+)\b`)

// Metal compiles WGSL to Metal's language as gogpu's compiler does, with bounds checks of indices and buffers. The
// numbers of buffers and of their sizes are those of the bindings. Workgroup memory is not cleared, as in [SPIRV].
func Metal(wgsl string) (string, error) {
	wgsl = Mended(wgsl)
	ast, err := naga.Parse(wgsl)
	if err != nil {
		return "", err
	}
	module, err := naga.LowerWithSource(ast, wgsl)
	if err != nil {
		return "", err
	}
	buffers := map[ir.ResourceBinding]msl.BindTarget{}
	for _, g := range module.GlobalVariables {
		if g.Binding != nil {
			n := uint8(g.Binding.Binding)
			buffers[*g.Binding] = msl.BindTarget{Buffer: &n, Mutable: true}
		}
	}
	opt := msl.DefaultOptions()
	opt.ZeroInitializeWorkgroupMemory, opt.ForceLoopBounding, opt.FakeMissingBindings = false, false, false
	opt.BoundsCheckPolicies = msl.BoundsCheckPolicies{Index: msl.BoundsCheckRestrict, Buffer: msl.BoundsCheckReadZeroSkipWrite}
	opt.PerEntryPointMap = map[string]msl.EntryPointResources{"main": {Resources: buffers}}
	code, _, err := msl.Compile(module, opt)
	return bufferSize.ReplaceAllStringFunc(code, func(size string) string { // naga counts variables
		n, err := strconv.Atoi(size[len("size"):])
		if err != nil || n >= len(module.GlobalVariables) || module.GlobalVariables[n].Binding == nil {
			return size
		}
		return fmt.Sprint("size", module.GlobalVariables[n].Binding.Binding)
	}), err
}
