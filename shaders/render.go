package shaders

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"
)

// A renderer writes the declarations of a variant.
type renderer struct {
	consts map[string]uint32
	parts  map[string]declaration // with the attribute @inline
	out    strings.Builder
}

var (
	attribute  = regexp.MustCompile(`@(if|else|unroll|inline)\b`)
	loopHeader = regexp.MustCompile(`^@unroll(?:\((deep|always)\))?\s*(for \(var (\w+) = (\d+)u; (\w+) < (.+?); (\w+)\+\+\) \{)`)
	call       = regexp.MustCompile(`^@inline (\w+)\((.*)\);$`)
	integer    = regexp.MustCompile(`^const \w+: u32 = ([^0].*|0u);$`) // not the bits of a float
	number     = regexp.MustCompile(`@(binding|workgroup_size)\(([^)]*)\)`)
	index      = regexp.MustCompile(`\[([^\[\]]+)\]`)
	word       = regexp.MustCompile(`\.?\b[A-Za-z_]\w*`)
)

// Render returns the WGSL of a variant: its constants, the declarations of common that it uses, each
// after those that it uses itself, because gogpu's compiler (naga 0.18) misses some calls of functions
// declared later, and the kernel.
func Render(v Variant) (string, error) {
	r, file, err := newRenderer(v)
	for i := 0; err == nil && i < len(file); i++ {
		err = r.declare(file[i])
	}
	kernel := r.out.String()
	r.out.Reset()
	missing := map[string]declaration{}
	for _, d := range library().decls {
		missing[d.name] = d
	}
	if err == nil {
		err = r.join(kernel, missing)
	}
	if err != nil {
		return "", fmt.Errorf("shader %s: %w", v.Name(), err)
	}
	for _, c := range constantsOf(v) {
		fmt.Fprintf(&r.out, "const %s: u32 = %du;\n", c.name, c.value)
	}
	return r.evaluated(r.out.String() + kernel), nil
}

// newRenderer returns a renderer for v and the declarations of its kernel.
func newRenderer(v Variant) (*renderer, []declaration, error) {
	r := &renderer{consts: map[string]uint32{}, parts: maps.Clone(library().parts)}
	for _, c := range constantsOf(v) {
		r.consts[c.name] = c.value
	}
	own, exp2 := v.(OwnExp2)
	if exp2 {
		v = own.Variant
	}
	r.consts["EXP2"] = bit(exp2)
	file, err := fileOf(v)
	maps.Copy(r.parts, file.parts)
	return r, file.decls, cmp.Or(err, library().err)
}

// declare writes a declaration of the kernel. Constants that are expressions get their values.
func (r *renderer) declare(d declaration) error {
	text, err := r.rendered(d.text)
	if m := integer.FindStringSubmatch(text); m != nil && err == nil {
		r.consts[d.name], err = r.eval(m[1])
		text = fmt.Sprintf("const %s: u32 = %du;", d.name, r.consts[d.name])
	}
	r.out.WriteString(text + "\n")
	return err
}

// join writes the missing declarations that text uses.
func (r *renderer) join(text string, missing map[string]declaration) error {
	for _, name := range names(text) {
		d, ok := missing[name]
		if !ok {
			continue
		}
		delete(missing, name)
		text, err := r.rendered(d.text)
		if err == nil {
			err = r.join(text, missing)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		r.out.WriteString(text + "\n")
	}
	return nil
}

// rendered returns text without attributes of this package.
func (r *renderer) rendered(text string) (string, error) {
	own := &renderer{consts: r.consts, parts: r.parts}
	err := own.render(text, nil)
	return own.out.String(), err
}

// names returns the words of WGSL text.
func names(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool {
		return r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	})
}

