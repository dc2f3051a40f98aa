package port

import (
	"fmt"
	"regexp"
	"strconv"

	"github.com/gogpu/naga"
	"github.com/gogpu/naga/ir"
	"github.com/gogpu/naga/msl"
)

var bufferSize = regexp.MustCompile(`\bsize(\d+)\b`)

// Metal compiles WGSL to Metal's language as gogpu's compiler does, with bounds checks of
// indices and buffers. The numbers of buffers and of their sizes are those of the bindings.
// Workgroup memory is not cleared, as in [SPIRV].
func Metal(wgsl string) (string, error) {
	wgsl = letsToVars(wgsl)
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
