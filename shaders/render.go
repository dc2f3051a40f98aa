package shaders

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// Kernel is what a caller must know about a variant.
type Kernel struct {
	// Bindings are the kinds of group 0's bindings in order, one letter each: r for read-only
	// storage, w for storage that is written, u for the uniform.
	Bindings string
	// WorkgroupMemory is the workgroup memory in bytes.
	WorkgroupMemory int
	// Threads is the size of a workgroup.
	Threads int
	// Constants are those of the variant, and those that the kernel computes from them.
	Constants map[string]uint32
}

var kernels sync.Map // of *Kernel by Variant

// Describe returns the properties of a variant. The caller must not change them. They are zero for
// variants that Render does not accept. Repeated calls do not compute them again.
func Describe(v Variant) *Kernel {
	if k, ok := kernels.Load(v); ok {
		return k.(*Kernel)
	}
	k := new(Kernel)
	if r := newRenderer(v); r.err == nil {
		*k = r.Kernel
	}
	kernels.Store(v, k)
	return k
}

// Render returns the WGSL of a variant: its constants, the declarations of common that it uses, each after those that
// it uses itself, because gogpu's compiler (naga 0.18) misses some calls of functions declared later, and the kernel.
func Render(v Variant) (string, error) {
	r := newRenderer(v)
	head := r.out.String()
	r.out.Reset()
	for _, d := range r.functions {
		r.declare(d)
	}
	functions := r.out.String()
	r.out.Reset()
	r.out.WriteString(sourceOf(v).head)
	for _, c := range constantsOf(v) {
		fmt.Fprintf(&r.out, "const %s: u32 = %du;\n", c.name, c.value)
	}
	// Bindings come before functions, in their order: see wrongSizes. A function comes before
	// its callers: gogpu's compiler writes no SPIR-V otherwise.
	r.out.WriteString(head)
	missing := map[string]string{}
	for _, d := range sources()["common"].decls {
		if d.kind != "var" {
			missing[d.name] = d.text
		}
	}
	r.texts(v, missing)
	r.join(head+functions, missing)
	if r.err != nil {
		return "", fmt.Errorf("shader %s: %w", v.Name(), r.err)
	}
	return r.evaluated(r.out.String() + functions), nil
}

// A renderer writes the declarations of a variant.
type renderer struct {
	Kernel
	functions []declaration
	out       strings.Builder
	err       error
}

var (
	attribute = regexp.MustCompile(`@(?:if|else|unroll|inline)\b`)
	loop      = regexp.MustCompile(`^@unroll(\(deep\))?\s*(for \(var (\w+) = 0u; (\w+) < (.+?); (\w+)\+\+\) \{)`)
	integer   = regexp.MustCompile(`^const \w+: u32 = ([^0].*|0u);$`) // not the bits of a float
	binding   = regexp.MustCompile(`^@binding (var<(storage, read_write|storage, read|uniform)>.*)`)
	shared    = regexp.MustCompile(`^var<workgroup> \w+: (?:array<)*(?:vec(\d))?[^,]*(.*);`)
	group     = regexp.MustCompile(`@workgroup_size\((.*?)\)`)
	index     = regexp.MustCompile(`\[([^\[\]]+)\]`)
	ofMod     = regexp.MustCompile(`\b(values?|hidden)\s*\(`) // names that kernels have too
	word      = regexp.MustCompile(`\.?\b[A-Za-z_]\w*`)
)

// newRenderer returns a renderer that has written the constants, bindings and variables of v's kernel.
func newRenderer(v Variant) *renderer {
	f, common := sourceOf(v), sources()["common"]
	r := &renderer{err: cmp.Or(common.err, f.err)}
	r.Constants = map[string]uint32{"EXP2": 0, "BOTH": 0, "PAGED": 0, "LISTED": 0, "PACKED": 0, "EXTRA": 1, "MOD": 0, "VALUES": 0} // unless v says otherwise
	for _, c := range constantsOf(v) {
		r.Constants[c.name] = c.value
	}
	for _, d := range f.decls {
		if m := group.FindStringSubmatch(d.text); m != nil {
			r.Threads = int(r.eval(m[1]))
		}
		if d.kind == "fn" || d.kind == "struct" {
			r.functions = append(r.functions, d)
		} else {
			r.declare(d)
		}
	}
	for _, d := range common.decls {
		if d.kind == "var" { // a binding that only some variants have
			r.declare(d)
		}
	}
	return r
}

