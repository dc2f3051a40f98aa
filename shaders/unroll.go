package shaders

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"regexp"
	"strconv"
	"strings"
)

// Values of a kernel's constant EXPAND: how far Specialise unrolls loops.
const (
	// Looped leaves loops as they are, except those marked 'unroll always'.
	Looped = 0
	// Registers also unrolls loops marked 'unroll', which index private arrays. A
	// compiler that does not unroll such loops keeps the arrays in memory.
	Registers = 1
	// Full also unrolls loops marked 'unroll deep', whose counters are part of indices
	// into workgroup memory.
	Full = 2
)

// An unroller replaces marked loops by copies of their bodies and drops blocks that are
// statically false. It works line by line; a mark ends the line that opens a block,
//
//	for (var i = 0u; i < N; i++) { // unroll, or: unroll deep, unroll always
//	if (IN == 0u) { // static
//
// and the first line that balances the braces ends the block. In the copies of a loop's
// body the counter is a literal, and an index of literals and constants is evaluated:
// naga 0.13 omits the clamp only for indices that are literals.
type unroller struct {
	level  uint32
	consts map[string]uint32
	out    strings.Builder
}

var (
	loopMark   = regexp.MustCompile(`^\s*for \(var (\w+) = (\d+)u; (\w+) < (.+); (\w+)\+\+\) \{ // unroll( deep| always)?$`)
	staticMark = regexp.MustCompile(`^\s*if \((\w+) (==|!=) (\d+)u\) \{ // static$`)
	anyMark    = regexp.MustCompile(`// (unroll|static)`)
	index      = regexp.MustCompile(`\[([^\[\]]+)\]`)
	comment    = regexp.MustCompile(`\s*//.*$`)
	literal    = regexp.MustCompile(`\b(\d+)u\b`)
	word       = regexp.MustCompile(`\.?\b[A-Za-z_]\w*`)
)

// unroll returns src with the marked loops of a level unrolled and without blocks that
// are statically false. Errors quote the line of the mark.
func unroll(src string, level uint32, consts map[string]uint32) (string, error) {
	u := &unroller{level: level, consts: consts}
	if err := u.block(strings.Split(src, "\n"), nil); err != nil {
		return "", err
	}
	return strings.TrimSuffix(u.out.String(), "\n"), nil
}

// block writes lines, with counters replaced by their values.
func (u *unroller) block(lines []string, counters map[string]uint32) error {
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		loop, static := loopMark.FindStringSubmatch(line), staticMark.FindStringSubmatch(line)
		if loop == nil && static == nil {
			if anyMark.MatchString(line) {
				return fmt.Errorf("cannot unroll %q", strings.TrimSpace(line))
			}
			u.line(line, counters)
			continue
		}
		n := closing(lines[i:])
		if n < 0 {
			return fmt.Errorf("no end of %q", strings.TrimSpace(line))
		}
		body := lines[i+1 : i+n]
		i += n
		if static != nil {
			keep, err := u.holds(static, counters)
			if err != nil {
				return err
			}
			if keep {
				if err := u.braced(body, counters); err != nil {
					return err
				}
			}
			continue
		}
		if least := map[string]uint32{" always": Looped, "": Registers, " deep": Full}[loop[6]]; u.level < least {
			u.line(line, counters)
			if err := u.block(body, counters); err != nil {
				return err
			}
			u.line("}", nil)
			continue
		}
		name := loop[1]
		from, _ := strconv.ParseUint(loop[2], 10, 32)
		to, err := u.eval(substitute(loop[4], counters))
		if err != nil || loop[3] != name || loop[5] != name {
			return fmt.Errorf("cannot unroll %q: %v", strings.TrimSpace(line), err)
		}
		inner := map[string]uint32{}
		maps.Copy(inner, counters)
		for v := uint32(from); v < to; v++ {
			inner[name] = v
			if err := u.braced(body, inner); err != nil {
				return err
			}
		}
	}
	return nil
}

func (u *unroller) braced(lines []string, counters map[string]uint32) error {
	u.out.WriteString("{\n")
	err := u.block(lines, counters)
	u.out.WriteString("}\n")
	return err
}

// line writes one line; inside an unrolled loop it omits the comment.
func (u *unroller) line(line string, counters map[string]uint32) {
	if len(counters) > 0 {
		line = substitute(comment.ReplaceAllString(line, ""), counters)
	}
	if u.level > Looped {
		line = index.ReplaceAllStringFunc(line, func(s string) string {
			if n, err := u.eval(s[1 : len(s)-1]); err == nil {
				return fmt.Sprintf("[%du]", n)
			}
			return s
		})
	}
	u.out.WriteString(line)
	u.out.WriteByte('\n')
}

// holds evaluates the condition of a static block.
func (u *unroller) holds(m []string, counters map[string]uint32) (bool, error) {
	have, err := u.eval(substitute(m[1], counters))
	if err != nil {
		return false, fmt.Errorf("static condition: %w", err)
	}
	want, err := strconv.ParseUint(m[3], 10, 32)
	return (have == uint32(want)) == (m[2] == "=="), err
}

// closing returns the index of the line that ends the block which lines[0] opens, or -1.
func closing(lines []string) int {
	depth := 0
	for i, l := range lines {
		l = comment.ReplaceAllString(l, "")
		depth += strings.Count(l, "{") - strings.Count(l, "}")
		if depth == 0 {
			return i
		}
	}
	return -1
}

// substitute replaces counters by literals, but not members of the same name, as in p.h.
func substitute(s string, counters map[string]uint32) string {
	if len(counters) == 0 {
		return s
	}
	return word.ReplaceAllStringFunc(s, func(w string) string {
		if v, ok := counters[w]; ok {
			return fmt.Sprintf("%du", v)
		}
		return w
	})
}

// eval evaluates an expression of literals and constants with + - * / % and parentheses.
// Except for the suffix of literals it reads the same in Go.
func (u *unroller) eval(s string) (uint32, error) {
	e, err := parser.ParseExpr(literal.ReplaceAllString(s, "$1"))
	if err != nil {
		return 0, fmt.Errorf("%q: %w", s, err)
	}
	return u.value(e)
}

func (u *unroller) value(e ast.Expr) (uint32, error) {
	switch e := e.(type) {
	case *ast.ParenExpr:
		return u.value(e.X)
	case *ast.BasicLit:
		n, err := strconv.ParseUint(e.Value, 10, 32)
		return uint32(n), err
	case *ast.Ident:
		if n, ok := u.consts[e.Name]; ok {
			return n, nil
		}
	case *ast.BinaryExpr:
		x, err := u.value(e.X)
		if err != nil {
			return 0, err
		}
		y, err := u.value(e.Y)
		switch {
		case err != nil:
			return 0, err
		case e.Op == token.ADD:
			return x + y, nil
		case e.Op == token.SUB:
			return x - y, nil
		case e.Op == token.MUL:
			return x * y, nil
		case e.Op == token.QUO && y != 0:
			return x / y, nil
		case e.Op == token.REM && y != 0:
			return x % y, nil
		}
	}
	return 0, errors.New("no expression of constants")
}
