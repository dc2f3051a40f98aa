package shaders

import (
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
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

func TestAttributes(t *testing.T) {
	library := "@inline fn twice($f, $x) { $f($x); $f($x + 1u); }"
	for _, c := range []struct {
		name      string
		level     Expand
		src, want string
	}{
		{"text without attributes stays", Full, "for (var i = 0u; i < N; i++) {\nx = y[i];\n}", "for (var i = 0u; i < N; i++) {\nx = y[i];\n}"},
		{"counters become literals, and indices of literals and constants are evaluated", Full,
			"@unroll for (var i = 0u; i < N; i++) { s[i * M + 1u] = i; }", "{ s[1u] = 0u; }\n{ s[4u] = 1u; }"},
		{"loops nest, and a bound may be an expression", Registers,
			"@unroll for (var i = 0u; i < N / 2u; i++) {\n@unroll for (var j = 0u; j < i + M - 1u; j++) {\na[tx + j][(i + j) % 2u] = 0.0;\n}\n}",
			"{\n{\na[tx + 0u][0u] = 0.0;\n}\n{\na[tx + 1u][1u] = 0.0;\n}\n}"},
		{"members and longer names are not counters", Registers,
			"@unroll for (var h = 0u; h < 1u; h++) { x = p.h + hh + h_1 + h; }", "{ x = p.h + hh + h_1 + 0u; }"},
		{"a deep loop stays a loop at the lower level, but not a loop inside it", Registers,
			"@unroll(deep) for (var k = 0u; k < N; k++) {\n@unroll for (var i = 0u; i < 1u; i++) { x = b[k][i]; }\n}",
			"for (var k = 0u; k < N; k++) {\n{ x = b[k][0u]; }\n}"},
		{"a deep loop is unrolled at the higher level", Full,
			"@unroll(deep) for (var k = 0u; k < N; k++) { x = b[k][0]; }", "{ x = b[0u][0u]; }\n{ x = b[1u][0u]; }"},
		{"in loops that stay, conditions do not", Registers,
			"@unroll(deep) for (var i = 0u; i < N; i++) {\n@if(IN == 1u) {\na[n] = i;\n}\n}", "for (var i = 0u; i < N; i++) {\n{\na[n] = i;\n}\n}"},
		{"conditions may name counters", Registers,
			"@unroll for (var i = 0u; i < N; i++) { @if(i == 1u) { a[N] = i; } }", "{  }\n{ { a[2u] = 1u; } }"},
		{"one of two statements or declarations is kept", Registers,
			"@if(IN == 0u) { a(); } @else b();\n@if(IN != max(N, M) - 2u) fn c() {}\n@if(N != M) if (x) {} else { d(); } @else e();",
			"b();\nif (x) {} else { d(); }"},
		{"conditions nest", Registers, "@if(N == 2u) @if(M == 2u) a(); @else { @if(M == 3u) b(); }", "{ b(); }"},
		{"statements are copied too", Registers, "@each($x $y: a 1u, b N) { $x($y); }\nc();", "{ a(1u); }\n{ b(N); }\nc();"},
		{"an inline function is inserted with its arguments", Registers,
			"@unroll for (var i = 0u; i < 1u; i++) { @inline twice(put, i); }", "{  put(0u); put(0u + 1u);  }"},
	} {
		r := &renderer{Kernel: Kernel{Constants: map[string]uint32{"N": 2, "M": 3, "IN": 1, "EXPAND": uint32(c.level)}}}
		s := parse(library+"fn f() {"+c.src+"}", nil)
		got, _ := strings.CutPrefix(r.evaluated(r.render(s.decls[0].text)), "fn f() {")
		if got = lines(strings.TrimSuffix(got, "}")); s.err != nil || r.err != nil || got != c.want {
			t.Errorf("%s: %v, %v\n%s\nshould be\n%s", c.name, s.err, r.err, got, c.want)
		}
	}
}

// Copies of a function are declarations, inline functions are not.
func TestDeclarations(t *testing.T) {
	s := parse("const A: u32 = 1u; // why\n\n@each($x $T: k KV, a A)\nfn f_$x() -> u32 { return $T; }\n@inline fn g($x) { $x }\n@if(A == 1u) var<private> v: u32;\n@main(A) { }", nil)
	var got []string
	for _, d := range s.decls {
		got = append(got, d.name+": "+strings.Split(d.text, "\n")[0])
	}
	const want = "A: const A: u32 = 1u;|f_k: fn f_k() -> u32 { return KV; }|f_a: fn f_a() -> u32 { return A; }|v: @if(A == 1u) var<private> v: u32;|main: @compute @workgroup_size(A)"
	if g := s.parts["g"]; s.err != nil || strings.Join(got, "|") != want || g.body != " $x " || len(g.params) != 1 {
		t.Errorf("%v: %q, %+v", s.err, got, g)
	}
	for _, wrong := range []string{"fn f() {", "fn f() { @unroll for (var i = 0u; i < 2u; i++) { if (x) { }", "const A: u32 = 1u", "override;", "@each($x $y: a) fn $x() {}", "@each($x a) fn $x() {}", "fn f() { @inline g(); }"} {
		if s := parse(wrong, nil); s.err == nil {
			t.Errorf("%q has the declarations %+v", wrong, s.decls)
		}
	}
}

// Fields of parameters get padding before structures and arrays, and declarations of several names become several.
func TestParameters(t *testing.T) {
	s := parse("@binding var<storage, read> a, b: u32;\n@ranged struct P {\n    c: f32, // why\n    d, e: Strides,\n    f: array<vec4<u32>, 16>,\n}", nil)
	var got []string
	for _, d := range s.decls {
		got = append(got, strings.ReplaceAll(lines(d.text), "\n", " "))
	}
	const want = "@binding var<storage, read> a: u32;|@binding var<storage, read> b: u32;|" +
		"struct P { first: u32, total: u32, c: f32, pad0: u32, d: Strides, e: Strides, f: array<vec4<u32>, 16>, }"
	if s.err != nil || strings.Join(got, "|") != want {
		t.Errorf("%v: %q", s.err, got)
	}
}

func TestAttributesRefuse(t *testing.T) {
	for _, src := range []string{
		"@unroll for (var i = 0u; i < n; i++) {}",       // no constant
		"@unroll for (var i = 0u; i < 2u / 0u; i++) {}", // no number
		"@unroll for (var i = 0u; i < 2u +; i++) {}",    // no expression
		"@unroll for (var i = 0u; i < (2u; i++) {}",     // no expression
		"@unroll for (var i = 0u; j < 2u; i++) {}",      // another counter
		"@unroll for (var i = 0u; i < 2u; i += 2u) {}",  // another step
		"@if(x == 0u) {}", // no constant
		"@unroll while (x) {}",
		"@else {}",
		"@inline f(1u);", // no such function
		"@inline f",
	} {
		r := &renderer{Kernel: Kernel{Constants: map[string]uint32{"EXPAND": uint32(Full)}}}
		if got := r.render(src); r.err == nil {
			t.Errorf("%q became %q", src, got)
		}
	}
	for _, v := range []Variant{Fixed("nothing"), Flash{}, Custom{WGSL: "@if(X == 1u) fn f() {}"}} {
		if got, err := Render(v); err == nil {
			t.Errorf("%s became %q", Key(v), got)
		}
	}
	if k := Describe(Flash{}); k.Threads != 0 {
		t.Errorf("a variant without tiles has the properties %+v", k)
	}
}

// After unrolling, all indices of private arrays are literals, and so are the inner
// indices of workgroup memory where the products read it.
func TestConstantIndices(t *testing.T) {
	flash, matmul := flash64.with(Flagged), matmulL
	flash.Expand, flash.Out16, flash.Vec = Full, true, true
	matmul.Expand, matmul.Skip = Full, true
	along := matmul
	along.Along, along.Skip = true, false
	for _, c := range []struct {
		variant Variant
		arrays  []string
		least   int // indices to look at
	}{
		{flash,
			[]string{"acc[", "s[", "m[", "l[", "w[", "most[", "hidden_bits[", "rescale[", "q_loaded[", "k_loaded[", "v_loaded[", "b[tx]["}, 2000},
		{matmul, []string{"s[", "v[", "a_loaded[", "w_loaded[", "w_columns[tx]["}, 800},
		{matrix64, []string{"acc[", "query[", "s[", "m[", "l[", "e["}, 100},
		{along, []string{"s[", "v[", "a_loaded[", "w_loaded[", "w_columns[tx][", "a_rows[ty]["}, 500},
	} {
		src := must.Get(Render(c.variant))(t)
		n := 0
		for _, array := range c.arrays {
			uses := regexp.MustCompile(`(?m)(?:^|[^a-z_.])` + regexp.QuoteMeta(array) + `([^\]]*)\]`)
			for _, m := range uses.FindAllStringSubmatch(src, -1) {
				if strings.Trim(m[1], "0123456789u") != "" && !strings.HasSuffix(m[1], "+ tx") { // outputs
					t.Errorf("%s: %s%s", c.variant.Name(), array, m[1])
				}
				n++
			}
		}
		if n < c.least {
			t.Errorf("%s: looked at %d indices only", c.variant.Name(), n)
		}
		if c.variant.Name() == "flash" && (!strings.Contains(src, "atomicXor") || !strings.Contains(src, "o: Words")) {
			t.Error("o does not take 16-bit elements")
		}
	}
}
