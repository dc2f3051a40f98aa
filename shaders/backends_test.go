package shaders

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"os"

	"github.com/gogpu/naga"
	"github.com/gogpu/naga/glsl"
	"github.com/gogpu/naga/hlsl"
	"github.com/gogpu/naga/ir"
	"github.com/gogpu/naga/msl"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// The pure Go provider compiles WGSL with naga 0.19, whose Metal back end has defects that kernels avoid. The tests
// below check the kernels' WGSL and Metal, and fail for a naga without the defect:
//
//   - a select with a scalar condition has no brackets: 1.0 / select(x, y, c) becomes
//     1.0 / c ? y : x. Kernels use one only as a whole operand: the value of a let, var,
//     assignment or return, or an argument.
//   - an indexed value has its bounds check without brackets: v[i] < x becomes
//     uint(i) < 4 ? v[i] : DefaultConstructible() < x. Kernels load from variables, which
//     are statements of their own.
//   - an atomic operation on an element of an array, other than a load or a store, takes the
//     address of the bounds check, which Metal does not compile. Kernels have the array in a
//     structure.

func lowered(src string) (*ir.Module, error) {
	ast, err := naga.Parse(src)
	if err != nil {
		return nil, err
	}
	return naga.LowerWithSource(ast, src)
}

// metal compiles WGSL to Metal with the options of the pure Go provider.
func metal(src string) (string, error) {
	m, err := lowered(src)
	if err != nil {
		return "", err
	}
	out, _, err := msl.Compile(m, msl.DefaultOptions())
	return out, err
}

// TestKernelsCompileForOtherBackends compiles every kernel to Metal, HLSL and GLSL, for
// every combination of options in long mode, else for one value of each.
func TestKernelsCompileForOtherBackends(t *testing.T) {
	seen, sizes := map[string]bool{}, 0
	variants(func(v Variant, departures int) {
		if testing.Short() && departures > 1 || sourceOf(v).head != "" { // what enables features is for Tint alone
			return
		}
		src := must.Get(Render(v))(t)
		report := func(problem string, lines []string) {
			for _, line := range lines {
				if id := v.Name() + line; !seen[id] {
					t.Errorf("%s: %s: %s", Key(v), problem, line)
					seen[id] = true
				}
			}
		}
		report("name the select, which Metal gets without brackets", wrongSelects(src))
		out, err := metal(src)
		if err != nil {
			t.Errorf("%s to Metal: %v", Key(v), err)
		}
		report("Metal's bounds check has no brackets or no address", wrongChecks(out))
		wrong, n := wrongSizes(src, out)
		report("Metal checks o against the size of another binding", wrong)
		sizes += n
		m := must.Get(lowered(src))(t)
		if _, _, err := hlsl.Compile(m, hlsl.DefaultOptions()); err != nil {
			t.Errorf("%s to HLSL: %v", Key(v), err)
		}
		o := glsl.DefaultOptions()
		o.LangVersion = glsl.Version450
		if _, _, err := glsl.Compile(m, o); err != nil {
			t.Errorf("%s to GLSL: %v", Key(v), err)
		}
	})
	if sizes == 0 {
		t.Error("found no checks of o against the size of a binding")
	}
}

var (
	sizeCheck = regexp.MustCompile(`_buffer_sizes\.size(\d+)[^?]*\? [^?]*?\bo\.data\[`)
	placeOfO  = regexp.MustCompile(`@binding\((\d+)\) var<storage, read_write> o:`)
)

// wrongSizes returns the checks of indices of o in Metal against the size of another binding, and the number of all. naga
// makes such ones for atomic operations where a binding of fixed size, or a variable, is declared before o.
func wrongSizes(wgsl, metal string) (wrong []string, all int) {
	place := placeOfO.FindStringSubmatch(wgsl)
	for _, m := range sizeCheck.FindAllStringSubmatch(metal, -1) {
		if all++; place == nil || m[1] != place[1] {
			wrong = append(wrong, m[0])
		}
	}
	return wrong, all
}

var (
	selectCall = regexp.MustCompile(`\bselect\(`)
	// before and after are what may stand on either side of a select.
	before = regexp.MustCompile(`(?:\breturn|,|[^=!<>+*/%&|^-]=|[\w>]\(|\[)\s*$`)
	header = regexp.MustCompile(`\b(?:if|while|for|switch|return)\s*\(\s*$`)
	after  = regexp.MustCompile(`^\s*[;,)\]]`)
)

// wrongSelects returns the lines of WGSL in which a select is an operand of an operator.
func wrongSelects(wgsl string) (lines []string) {
	for _, at := range selectCall.FindAllStringIndex(wgsl, -1) {
		end := at[1]
		for depth := 1; depth > 0; end++ {
			depth += map[byte]int{'(': 1, ')': -1}[wgsl[end]]
		}
		start := strings.LastIndexByte(wgsl[:at[0]], '\n') + 1
		left := wgsl[max(0, start-200):at[0]]
		if !before.MatchString(left) || header.MatchString(left) || !after.MatchString(wgsl[end:]) {
			lines = append(lines, strings.TrimSpace(wgsl[start:end]))
		}
	}
	return lines
}