// evaluated returns text with the values of expressions in attributes and, in unrolled code, in
// indices: naga 0.13 omits the clamp only for indices that are literals.
func (r *renderer) evaluated(text string) string {
	text = number.ReplaceAllStringFunc(text, func(s string) string {
		m := number.FindStringSubmatch(s)
		list := strings.Split(m[2], ",")
		for i, e := range list {
			if n, err := r.eval(e); err == nil {
				list[i] = fmt.Sprint(n)
			}
		}
		return fmt.Sprintf("@%s(%s)", m[1], strings.Join(list, ", "))
	})
	if r.level() == Looped {
		return text
	}
	known := map[string]string{}
	return index.ReplaceAllStringFunc(text, func(s string) string {
		if _, ok := known[s]; !ok {
			known[s] = s
			if n, err := r.eval(s[1 : len(s)-1]); err == nil {
				known[s] = fmt.Sprintf("[%du]", n)
			}
		}
		return known[s]
	})
}

// level returns how far loops are unrolled. Kernels without the constant have no loops to unroll.
func (r *renderer) level() Expand { return Expand(r.consts["EXPAND"]) }

// render writes text, without attributes of this package and with counters replaced by their values.
func (r *renderer) render(text string, counters map[string]uint32) error {
	for {
		at := attribute.FindStringSubmatchIndex(text)
		if at == nil {
			r.out.WriteString(substitute(text, counters))
			return nil
		}
		r.out.WriteString(substitute(text[:at[0]], counters))
		kind := text[at[2]:at[3]]
		text = text[at[0]:]
		n, err := item(text)
		if err == nil {
			one := text[:n]
			text = text[n:]
			switch kind {
			case "if":
				err = r.choose(one, counters)
			case "unroll":
				err = r.unroll(one, counters)
			case "inline":
				err = r.insert(one, counters)
			default:
				err = errors.New("@else without @if")
			}
		}
		if err != nil {
			return err
		}
	}
}

// choose writes one of two statements or declarations, or nothing.
func (r *renderer) choose(text string, counters map[string]uint32) error {
	end, err := closing(text, len("@if"))
	if err != nil {
		return err
	}
	holds, err := r.eval(substitute(text[len("@if"):end], counters))
	if err != nil {
		return err
	}
	text = strings.TrimSpace(text[end:])
	n, err := item(text)
	if err != nil {
		return err
	}
	kept := text[:n]
	if holds == 0 {
		kept = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(text[n:]), "@else"))
	}
	return r.render(kept, counters)
}

// unroll writes copies of the body of a loop, or the loop.
func (r *renderer) unroll(text string, counters map[string]uint32) error {
	m := loopHeader.FindStringSubmatch(text)
	if m == nil {
		return errors.New("cannot unroll the loop")
	}
	body := text[len(m[0]) : len(text)-1]
	if r.level() < map[string]Expand{"always": Looped, "": Registers, "deep": Full}[m[1]] {
		r.out.WriteString(substitute(m[2], counters))
		err := r.render(body, counters)
		r.out.WriteString("}")
		return err
	}
	name := m[3]
	from, _ := strconv.ParseUint(m[4], 10, 32) // digits
	to, err := r.eval(substitute(m[6], counters))
	if err != nil || m[5] != name || m[7] != name {
		return fmt.Errorf("cannot unroll %q: %v", m[2], err)
	}
	inner := map[string]uint32{}
	maps.Copy(inner, counters)
	for i := uint32(from); i < to && err == nil; i++ {
		inner[name] = i
		r.out.WriteString("{")
		err = r.render(body, inner)
		r.out.WriteString("}\n")
	}
	return err
}

// insert writes the body of an inline function.
func (r *renderer) insert(text string, counters map[string]uint32) error {
	m := call.FindStringSubmatch(text)
	if m == nil {
		return fmt.Errorf("no call: %q", text)
	}
	d, ok := r.parts[m[1]]
	args := arguments(m[2])
	if !ok || len(args) != len(d.params) {
		return fmt.Errorf("no inline function %s with %d parameters", m[1], len(args))
	}
	return r.render(replaced(d.text, d.params, args), counters)
}

// substitute replaces counters by literals, but not members of the same name, as in p.h.
func substitute(text string, counters map[string]uint32) string {
	if len(counters) == 0 {
		return text
	}
	return word.ReplaceAllStringFunc(text, func(w string) string {
		if v, ok := counters[w]; ok {
			return fmt.Sprintf("%du", v)
		}
		return w
	})
}
