// Package modtext checks the WGSL of score mods before it becomes part of a kernel. A text may come
// from a stranger, and some WGSL compilers check neither types nor indices. A text that passes is valid WGSL in
// the types f32, i32, u32 and bool. It ends, because it has no loops and calls no functions but those listed here,
// and it reads no memory but its variables and the values of the mod.
package modtext

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
)

// Bounds of what compilers are given: bytes, and expressions and blocks inside of each other.
const (
	maxBytes = 4 << 10
	maxDepth = 24
)

// functions are the types of the arguments, a space, and the type of the result: f for f32, i for i32, u for u32, b
// for bool. n is one of the first three and t any, the same everywhere in the function.
var functions = map[string]string{
	"value": "u f", "values": " u", "hidden": " f", "precise_tanh": "f f", "precise_exp2": "f f", "exp": "f f", "exp2": "f f",
	"log": "f f", "log2": "f f", "sin": "f f", "cos": "f f", "tanh": "f f", "sqrt": "f f", "inverseSqrt": "f f", "floor": "f f", "ceil": "f f",
	"round": "f f", "trunc": "f f", "fract": "f f", "sign": "f f", "abs": "n n", "min": "nn n", "max": "nn n", "clamp": "nnn n",
	"pow": "ff f", "step": "ff f", "fma": "fff f", "mix": "fff f", "smoothstep": "fff f", "select": "ttb t",
}

var (
	types = map[string]byte{"f32": 'f', "i32": 'i', "u32": 'u', "bool": 'b'}
	kinds = map[byte]string{'f': "f32", 'i': "i32", 'u': "u32", 'b': "bool"}
	// A comment is of ASCII, because compilers know more line breaks than \n, at which it would end.
	token = regexp.MustCompile(`\n|[ \t]+|//[ -~\t]*|[A-Za-z]\w*|\d+\.\d*(?:[eE][+-]?\d+)?f?|\d+[eE][+-]?\d+f?|\d+[iuf]?|&&|\|\||[-+*/<>=!]=|.`)
	name  = regexp.MustCompile(`^[A-Za-z]`)
	// words are names that a variable cannot have: they are WGSL, or begin a statement.
	words = strings.Fields("let var if else return true false bitcast const fn for loop while switch case default break continue discard struct override enable")
)

type parser struct {
	rest  []string // tokens
	lines []int    // of rest
	last  int      // line of the token before
	depth int
	vars  map[string]variable
}

type variable struct {
	kind    byte // its type
	changes bool // it is a var
	dead    bool // its block has ended
}

// failure is what a parser panics with.
type failure string

// checked is a text that has passed.
var checked atomic.Pointer[string]

// Check returns backend.ErrUnsupported for an empty text, and backend.ErrOption with the line for one that cannot be the body of
//
//	fn score_mod(score: f32, b: u32, h: u32, i: u32, j: u32) -> f32
//
// or may not. label names the text in errors.
func Check(label, text string) (err error) {
	if last := checked.Load(); last != nil && *last == text {
		return nil
	}
	if text == "" {
		return fmt.Errorf("%s is empty, which GPUs compile: %w", label, backend.ErrUnsupported)
	}
	if len(text) > maxBytes {
		return fmt.Errorf("%s has %d bytes, up to %d are compiled: %w", label, len(text), maxBytes, backend.ErrOption)
	}
	p := &parser{last: 1, vars: map[string]variable{"score": {kind: 'f'}, "b": {kind: 'u'}, "h": {kind: 'u'}, "i": {kind: 'u'}, "j": {kind: 'u'}}}
	line := 1
	for _, t := range token.FindAllString(text, -1) {
		if t == "\n" {
			line++
		} else if t[0] != ' ' && t[0] != '\t' && !strings.HasPrefix(t, "//") {
			p.rest, p.lines = append(p.rest, t), append(p.lines, line)
		}
	}
	defer func() {
		if f := recover(); f != nil { // not only a failure: a text over which the parser stumbles must not pass
			err = fmt.Errorf("%s, line %d: %v: %w", label, p.last, f, backend.ErrOption)
		}
	}()
	if !p.block("") {
		p.fail("the end of the function needs a return")
	}
	checked.Store(&text)
	return nil
}

func (p *parser) fail(format string, args ...any) { panic(failure(fmt.Sprintf(format, args...))) }

// peek returns the next token, "" at the end.
func (p *parser) peek() string {
	if len(p.rest) == 0 {
		return ""
	}
	return p.rest[0]
}

func (p *parser) next() string {
	t := p.peek()
	if t != "" {
		p.last, p.rest, p.lines = p.lines[0], p.rest[1:], p.lines[1:]
	}
	return t
}

// take consumes the next token if it is t.
func (p *parser) take(t string) bool { return p.peek() == t && p.next() != "" }

func (p *parser) need(t string) {
	if got := p.next(); got != t {
		p.fail("found %q, should be %q", got, t)
	}
}

func (p *parser) same(got, want byte) {
	if got != want {
		p.fail("the type is %s, should be %s", kinds[got], kinds[want])
	}
}

// enter bounds the depth of the parser until the function that it returns is called.
func (p *parser) enter() (leave func()) {
	if p.depth++; p.depth > maxDepth {
		p.fail("more than %d expressions or blocks are inside of each other", maxDepth)
	}
	return func() { p.depth-- }
}

