package shaders

import (
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"strings"
	"sync"
)

//go:embed *.wgsl */*.wgsl
var files embed.FS

// A source is the text of one or several files, without comments and calls of inline functions.
type source struct {
	text  string
	head  string // directives
	decls []declaration
	parts map[string]part // by name
	err   error
}

// A declaration is a function (kind fn), structure, constant or variable.
type declaration struct{ kind, name, text string }

// A part is a function with the attribute @inline.
type part struct {
	params []string
	body   string
}

var (
	remark    = regexp.MustCompile(`[ \t]*//.*`)
	blank     = regexp.MustCompile(`\n\s*\n`)
	directive = regexp.MustCompile(`(?m)^(?:enable|diagnostic)\b[^;]*;\n`)
	declared  = regexp.MustCompile(`\b(fn|struct|const|var|alias)(?:<[^>]*>)? (\w+)`)
	copies    = regexp.MustCompile(`@each\(([^:]*):([^)]*)\)\s*`)
	inline    = regexp.MustCompile(`^@inline fn \w+\((.*)\) \{`)
	several   = regexp.MustCompile(`(?m)^([ \t]*(?:@binding )?(?:var(?:<[^>]*>)? )?)(\w+(?:, \w+)+)(: .*[;,])$`)
	fields    = regexp.MustCompile(`(\w+): ([^,]+(?:, \d+>)?),`)
	call      = regexp.MustCompile(`@inline (\w+)\((.*?)\);`)
	entry     = regexp.MustCompile(`@main\((\w+)\) \{`)
)

// The entry point of most kernels, see [Ranged].
const mainFunction = `@compute @workgroup_size($1)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) t: u32) {
    let id = p.first + group.y * groups.x + group.x;
    if (id >= p.total) { return; }`

// Directives of kernels on matrix units, and what their entry points end with.
const (
	matrixHead = `diagnostic(off, chromium.subgroup_matrix_uniformity);
diagnostic(off, subgroup_uniformity);
enable f16, subgroups, chromium_experimental_subgroup_matrix;
`
	matrixInputs = ", @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {"
)

// sources holds the kernels by name, and common under the name common. A kernel may have more files in a folder
// of its name.
var sources = sync.OnceValue(func() map[string]source {
	texts := map[string]string{}
	for _, pattern := range []string{"*.wgsl", "*/*.wgsl"} {
		names, _ := fs.Glob(files, pattern)
		for _, file := range names {
			b, _ := files.ReadFile(file) // embedded files can be read
			name, _, _ := strings.Cut(strings.TrimSuffix(file, ".wgsl"), "/")
			texts[name] += string(b)
		}
	}
	all := map[string]source{"common": parse(texts["common"], nil)}
	delete(texts, "common")
	for name, text := range texts {
		all[name] = parse(text, all["common"].parts)
	}
	return all
})

// sourceOf returns the kernel of v.
func sourceOf(v Variant) source {
	if own, ok := v.(OwnExp2); ok {
		v = own.Variant
	}
	if m, ok := v.(Modded); ok {
		v = m.Variant
	}
	if c, ok := v.(Custom); ok {
		return parse(c.WGSL, sources()["common"].parts)
	}
	f, ok := sources()[v.Name()]
	if !ok {
		f.err = fmt.Errorf("no kernel has the name %s", v.Name())
	}
	return f
}

// Text returns what the variants of a kernel are rendered from, without comments: its file and common.
func Text(v Variant) (kernel, common string) { return sourceOf(v).text, sources()["common"].text }

// parse divides text into its declarations. They may call the inline functions shared.
func parse(text string, shared map[string]part) source {
	s := source{text: blank.ReplaceAllString(remark.ReplaceAllString(text, ""), "\n"), parts: map[string]part{}}
	s.text = several.ReplaceAllStringFunc(s.text, separate)
	maps.Copy(s.parts, shared)
	s.head = strings.Join(directive.FindAllString(s.text, -1), "")
	start := mainFunction
	if strings.Contains(s.text, "subgroupMatrix") {
		s.head, start = s.head+matrixHead, strings.Replace(start, ") {", matrixInputs, 1)
	}
	text = strings.TrimSpace(entry.ReplaceAllString(directive.ReplaceAllString(s.text, ""), start))
	for text = s.copied(text); text != "" && s.err == nil; {
		n := item(text)
		s.add(text[:n])
		text = strings.TrimSpace(text[n:])
	}
	for i := range s.decls {
		s.decls[i].text = s.expanded(s.decls[i].text)
	}
	return s
}

