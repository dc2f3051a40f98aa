package shaders

import (
	"strings"
	"testing"
)

// lines drops indentation and empty lines.
func lines(s string) string {
	var out []string
	for _, l := range strings.Split(s, "\n") {
		if l = strings.TrimSpace(l); l != "" {
			out = append(out, l)
		}
	}
	return strings.Join(out, "\n")
}

func TestUnroll(t *testing.T) {
	consts := map[string]uint32{"N": 2, "M": 3, "IN": 1}
	for _, c := range []struct {
		name      string
		level     uint32
		src, want string
	}{
		{"unmarked lines stay, with their comments", Full,
			"for (var i = 0u; i < N; i++) {\nx = y[i]; // why\n}", "for (var i = 0u; i < N; i++) {\nx = y[i]; // why\n}"},
		{"counters become literals, and indices of literals and constants are evaluated", Full,
			"for (var i = 0u; i < N; i++) { // unroll\ns[i * M + 1u] = i; // why\n}", "{\ns[1u] = 0u;\n}\n{\ns[4u] = 1u;\n}"},
		{"loops nest, and a bound may be an expression", Registers,
			"for (var i = 0u; i < N / 2u; i++) { // unroll\nfor (var j = 1u; j < i + M; j++) { // unroll\na[tx + j][(i + j) % 2u] = 0.0;\n}\n}",
			"{\n{\na[tx + 1u][1u] = 0.0;\n}\n{\na[tx + 2u][0u] = 0.0;\n}\n}"},
		{"members and longer names are not counters", Registers,
			"for (var h = 0u; h < 1u; h++) { // unroll\nx = p.h + hh + h_1 + h;\n}", "{\nx = p.h + hh + h_1 + 0u;\n}"},
		{"a deep loop stays a loop at the lower level, but not a loop inside it", Registers,
			"for (var k = 0u; k < N; k++) { // unroll deep\nfor (var i = 0u; i < 1u; i++) { // unroll\nx = b[k][i];\n}\n}",
			"for (var k = 0u; k < N; k++) { // unroll deep\n{\nx = b[k][0u];\n}\n}"},
		{"a deep loop is unrolled at the higher level", Full,
			"for (var k = 0u; k < N; k++) { // unroll deep\nx = b[k][0];\n}", "{\nx = b[0u][0u];\n}\n{\nx = b[1u][0u];\n}"},
		{"loops that stay are not changed", Looped,
			"for (var i = 0u; i < N; i++) { // unroll\nif (IN == 1u) { // static\na[N] = i; // why\n}\n}",
			"for (var i = 0u; i < N; i++) { // unroll\n{\na[N] = i; // why\n}\n}"},
		{"a loop marked always is unrolled at every level", Looped,
			"for (var i = 0u; i < N; i++) { // unroll always\nif (i == 1u) { // static\na[N] = i;\n}\n}", "{\n}\n{\n{\na[N] = 1u;\n}\n}"},
		{"static blocks are kept or dropped", Registers,
			"if (IN == 0u) { // static\na();\n}\nif (IN != 0u) { // static\nb();\n}", "{\nb();\n}"},
	} {
		got, err := unroll(c.src, c.level, consts)
		if err != nil || lines(got) != c.want {
			t.Errorf("%s: %v\n%s\nshould be\n%s", c.name, err, lines(got), c.want)
		}
	}
}

func TestUnrollRefuses(t *testing.T) {
	for _, src := range []string{
		"for (var i = 0u; i < n; i++) { // unroll\n}",         // no constant
		"for (var i = 0u; i < 2u / 0u; i++) { // unroll\n}",   // no number
		"for (var i = 0u; i < (2u; i++) { // unroll\n}",       // no expression
		"for (var i = 0u; j < 2u; i++) { // unroll\n}",        // another counter
		"for (var i = 0u; i < 2u; i += 2u) { // unroll\n}",    // another step
		"for (var i = 0u; i < 2u; i++) { // unroll\nif (x) {", // no end
		"if (x == 0u) { // static\n}",                         // no constant
		"while (x) { // unroll\n}",
	} {
		if got, err := unroll(src, Full, nil); err == nil {
			t.Errorf("%q became %q", src, got)
		}
	}
}

// After unrolling, all indices of private arrays are literals, and so are the inner
// indices of workgroup memory where the products read it.
func TestConstantIndices(t *testing.T) {
	for _, c := range []struct {
		kernel Kernel
		consts map[string]uint32
		arrays []string
		least  int // indices to look at
	}{
		{Flash, map[string]uint32{"OUT16": 1, "VEC": 1},
			[]string{"acc[", "s[", "m[", "l[", "w[", "most[", "hid[", "rescale[", "qr[", "kr[", "vr[", "b[tx]["}, 2000},
		{Matmul, map[string]uint32{"ALONG": 0}, []string{"s[", "v[", "ar[", "wr[", "ws[tx]["}, 800},
		{Matmul, map[string]uint32{"ALONG": 1, "SKIP": 0}, []string{"s[", "v[", "ar[", "wr[", "ws[tx][", "as_[ty]["}, 500},
	} {
		c.consts["EXPAND"] = Full
		src, err := c.kernel.Specialise(c.consts)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, l := range strings.Split(src, "\n") {
			for _, array := range c.arrays {
				for at := 0; ; {
					i := strings.Index(l[at:], array)
					if i < 0 {
						break
					}
					at += i + len(array)
					if i := at - len(array); i > 0 && strings.ContainsAny(l[i-1:i], "abcdefghijklmnopqrstuvwxyz_.") {
						continue // the end of another name
					}
					end := strings.IndexByte(l[at:], ']')
					if index := l[at : at+end]; strings.Trim(index, "0123456789u") != "" && !strings.HasSuffix(index, "+ tx") { // outputs
						t.Errorf("%s: %s%s in %q", c.kernel.Name, array, index, strings.TrimSpace(l))
					}
					n++
				}
			}
		}
		if n < c.least {
			t.Errorf("%s: looked at %d indices only", c.kernel.Name, n)
		}
		if c.kernel.Name == "flash" && (!strings.Contains(src, "atomicXor") || !strings.Contains(src, "o: Words")) {
			t.Error("o does not take 16-bit elements")
		}
	}
}