// block checks statements up to a token, and reports whether they return.
func (p *parser) block(end string) (returns bool) {
	defer p.enter()()
	var own []string
	for p.peek() != end {
		if returns {
			p.fail("%q follows a return", p.next())
		}
		switch t := p.next(); t {
		case "let", "var":
			own = append(own, p.declaration(t == "var"))
		case "if":
			returns = p.choice()
		case "return":
			p.same(p.expression(), 'f')
			p.need(";")
			returns = true
		default:
			v, ok := p.vars[t]
			if !ok || v.dead || !v.changes {
				p.fail("%q begins no statement, and is no var", t)
			}
			op := p.next()
			if !slices.Contains([]string{"=", "+=", "-=", "*=", "/="}, op) || op != "=" && v.kind == 'b' {
				p.fail("found %q, should be an assignment", op)
			}
			p.same(p.expression(), v.kind)
			p.need(";")
		}
	}
	p.next()
	for _, n := range own { // the names stay taken: compilers differ on where one may hide another
		p.vars[n] = variable{dead: true}
	}
	return returns
}

// declaration checks the rest of let or var, and returns the name.
func (p *parser) declaration(changes bool) string {
	n := p.next()
	if _, taken := p.vars[n]; taken || !name.MatchString(n) || functions[n] != "" || types[n] != 0 || slices.Contains(words, n) {
		p.fail("%q cannot name a variable, or does already", n)
	}
	want := byte(0)
	if p.take(":") {
		if want = types[p.next()]; want == 0 {
			p.fail("the type of %q must be f32, i32, u32 or bool", n)
		}
	}
	p.need("=")
	kind := p.expression()
	if want != 0 {
		p.same(kind, want)
	}
	p.need(";")
	p.vars[n] = variable{kind: kind, changes: changes}
	return n
}

// choice checks the rest of an if, and reports whether all of its branches return.
func (p *parser) choice() bool {
	defer p.enter()()
	p.same(p.expression(), 'b')
	p.need("{")
	returns := p.block("}")
	if !p.take("else") {
		return false
	}
	if p.take("if") {
		return p.choice() && returns
	}
	p.need("{")
	return p.block("}") && returns
}

// expression returns the type of an expression. Where WGSL wants parentheses so does it.
func (p *parser) expression() byte {
	defer p.enter()()
	kind := p.comparison()
	if op := p.peek(); op == "&&" || op == "||" {
		for p.take(op) {
			p.same(kind, 'b')
			p.same(p.comparison(), 'b')
		}
	}
	return kind
}

func (p *parser) comparison() byte {
	kind := p.sum()
	switch op := p.peek(); op {
	case "<", ">", "<=", ">=", "==", "!=":
		p.next()
		if kind == 'b' {
			p.fail("%s compares numbers", op)
		}
		p.same(p.sum(), kind)
		return 'b'
	}
	return kind
}

func (p *parser) sum() byte     { return p.chain("+-", p.product) }
func (p *parser) product() byte { return p.chain("*/%", p.unary) }

// chain checks operands between which there are some operators, of one character each.
func (p *parser) chain(operators string, operand func() byte) byte {
	kind := operand()
	for op := p.peek(); op != "" && strings.Contains(operators, op); op = p.peek() {
		p.next()
		other := operand()
		if kind == 'b' {
			p.fail("%s takes numbers", op)
		}
		p.same(other, kind)
	}
	return kind
}

func (p *parser) unary() byte {
	switch {
	case p.take("-"):
		kind := p.operand()
		if kind != 'f' && kind != 'i' {
			p.fail("- takes f32 or i32")
		}
		return kind
	case p.take("!"):
		p.same(p.operand(), 'b')
		return 'b'
	}
	return p.operand()
}

// operand checks a literal, a variable, a call or an expression in parentheses. A number without a suffix is an
// i32, or with a point an f32. Compilers differ on the type that they would choose for it.
func (p *parser) operand() byte {
	t := p.next()
	switch v, ok := p.vars[t]; {
	case t == "(":
		kind := p.expression()
		p.need(")")
		return kind
	case t == "true" || t == "false":
		return 'b'
	case ok && !v.dead:
		return v.kind
	case types[t] != 0:
		p.arguments("t")
		return types[t]
	case t == "bitcast":
		p.need("<")
		kind := types[p.next()]
		p.need(">")
		if p.arguments("n"); kind == 0 || kind == 'b' {
			p.fail("bitcast is to f32, i32 or u32")
		}
		return kind
	case functions[t] != "":
		in, out, _ := strings.Cut(functions[t], " ")
		if kind := p.arguments(in); out == "n" || out == "t" {
			return kind
		}
		return out[0]
	case t != "" && t[0] >= '0' && t[0] <= '9':
		return p.number(t)
	}
	p.fail("%q is no value that score mods have", t)
	return 0
}

// arguments checks a list of arguments, and returns the type that n and t stand for.
func (p *parser) arguments(want string) (free byte) {
	p.need("(")
	for n := range want {
		if n > 0 {
			p.need(",")
		}
		kind := p.expression()
		switch w := want[n]; {
		case w != 'n' && w != 't':
			p.same(kind, w)
		case free != 0:
			p.same(kind, free)
		case w == 'n' && kind == 'b':
			p.fail("the type is bool, should be a number")
		default:
			free = kind
		}
	}
	p.need(")")
	return free
}

func (p *parser) number(t string) byte {
	digits, kind, bits := strings.TrimRight(t, "fiu"), byte('i'), 31
	var err error
	switch c := t[len(t)-1]; {
	case c == 'f' || strings.ContainsAny(t, ".eE"):
		kind = 'f'
		_, err = strconv.ParseFloat(digits, 32)
	case c == 'u':
		kind, bits = 'u', 32
		fallthrough
	default:
		_, err = strconv.ParseUint(digits, 10, bits)
	}
	if err != nil || len(digits) > 1 && digits[0] == '0' && kind != 'f' {
		p.fail("%s is no number", t)
	}
	return kind
}
