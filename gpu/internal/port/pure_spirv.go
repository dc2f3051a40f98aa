//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"encoding/binary"
	"fmt"
	"regexp"

	"github.com/gogpu/naga"
)

// SPIR-V numbers, from its specification, unified1.
const (
	spirvHeader       = 5 // words before the first instruction
	opConstantNull    = 46
	opVariable        = 59
	opStore           = 62
	storageClassGroup = 4 // Workgroup
)

var letOfValue = regexp.MustCompile(`\blet (\w+[^=\n]*= *[^&\s])`)

// letsToVars makes variables of all names for values, which means the same. The
// library reads the components of a name for what was in memory (let v = x[i]) from
// memory again, wherever they are used: what has been written there since comes out,
// and a vec4 of workgroup memory costs four reads, more than half of a kernel's time.
// A variable keeps its value.
func letsToVars(wgsl string) string { return letOfValue.ReplaceAllString(wgsl, "var $1") }

// compile turns WGSL into SPIR-V as the library would, but without the stores
// that clear workgroup memory. It clears a whole array with one store, in one
// thread, which drivers expand element by element: on Mesa's software driver
// that alone takes ten times as long to compile as the rest of the kernel, and
// the work is repeated in every workgroup. attn's kernels write their workgroup
// memory before they read it.
func compile(wgsl string) ([]uint32, error) {
	code, err := naga.Compile(letsToVars(wgsl))
	if err != nil {
		return nil, err
	}
	if len(code)%4 != 0 || len(code) < 4*spirvHeader {
		return nil, fmt.Errorf("compiled to %d bytes, which is no SPIR-V", len(code))
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
			return nil, fmt.Errorf("instruction %d at word %d runs over the end", op, i)
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
		}
		out = append(out, in...)
	}
	return out, nil
}