// declare writes a declaration of the kernel. Constants get their values, and bindings their numbers.
func (r *renderer) declare(d declaration) {
	text := r.render(d.text)
	if m := integer.FindStringSubmatch(text); m != nil {
		r.Constants[d.name] = r.eval(m[1])
		text = fmt.Sprintf("const %s: u32 = %du;", d.name, r.Constants[d.name])
	} else if m := binding.FindStringSubmatch(text); m != nil {
		text = fmt.Sprintf("@group(0) @binding(%d) %s", len(r.Bindings), m[1])
		r.Bindings += map[string]string{"storage, read": "r", "storage, read_write": "w", "uniform": "u"}[m[2]]
	} else if m := shared.FindStringSubmatch(text); m != nil {
		lanes, _ := strconv.Atoi(m[1])
		bytes := 4 * max(lanes, 1)
		if strings.Contains(text, "<f16") {
			bytes /= 2
		}
		for _, length := range strings.Split(m[2], ",")[1:] {
			bytes *= int(r.eval(strings.Trim(length, " >")))
		}
		r.WorkgroupMemory += bytes
	}
	r.out.WriteString(group.ReplaceAllString(text, fmt.Sprintf("@workgroup_size(%d)", r.Threads)) + "\n")
}

// join writes the missing declarations that text uses.
func (r *renderer) join(text string, missing map[string]string) {
	for _, name := range word.FindAllString(text, -1) {
		if source, ok := missing[name]; ok {
			delete(missing, name)
			text := r.render(source)
			r.join(text, missing)
			r.out.WriteString(text + "\n")
		}
	}
}

// texts writes the functions of a score mod, after all that they may use. Names in them are not looked up.
func (r *renderer) texts(v Variant, missing map[string]string) {
	if own, ok := v.(OwnExp2); ok {
		v = own.Variant
	}
	if m, ok := v.(Modded); ok {
		r.join("mod_values mod_value mod_hidden precise_tanh precise_exp2", missing)
		for _, f := range [][2]string{{"score_mod", m.Score}, {"score_derivative", m.Derivative}} {
			if f[1] == "" {
				continue
			}
			fmt.Fprintf(&r.out, "fn %s(score: f32, b: u32, h: u32, i: u32, j: u32) -> f32 {\n%s\n}\n", f[0], ofMod.ReplaceAllString(f[1], "mod_$1("))
		}
	}
}

// render returns text without attributes of this package.
func (r *renderer) render(text string) string {
	var out strings.Builder
	for at := attribute.FindStringIndex(text); at != nil && r.err == nil; at = attribute.FindStringIndex(text) {
		out.WriteString(text[:at[0]])
		text = text[at[0]:]
		n := item(text)
		if strings.HasPrefix(text, "@if") {
			out.WriteString(r.chosen(text[:n]))
		} else {
			out.WriteString(r.unrolled(text[:n]))
		}
		text = text[n:]
	}
	return out.String() + text
}

// chosen returns one of two statements or declarations, or nothing.
func (r *renderer) chosen(text string) string {
	end := closing(text, len("@if"))
	holds := r.eval(text[len("@if"):end])
	text = text[space(text, end):]
	n := item(text)
	if holds == 0 {
		return r.render(strings.TrimSpace(strings.TrimPrefix(text[space(text, n):], "@else")))
	}
	return r.render(text[:n])
}

// unrolled returns copies of the body of a loop, or the loop.
func (r *renderer) unrolled(text string) string {
	m := loop.FindStringSubmatch(text)
	if m == nil || m[3] != m[4] || m[3] != m[6] {
		r.err = fmt.Errorf("cannot unroll %.80q", text)
		return ""
	}
	body := text[len(m[0]) : len(text)-1]
	if m[1] != "" && Expand(r.Constants["EXPAND"]) != Full {
		return m[2] + r.render(body) + "}"
	}
	// The text between the uses of the counter. Members of the same name, as in p.h, are no uses.
	var between []string
	start := 0
	for _, at := range word.FindAllStringIndex(body, -1) {
		if body[at[0]:at[1]] == m[3] {
			between = append(between, body[start:at[0]])
			start = at[1]
		}
	}
	between = append(between, body[start:])
	var out strings.Builder
	for i := range r.eval(m[5]) {
		out.WriteString("{" + r.render(strings.Join(between, fmt.Sprintf("%du", i))) + "}\n")
	}
	return out.String()
}

// evaluated returns text with the values of constant indices: naga 0.13 omits the clamp only for literals.
func (r *renderer) evaluated(text string) string {
	known := map[string]string{}
	return index.ReplaceAllStringFunc(text, func(s string) string {
		if _, ok := known[s]; !ok {
			known[s] = s
			if n, ok := evaluate(s[1:len(s)-1], r.Constants); ok {
				known[s] = fmt.Sprintf("[%du]", n)
			}
		}
		return known[s]
	})
}

// eval returns the value of a constant expression.
func (r *renderer) eval(wgsl string) uint32 {
	n, ok := evaluate(wgsl, r.Constants)
	if !ok {
		r.err = cmp.Or(r.err, fmt.Errorf("%q is no constant", wgsl))
	}
	return n
}
