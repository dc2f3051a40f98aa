package shaders

import (
	"regexp"
	"testing"

	"github.com/gogpu/naga"
)

// options are the values of the constants that package gpu gives a kernel by the options
// and types of a call, and by the device. Tile sizes keep the values of the file.
var options = map[string]map[string][]uint32{
	"attention":  {"EXPAND": {1}, "IN": {0, 2}, "KV": {0, 1, 4}, "PAGED": {0, 1}, "BOTH": {0, 1}},
	"flash":      {"IN": {0, 1}, "KV": {0, 2, 4}, "PAGED": {0, 1}, "BOTH": {0, 1}, "OUT16": {0, 1}, "VEC": {0, 1}, "PAIRED": {0, 1}},
	"decode":     {"IN": {0, 1}, "KV": {0, 2, 4}, "PAGED": {0, 1}, "BOTH": {0, 1}, "WIDE": {0, 1}, "FULL": {0, 1}, "EXTRA": {0, 1}},
	"splitmerge": {"EXPAND": {0, 2}, "EXP2": {0, 1}},
	"matmul":     {"A": {0, 1}, "W": {0, 2}, "AVEC": {0, 1}, "WVEC": {0, 1}, "ALONG": {0, 1}, "SKIP": {0, 1}},
	"softmax":    {"EXPAND": {0, 1}, "BOTH": {0, 1}, "HELD": {0, 1}, "EXP2": {0, 1}},
	"merge":      {"EXP2": {0, 1}},
	"rope":       {"INPLACE": {0, 1}},
	"convert":    {"Q8": {0, 1}},
	"gradient":   {"EXPAND": {0, 2}, "IN": {0, 1}, "BOTH": {0, 1}, "OF": {0, 1, 2, 3}},
}

// all lists the kernels.
var all = []Kernel{Attention, Flash, Decode, SplitMerge, Matmul, Softmax, Merge, RoPE, Convert, Delta, Gradient, Reduce, Peak, Copy, Read, Banks, Exponentials}

// each calls f with every combination of values.
func each(values map[string][]uint32, f func(map[string]uint32)) {
	for name, list := range values {
		rest := map[string][]uint32{}
		for n, l := range values {
			if n != name {
				rest[n] = l
			}
		}
		for _, v := range list {
			each(rest, func(c map[string]uint32) {
				c[name] = v
				f(c)
			})
		}
		return
	}
	f(map[string]uint32{})
}

// variants calls f with the constants and the source of every combination of a kernel's options.
func variants(t *testing.T, k Kernel, f func(c map[string]uint32, src string)) {
	t.Helper()
	each(options[k.Name], func(c map[string]uint32) {
		if k.Name == "flash" { // as package tune does
			c["Q2"], c["KV2"] = c["VEC"]*(c["IN"]&3+1)/2, c["VEC"]*(c["KV"]&3+1)/2
			c["FULL"], c["AHEAD"], c["EXP2"] = c["VEC"]*c["OUT16"], c["OUT16"], c["OUT16"]
			for _, option := range []string{"MASKS", "BLOCKED", "BIASES", "SLOPED", "CAPPED", "DROPS"} {
				c[option] = 2 - c["OUT16"]
			}
		}
		if k.Name == "decode" { // as package gpu does
			c["EL"] = 4 << (c["KV"] / 2)
			if c["KV"] == 4 {
				c["PACK"], c["WIDE"] = 4, 0
			} else if c["KV"] == 2 && c["WIDE"] == 1 {
				c["PACK"], c["VWIDE"], c["LN"] = 2, 1, 8
			}
		}
		if k.Name == "attention" || k.Name == "decode" {
			c["EXP2"] = c["BOTH"]
		}
		if k.Name == "matmul" { // as package gpu does
			c["A2"], c["W2"], c["FULL"] = c["AVEC"]*c["A"], c["WVEC"]*c["W"]/2, c["AVEC"]*c["WVEC"]*c["SKIP"]
			c["OVEC"] = c["AVEC"]
		}
		src, err := k.Specialise(c)
		if err != nil {
			t.Fatal(err)
		}
		f(c, src)
	})
}

// TestKernelsCompile compiles every kernel for every combination of options with the
// compiler of the pure Go provider, and checks that each function of common that a variant
// contains is called.
func TestKernelsCompile(t *testing.T) {
	function := regexp.MustCompile(`(?m)^fn (\w+)\(`)
	shared := map[string]bool{}
	for _, d := range prelude() {
		shared[d.name] = true
	}
	for _, k := range all {
		n := 0
		variants(t, k, func(c map[string]uint32, src string) {
			n++
			if _, err := naga.Compile(src); err != nil {
				t.Errorf("%s %v: %v", k.Name, c, err)
			}
			count := map[string]int{}
			for _, name := range names(src) {
				count[name]++
			}
			for _, m := range function.FindAllStringSubmatch(src, -1) {
				if shared[m[1]] && count[m[1]] < 2 {
					t.Errorf("%s %v: %s is not used", k.Name, c, m[1])
				}
			}
		})
		t.Logf("%s: %d variants", k.Name, n)
	}
	if names, err := files.ReadDir("."); err != nil || len(names)-1 != len(all) { // common is one of the names
		t.Errorf("%d names for %d kernels, %v", len(names), len(all), err)
	}
}
