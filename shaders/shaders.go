// Package shaders holds attn's WGSL, one kernel a file, and makes variants of
// it. It knows no device.
//
// A file is valid WGSL as it stands. Constants at its head, such as
//
//	const DVB: u32 = 2u;
//
// are rewritten by [Kernel.Specialise] for each variant, as the oldest WGSL
// compiler that attn meets has no override declarations:
//
//	src, err := shaders.Attention.Specialise(map[string]uint32{"DVB": 4, "ACC": 16})
//
// Loops that a file marks may be unrolled on the way, for compilers that do not do it
// themselves, see [Kernel.Specialise].
//
// Lengths, strides and visibility are uniforms, not constants: a new sequence
// length compiles nothing.
package shaders

import (
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Kernel is one shader file. Its entry point is called main.
type Kernel struct {
	// Name is the file's name without .wgsl.
	Name string
	// Source is the file as it stands.
	Source string
	// Bindings are the kinds of group 0's bindings in order, one letter each: r
	// for read-only storage, w for storage that is written, u for the uniform.
	// After it variants with BOTH = 1 have a mask of blocks and a bias by distance, rr,
	// and those with PAGED = 1 the table of pages, r.
	Bindings string
	// WorkgroupMemory is what a workgroup takes, in bytes.
	WorkgroupMemory int
	// Threads is the size of a workgroup.
	Threads int
}

//go:embed attention.wgsl
var attention string

//go:embed flash.wgsl
var flash string

//go:embed matmul.wgsl
var matmul string

//go:embed softmax.wgsl
var softmax string

//go:embed merge.wgsl
var merge string

//go:embed decode.wgsl
var decode string

//go:embed splitmerge.wgsl
var splitMerge string

//go:embed rope.wgsl
var rope string

//go:embed convert.wgsl
var convert string

//go:embed peak.wgsl
var peak string

//go:embed copy.wgsl
var copying string

//go:embed read.wgsl
var reading string

//go:embed banks.wgsl
var banks string

// The kernels.
var (
	Attention  = Kernel{"attention", attention, "rrrrrwwwu", 14848, 64}
	Flash      = Kernel{"flash", flash, "rrrrrwwwu", 12672, 128}
	Matmul     = Kernel{"matmul", matmul, "rrrwwu", 13184, 128}
	Softmax    = Kernel{"softmax", softmax, "rrwwwu", 4352, 64}
	Decode     = Kernel{"decode", decode, "rrrrrwu", 15392, 128}
	SplitMerge = Kernel{"splitmerge", splitMerge, "rwwu", 64, 128}
	Merge      = Kernel{"merge", merge, "rrwwu", 0, 64}
	RoPE       = Kernel{"rope", rope, "rrrwu", 0, 64}
	Convert    = Kernel{"convert", convert, "rwu", 256, 64}
	Peak       = Kernel{"peak", peak, "wu", 0, 64}
	Copy       = Kernel{"copy", copying, "rwu", 0, 64}
	Read       = Kernel{"read", reading, "rrrrwu", 0, 64}
	Banks      = Kernel{"banks", banks, "wu", 4096, 64}
)

// All lists the kernels.
func All() []Kernel {
	return []Kernel{Attention, Flash, Decode, SplitMerge, Matmul, Softmax, Merge, RoPE, Convert, Peak, Copy, Read, Banks}
}

var constant = regexp.MustCompile(`(?m)^const ([A-Z0-9_]+): u32 = ([0-9]+)u;`)

// Constants returns the constants that Specialise can rewrite, with the values
// in the file.
func (k Kernel) Constants() map[string]string {
	m := map[string]string{}
	for _, c := range constant.FindAllStringSubmatch(k.Source, -1) {
		m[c[1]] = c[2]
	}
	return m
}

// Specialise returns the source with new values for some of its constants, and without
// the blocks marked static that they make false. Three of them mean more where a file
// has them: EXPAND unrolls marked loops ([Looped], [Registers], [Full]), OUT16 = 1 takes
// o and the function that stores to it from the attention kernel, which stores every
// type, and BOTH = 0 and PAGED = 0 take the bindings away that only 1 has. It returns an
// error that names a constant which the file does not have.
func (k Kernel) Specialise(values map[string]uint32) (string, error) {
	if len(values) == 0 {
		return k.Source, nil
	}
	have := k.Constants()
	for name := range values {
		if _, ok := have[name]; !ok {
			names := make([]string, 0, len(have))
			for n := range have {
				names = append(names, n)
			}
			slices.Sort(names)
			return "", fmt.Errorf("shader %s has no constant %s, it has %s", k.Name, name, strings.Join(names, ", "))
		}
	}
	consts := map[string]uint32{}
	src := constant.ReplaceAllStringFunc(k.Source, func(line string) string {
		m := constant.FindStringSubmatch(line)
		value, ok := values[m[1]]
		if !ok {
			n, _ := strconv.ParseUint(m[2], 10, 32) // the compiler says if it is too large
			consts[m[1]] = uint32(n)
			return line
		}
		consts[m[1]] = value
		return fmt.Sprintf("const %s: u32 = %du;", m[1], value)
	})
	if n, ok := consts["THREADS"]; ok { // naga 0.13 takes no constant there
		src = groupSize.ReplaceAllString(src, fmt.Sprintf("@workgroup_size(%d)", n))
	}
	if consts["OUT16"] == 1 {
		src = anyOutput.ReplaceAllString(src, "${1}atomic<u32>${2}")
		src = putFunc.ReplaceAllLiteralString(src, encodeFunc.FindString(attention)+"\n\n"+putFunc.FindString(attention))
	}
	src = bindings(src, consts)
	src, err := unroll(src, consts["EXPAND"], consts)
	if err != nil {
		return "", fmt.Errorf("shader %s: %w", k.Name, err)
	}
	return src, nil
}

// bindings takes the bindings away that a constant of 0 at the end of their line does not
// ask for, and numbers the others.
func bindings(src string, consts map[string]uint32) string {
	n := 0
	return binding.ReplaceAllStringFunc(src, func(line string) string {
		m := binding.FindStringSubmatch(line)
		if _, ok := consts[m[4]]; ok && consts[m[4]] == 0 {
			return ""
		}
		n++
		return fmt.Sprintf("%s%d%s\n", m[1], n-1, m[2])
	})
}

var (
	groupSize  = regexp.MustCompile(`@workgroup_size\([0-9]+\)`)
	anyOutput  = regexp.MustCompile(`(var<storage, read_write> o: array<)u32(>;)`)
	binding    = regexp.MustCompile(`(?m)^(@group\(0\) @binding\()\d+(\) var<.*?)( // ([A-Z]+))?\n`)
	putFunc    = regexp.MustCompile(`(?ms)^fn put\(.*?^}`)
	encodeFunc = regexp.MustCompile(`(?ms)^fn encode16\(.*?^}`)
)
