package shaders

import (
	"embed"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"sync"
)

//go:embed *.wgsl common/*.wgsl
var files embed.FS

// A source is the parsed text of one or several files.
type source struct {
	text  string // without comments
	decls []declaration
	parts map[string]declaration // with the attribute @inline, by name
	err   error
}

// A declaration is a function, structure, constant or variable. The text of one with the attribute
// @inline is its body.
type declaration struct {
	name, text string
	params     []string // of an inline function
}

var (
	remark   = regexp.MustCompile(`[ \t]*//.*`)
	blank    = regexp.MustCompile(`\n\s*\n`)
	declared = regexp.MustCompile(`\b(?:fn|struct|const|var(?:<[^>]*>)?) (\w+)`)
	copies   = regexp.MustCompile(`^@each\(([^:]*):(.*)\)\s*`)
	inline   = regexp.MustCompile(`^@inline fn \w+\((.*)\) \{`)
)

// sources holds the kernels by name, and common under the name common. Embedded files can always be read.
var sources = sync.OnceValue(func() map[string]source {
	read := func(pattern string) (text string) {
		names, _ := fs.Glob(files, pattern)
		for _, name := range names {
			b, _ := files.ReadFile(name)
			text += string(b)
		}
		return text
	}
	all := map[string]source{"common": parse(read("common/*.wgsl"))}
	names, _ := fs.Glob(files, "*.wgsl")
	for _, name := range names {
		all[strings.TrimSuffix(name, ".wgsl")] = parse(read(name))
	}
	return all
})

func library() source { return sources()["common"] }

// fileOf returns the kernel of v.
func fileOf(v Variant) (source, error) {
	f, ok := sources()[v.Name()]
	if c, custom := v.(Custom); custom {
		f, ok = parse(c.WGSL), true
	}
	if !ok {
		f.err = fmt.Errorf("no kernel has the name %s", v.Name())
	}
	return f, f.err
}

// Text returns what the variants of a kernel are rendered from, without comments: its file and common.
func Text(v Variant) (kernel, common string) {
	f, _ := fileOf(v)
	return f.text, library().text
}

// parse divides text into its declarations.
func parse(text string) (s source) {
	s.parts = map[string]declaration{}
	s.text = blank.ReplaceAllString(remark.ReplaceAllString(text, ""), "\n")
	for text = strings.TrimSpace(s.text); text != "" && s.err == nil; text = strings.TrimSpace(text) {
		list := [][]string{nil}
		var params []string
		if m := copies.FindStringSubmatch(text); m != nil {
			text = text[len(m[0]):]
			params, list = strings.Fields(m[1]), nil
			for _, c := range strings.Split(m[2], ",") {
				list = append(list, strings.Fields(c))
			}
		}
		n, err := item(text)
		if err != nil {
			s.err = err
			break
		}
		for _, args := range list {
			if len(args) != len(params) {
				s.err = fmt.Errorf("@each has %d names for %d parameters, before %.80q", len(args), len(params), text)
				break
			}
			s.add(replaced(text[:n], params, args))
		}
		text = text[n:]
	}
	return s
}

// add adds a declaration.
func (s *source) add(text string) {
	m := declared.FindStringSubmatch(text)
	if m == nil {
		s.err = fmt.Errorf("no declaration: %.80q", text)
		return
	}
	d := declaration{name: m[1], text: text}
	if m := inline.FindStringSubmatch(text); m != nil {
		d.params, d.text = arguments(m[1]), text[len(m[0]):len(text)-1]
		s.parts[d.name] = d
		return
	}
	s.decls = append(s.decls, d)
}

// replaced returns text with parameters such as $x replaced by arguments.
func replaced(text string, params, args []string) string {
	var pairs []string
	for i := range params {
		pairs = append(pairs, params[i], args[i])
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// arguments returns the items of a list.
func arguments(list string) (all []string) {
	if list == "" {
		return nil
	}
	for _, a := range strings.Split(list, ",") {
		all = append(all, strings.TrimSpace(a))
	}
	return all
}

// item returns the length of the declaration or statement at the start of text. It ends with a semicolon
// or a closing brace; an alternative belongs to it.
func item(text string) (n int, err error) {
	otherwise := "else"
	if strings.HasPrefix(text, "@if") {
		otherwise = "@else"
		if n, err = closing(text, len("@if")); err != nil {
			return 0, err
		}
		for n < len(text) && (text[n] == ' ' || text[n] == '\n') {
			n++
		}
		m, err := item(text[n:])
		if n += m; err != nil || !strings.HasPrefix(strings.TrimSpace(text[n:]), otherwise) {
			return n, err
		}
		n += strings.Index(text[n:], otherwise) + len(otherwise)
		m, err = item(text[n:])
		return n + m, err
	}
	for n < len(text) {
		switch text[n] {
		case ';':
			return n + 1, nil
		case '(', '{':
			block := text[n] == '{'
			if n, err = closing(text, n); err != nil || block && !strings.HasPrefix(strings.TrimSpace(text[n:]), otherwise) {
				return n, err
			}
		default:
			n++
		}
	}
	return 0, fmt.Errorf("no end of %.80q", text)
}

// closing returns the position after the bracket that closes the one at text[n].
func closing(text string, n int) (int, error) {
	depth := 0
	for i := n; i < len(text); i++ {
		switch text[i] {
		case '(', '{':
			depth++
		case ')', '}':
			if depth--; depth == 0 {
				return i + 1, nil
			}
		}
		if depth == 0 {
			break
		}
	}
	return 0, fmt.Errorf("no closing bracket in %.80q", text)
}
