// Package shaders holds attn's WGSL, one kernel a file, and generates variants of it. It does
// not use a device.
//
// A variant gives new values to constants at the head of a kernel's file, such as
//
//	const DVB: u32 = 2u;
//
// The oldest supported WGSL compiler has no override declarations, so [Kernel.Specialise]
// rewrites the text:
//
//	src, err := shaders.Attention.Specialise(map[string]uint32{"DVB": 4, "ACC": 16})
//
// Functions, structures and constants that several kernels use are declared once, in
// common. Specialise adds those that a variant uses, directly or through others.
//
// Lengths, strides and visibility are parameters, not constants: calls of different lengths
// run the same code. [AttentionParams] and the other parameter types are generated from the
// WGSL structures of the same names.
package shaders

//go:generate go run ./_generate

import (
	"embed"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Kernel is one shader file. Its entry point is called main.
type Kernel struct {
	// Name is the file's name without .wgsl.
	Name string
	// Source is the text of the file.
	Source string
	// Bindings are the kinds of group 0's bindings in order, one letter each: r for
	// read-only storage, w for storage that is written, u for the uniform. Variants with
	// BOTH = 1 append a block mask and a relative bias, rr, and variants with PAGED = 1
	// the table of pages, r.
	Bindings string
	// WorkgroupMemory is the workgroup memory in bytes.
	WorkgroupMemory int
	// Threads is the size of a workgroup.
	Threads int
}

//go:embed *.wgsl common/*.wgsl
var files embed.FS

// The kernels.
var (
	Attention  = kernel("attention", "rrrrrwwwu", 14848, 64)
	Flash      = kernel("flash", "rrrrrwwwu", 13700, 128)
	Decode     = kernel("decode", "rrrrrwu", 5448, 64)
	SplitMerge = kernel("splitmerge", "rwwu", 2112, 128)
	Matmul     = kernel("matmul", "rrrwwu", 13184, 128)
	Softmax    = kernel("softmax", "rrwwwu", 4352, 64)
	Merge      = kernel("merge", "rrwwu", 0, 64)
	RoPE       = kernel("rope", "rrrwu", 0, 64)
	Convert    = kernel("convert", "rwu", 256, 64)
	Delta      = kernel("delta", "rrrrwwu", 256, 64)
	Gradient   = kernel("gradient", "rrrrrrrwu", 13704, 128)
	Reduce     = kernel("reduce", "rwu", 256, 64)
	Peak       = kernel("peak", "wu", 0, 64)
	Copy       = kernel("copy", "rwu", 0, 64)
	Read       = kernel("read", "rrrrwu", 0, 64)
	Banks      = kernel("banks", "wu", 4096, 64)
	// Exponentials has no uniform.
	Exponentials = kernel("exponentials", "rw", 0, 64)
)

func kernel(name, bindings string, memory, threads int) Kernel {
	return Kernel{name, read(name + ".wgsl"), bindings, memory, threads}
}

// read returns the text of an embedded file, in which a function that is marked
//
//	// each $x $TYPE: k KV, a A
//	fn load_$x(...
//
// becomes one function for k and KV and one for a and A: WGSL has no pointers to bindings
// as arguments.
func read(name string) string {
	text, err := files.ReadFile(name)
	if err != nil {
		panic(err) // the name is a constant of this package
	}
	return marked.ReplaceAllStringFunc(string(text), func(s string) string {
		m := marked.FindStringSubmatch(s)
		names, all := strings.Fields(m[1]), ""
		for _, list := range strings.Split(m[2], ",") {
			var with []string
			for i, value := range strings.Fields(list) {
				with = append(with, names[i], value)
			}
			all += strings.NewReplacer(with...).Replace(m[3])
		}
		return all
	})
}

var marked = regexp.MustCompile(`(?m)^// each (\$[^:\n]*): (.*)\n(fn (?s:.*?)^}\n)`)

// Text returns everything that variants of the kernel depend on: its file and common.
func (k Kernel) Text() string {
	var s strings.Builder
	s.WriteString(k.Source)
	for _, d := range prelude() {
		s.WriteString(d.text)
	}
	return s.String()
}

var constant = regexp.MustCompile(`(?m)^const ([A-Z0-9_]+): u32 = ([0-9]+)u;`)

// Constants returns the constants that Specialise can rewrite, with their values in the
// file.
func (k Kernel) Constants() map[string]string {
	m := map[string]string{}
	for _, c := range constant.FindAllStringSubmatch(k.Source, -1) {
		m[c[1]] = c[2]
	}
	return m
}

// Specialise returns the source of a variant: the file with new values for some of its
// constants, after the declarations of common that it uses.
//
//   - THREADS becomes the workgroup size.
//   - EXPAND sets how far marked loops are unrolled: [Looped], [Registers] or [Full].
//   - Blocks marked static are dropped when their condition is false.
//   - A binding whose line ends in the comment NAME is dropped when the constant NAME is 0,
//     and one whose line ends in !NAME when it is not 0.
//
// The constant EXP2, which functions of common look at, belongs to every kernel: 1 computes
// exponentials by the device's exp2. For other constants that the file does not have it
// returns an error.
func (k Kernel) Specialise(values map[string]uint32) (string, error) {
	have := k.Constants()
	for name := range values {
		if _, ok := have[name]; !ok && name != "EXP2" {
			names := make([]string, 0, len(have))
			for n := range have {
				names = append(names, n)
			}
			slices.Sort(names)
			return "", fmt.Errorf("shader %s has no constant %s, it has %s", k.Name, name, strings.Join(names, ", "))
		}
	}
	consts := map[string]uint32{"EXP2": values["EXP2"]}
	src := constant.ReplaceAllStringFunc(k.Source, func(line string) string {
		m := constant.FindStringSubmatch(line)
		value, ok := values[m[1]]
		if !ok {
			n, _ := strconv.ParseUint(m[2], 10, 32) // the compiler reports numbers that are too large
			value = uint32(n)
		}
		consts[m[1]] = value
		return fmt.Sprintf("const %s: u32 = %du;", m[1], value)
	})
	if n, ok := consts["THREADS"]; ok { // naga 0.13 accepts no constant there
		src = groupSize.ReplaceAllString(src, fmt.Sprintf("@workgroup_size(%d)", n))
	}
	src, err := unroll(bindings(src, consts), consts["EXPAND"], consts)
	if err == nil {
		src, err = join(src, consts)
	}
	if err != nil {
		return "", fmt.Errorf("shader %s: %w", k.Name, err)
	}
	return src, nil
}

// bindings drops the bindings that the constants at the ends of their lines exclude, and
// numbers the others.
func bindings(src string, consts map[string]uint32) string {
	n := 0
	return binding.ReplaceAllStringFunc(src, func(line string) string {
		m := binding.FindStringSubmatch(line)
		if value, ok := consts[m[4]]; ok && (value == 0) == (m[3] == "") {
			return ""
		}
		n++
		return fmt.Sprintf("%s%d%s\n", m[1], n-1, m[2])
	})
}

var (
	groupSize = regexp.MustCompile(`@workgroup_size\([0-9]+\)`)
	binding   = regexp.MustCompile(`(?m)^(@group\(0\) @binding\()\d+(\) var<.*?;)(?: // (!?)([A-Z0-9]+))?\n`)
)

// declaration is a function, structure or constant of common.
type declaration struct {
	name, text string
}

var declared = regexp.MustCompile(`(?m)^(?:(?:fn|struct) (\w+)(?s:.*?)^}|const (\w+): .*)\n`)

// prelude returns the declarations of common.
var prelude = sync.OnceValue(func() []declaration {
	entries, err := files.ReadDir("common")
	if err != nil {
		panic(err) // the folder is embedded
	}
	var all []declaration
	for _, e := range entries {
		for _, m := range declared.FindAllStringSubmatch(read(path.Join("common", e.Name())), -1) {
			all = append(all, declaration{m[1] + m[2], m[0]})
		}
	}
	return all
})

// join prepends the declarations of common that src uses, each after those that it uses
// itself: gogpu's compiler (naga 0.18) misses some calls of functions declared later.
func join(src string, consts map[string]uint32) (string, error) {
	missing := map[string]declaration{}
	for _, d := range prelude() {
		missing[d.name] = d
	}
	var joined strings.Builder
	var add func(text string) error
	add = func(text string) error {
		for _, name := range names(text) {
			d, ok := missing[name]
			if !ok {
				continue
			}
			delete(missing, name)
			text, err := unroll(d.text, consts["EXPAND"], consts)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if err := add(text); err != nil {
				return err
			}
			joined.WriteString(text + "\n")
		}
		return nil
	}
	err := add(src)
	return joined.String() + src, err
}

// names returns the words of WGSL text outside of comments.
func names(src string) []string {
	var all []string
	for line := range strings.Lines(src) {
		code, _, _ := strings.Cut(line, "//")
		all = append(all, strings.FieldsFunc(code, func(r rune) bool {
			return r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
		})...)
	}
	return all
}