const fallback = ": DefaultConstructible()"

// check is a bounds check from its start: conditions, and the value that is checked.
var check = regexp.MustCompile(`^\s*uint\(`)

// wrongChecks returns the lines of Metal in which a bounds check is an operand of an operator or has its address taken.
func wrongChecks(text string) (lines []string) {
	for line := range strings.Lines(text) {
		for at, rest := 0, line; ; {
			i := strings.Index(rest, fallback)
			if i < 0 {
				break
			}
			at += i
			if !check.MatchString(line[segment(line, at):at]) || !strings.ContainsRune(";,)]", rune(line[at+len(fallback)])) {
				lines = append(lines, strings.TrimSpace(line))
			}
			at += len(fallback)
			rest = line[at:]
		}
	}
	return lines
}

// segment returns the start of the operand that ends at a position of a line: after an open
// bracket, a comma, an assignment or a return.
func segment(line string, end int) int {
	depth := 0
	for i := end - 1; i >= 0; i-- {
		switch c := line[i]; {
		case c == ')' || c == ']':
			depth++
		case c == '(' || c == '[':
			if depth--; depth < 0 {
				return i + 1
			}
		case depth > 0:
		case c == ',' || c == ';' || c == '{':
			return i + 1
		case c == '=' && i > 0 && !strings.ContainsRune("=!<>", rune(line[i-1])) && line[i+1] != '=':
			return i + 1
		case strings.HasSuffix(line[:i+1], "return"):
			return i + 1
		}
	}
	return 0
}

// TestUpstreamMetal fails when naga no longer has the defects.
func TestUpstreamMetal(t *testing.T) {
	const globals = `
struct Words { data: array<atomic<u32>> }
@group(0) @binding(0) var<storage, read_write> o: array<f32>;
@group(0) @binding(1) var<storage, read_write> a: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> b: Words;
fn less(v: vec4<f32>, i: u32, x: f32) -> bool { return v[i] < x; }
@compute @workgroup_size(1) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
	let x = o[id.x];
`
	for _, c := range []struct{ name, body, wrong string }{
		{"select", "o[id.y] = 1.0 / select(x, 2.0, x == 0.0);", `1\.0 / \(\w+ == 0\.0\) \?`},
		{"index", "o[id.y] = select(0.0, 1.0, less(vec4<f32>(x), id.z, x));", `: DefaultConstructible\(\) < `},
		{"atomic", "atomicXor(&a[id.y], 1u);", `\(&uint\(.*: DefaultConstructible`},
	} {
		out := must.Get(metal(globals + c.body + "\n}"))(must.In(t, "%s", c.name))
		if !regexp.MustCompile(c.wrong).MatchString(out) {
			t.Errorf("naga writes %s to Metal correctly: remove its rule and this test\n%s", c.name, out)
		}
		if c.name != "select" && len(wrongChecks(out)) == 0 {
			t.Errorf("%s: the defect is not found", c.name)
		}
	}
	if len(wrongSelects("let y = 1.0 / select(x, 2.0, z);")) != 1 || len(wrongSelects("let y = f(select(x, select(1.0, 2.0, w), z));")) != 0 {
		t.Error("wrongSelects is wrong")
	}
}

// TestMetalAtomics compiles the functions with atomic operations of each kernel's Metal as
// C++, with the few declarations that they need.
func TestMetalAtomics(t *testing.T) {
	clang, err := exec.LookPath("clang")
	if err != nil {
		t.Skip("needs clang")
	}
	const header = `
#define device
#define constant const
typedef unsigned uint;
namespace metal {
struct atomic_uint { uint x; };
enum order { memory_order_relaxed };
uint atomic_load_explicit(atomic_uint const *, order);
void atomic_store_explicit(atomic_uint *, uint, order);
uint atomic_fetch_xor_explicit(atomic_uint *, uint, order);
}
`
	declarations := regexp.MustCompile(`(?m)^(?:struct (?:DefaultConstructible|_mslBufferSizes) \{(?s:.*?)^\}|typedef metal::atomic_uint .*|struct \w+ \{\n\s*(?:metal::atomic_uint|type_\d+) data\S*;\n\}|uint put16_\(|void put16_\((?s:.*?)^\});?\n`)
	file := filepath.Join(t.TempDir(), "atomics.cc")
	n := 0
	for _, k := range plain() {
		if sourceOf(k).head != "" {
			continue // what enables features is for Tint alone
		}
		src := must.Get(Render(k))(t)
		out := must.Get(metal(src))(t)
		if !strings.Contains(out, "put16_(") {
			continue
		}
		n++
		text := header + strings.Join(declarations.FindAllString(out, -1), "")
		if !strings.Contains(text, "atomic_fetch_xor_explicit(&") || !strings.Contains(text, "struct _mslBufferSizes") {
			t.Fatalf("%s: no atomic function in\n%s", k.Name(), text)
		}
		noError(t, os.WriteFile(file, []byte(text), 0o600))
		if msg, err := exec.Command(clang, "-std=c++14", "-fsyntax-only", file).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s\n%s", k.Name(), err, msg, text)
		}
	}
	if n == 0 {
		t.Error("no kernel has atomic operations")
	}
}