// separate returns declarations of one name each instead of a line that declares several.
func separate(line string) (out string) {
	m := several.FindStringSubmatch(line)
	for _, name := range arguments(m[2]) {
		out += m[1] + name + m[3] + "\n"
	}
	return out
}

// copied returns text with copies of the declarations and statements that have the attribute @each.
func (s *source) copied(text string) string {
	var out strings.Builder
	for at := copies.FindStringSubmatchIndex(text); at != nil; at = copies.FindStringSubmatchIndex(text) {
		params, list := strings.Fields(text[at[2]:at[3]]), text[at[4]:at[5]]
		out.WriteString(text[:at[0]])
		text = text[at[1]:]
		n := item(text)
		for _, args := range strings.Split(list, ",") {
			out.WriteString(s.copied(s.replaced(text[:n], params, strings.Fields(args))) + "\n")
		}
		text = text[n:]
	}
	return out.String() + text
}

// add adds a declaration or an inline function.
func (s *source) add(text string) {
	if strings.HasPrefix(text, "@ranged ") {
		text = ranged(text)
	}
	m := declared.FindStringSubmatch(text)
	brackets := func(kinds string) int { return strings.Count(text, kinds[:1]) + strings.Count(text, kinds[1:]) }
	if m == nil || !strings.ContainsAny(text[len(text)-1:], ";}") || brackets("({") != brackets(")}") {
		s.err = fmt.Errorf("no declaration: %.80q", text)
	} else if f := inline.FindStringSubmatch(text); f != nil {
		s.parts[m[2]] = part{params: arguments(f[1]), body: text[len(f[0]) : len(text)-1]}
	} else {
		s.decls = append(s.decls, declaration{m[1], m[2], text})
	}
}

// ranged returns the structure of the parameters of [Ranged]: first and total before its fields,
// and padding, because structures and arrays in a uniform begin at multiples of 16 bytes.
func ranged(text string) string {
	head, body, _ := strings.Cut(strings.TrimPrefix(text, "@ranged "), "{")
	out, words, pads := head+"{\n", 0, 0
	for _, m := range fields.FindAllStringSubmatch("first: u32, total: u32,"+body, -1) {
		scalar := len(m[2]) == len("u32")
		for ; !scalar && words%4 != 0; words++ {
			out += fmt.Sprintf("pad%d: u32,\n", pads)
			pads++
		}
		out += m[0] + "\n"
		words += int(bit(scalar))
	}
	return out + "}"
}

// expanded returns text with the bodies of inline functions instead of their calls.
func (s *source) expanded(text string) string {
	return call.ReplaceAllStringFunc(text, func(c string) string {
		m := call.FindStringSubmatch(c)
		f, ok := s.parts[m[1]]
		if !ok {
			s.err = fmt.Errorf("no inline function %s", m[1])
			return ""
		}
		return s.expanded(s.replaced(f.body, f.params, arguments(m[2])))
	})
}

// replaced returns text with parameters such as $x replaced by arguments.
func (s *source) replaced(text string, params, args []string) string {
	if len(params) != len(args) {
		s.err = fmt.Errorf("%d arguments for %d parameters of %.80q", len(args), len(params), text)
		return text
	}
	var pairs []string
	for i := range params {
		pairs = append(pairs, params[i], args[i])
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// arguments returns the items of a list.
func arguments(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(strings.ReplaceAll(list, ", ", ","), ",")
}

// item returns the length of the declaration or statement at the start of text. It ends with a semicolon
// or a closing brace; an alternative belongs to it.
func item(text string) (n int) {
	otherwise := "else"
	if strings.HasPrefix(text, "@if") {
		otherwise = "@else"
		n = closing(text, len("@if"))
		n = space(text, n)
		n += item(text[n:])
	} else {
		for n < len(text) && text[n] != ';' && text[n] != '{' {
			if text[n] == '(' {
				n = closing(text, n)
			} else {
				n++
			}
		}
		if n == len(text) || text[n] == ';' {
			return min(n+1, len(text))
		}
		n = closing(text, n)
	}
	if next := space(text, n); strings.HasPrefix(text[next:], otherwise) {
		n = space(text, next+len(otherwise))
		n += item(text[n:])
	}
	return n
}

// space returns the position of the first character from text[n] on that is no space.
func space(text string, n int) int { return len(text) - len(strings.TrimLeft(text[n:], " \n\t")) }

// closing returns the position after the bracket that closes the first one from text[n] on, or the end.
func closing(text string, n int) int {
	depth := 0
	for ; n < len(text); n++ {
		switch text[n] {
		case '(', '{':
			depth++
		case ')', '}':
			if depth--; depth == 0 {
				return n + 1
			}
		}
	}
	return n
}
