package shaders

import (
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"
)

// Key identifies a variant by its kernel and constants, such as softmax BOTH=0 HELD=1 ROW=1024.
func Key(v Variant) string {
	var s strings.Builder
	s.WriteString(v.Name())
	for _, c := range constantsOf(v) {
		fmt.Fprintf(&s, " %s=%d", c.name, c.value)
	}
	return s.String()
}

type namedConstant struct {
	name  string
	value uint32
}

// constantsOf returns the fields of v.
func constantsOf(v Variant) (all []namedConstant) {
	if own, ok := v.(OwnExp2); ok {
		return append([]namedConstant{{"EXP2", 1}}, constantsOf(own.Variant)...)
	}
	if m, ok := v.(Modded); ok {
		return append([]namedConstant{{"MOD", 1}, {"VALUES", uint32(m.Values)}}, constantsOf(m.Variant)...)
	}
	x := reflect.ValueOf(v)
	if _, custom := v.(Custom); custom || x.Kind() != reflect.Struct {
		return nil
	}
	for i := range x.NumField() {
		c := namedConstant{name: strings.ToUpper(x.Type().Field(i).Name)}
		switch f := x.Field(i); {
		case f.Kind() == reflect.Bool:
			c.value = bit(f.Bool())
		case f.CanInt():
			c.value = uint32(f.Int())
		case f.CanUint():
			c.value = uint32(f.Uint())
		}
		all = append(all, c)
	}
	return all
}

// evaluate returns the value of a constant expression; true is 1.
func evaluate(wgsl string, consts map[string]uint32) (n uint32, ok bool) {
	e := expression{token.FindAllString(wgsl, -1), consts}
	n, ok = e.value(0)
	return n, ok && len(e.rest) == 0
}

// token matches a literal, a name or an operator of an expression, or another character.
var token = regexp.MustCompile(`\w+|[=!]=|\S`)

// expression is the rest of a constant expression, in tokens. go/parser would read it too, but is
// a twentieth of a program for wasm.
type expression struct {
	rest   []string
	consts map[string]uint32
}

// next removes the next token; "" at the end.
func (e *expression) next() (t string) {
	if len(e.rest) > 0 {
		t, e.rest = e.rest[0], e.rest[1:]
	}
	return t
}

// value evaluates an operand, and the operators that bind more closely than the rank.
func (e *expression) value(rank int) (n uint32, ok bool) {
	n, ok = e.operand()
	for ok && len(e.rest) > 0 && ranks[e.rest[0]] > rank {
		name := e.next()
		y, also := e.value(ranks[name])
		if !also || y == 0 && (name == "/" || name == "%") {
			return 0, false
		}
		n = operations[name](n, y)
	}
	return n, ok
}

// operand evaluates a literal, a constant, min(x, y), max(x, y) or an expression in parentheses.
func (e *expression) operand() (n uint32, ok bool) {
	switch t := e.next(); t {
	case "(":
		n, ok = e.value(0)
		return n, ok && e.next() == ")"
	case "min", "max":
		open := e.next() == "("
		x, ok := e.value(0)
		comma := e.next() == ","
		y, also := e.value(0)
		return operations[t](x, y), open && ok && comma && also && e.next() == ")"
	default:
		if n, ok = e.consts[t]; ok {
			return n, true
		}
		x, err := strconv.ParseUint(strings.TrimSuffix(t, "u"), 10, 32)
		return uint32(x), err == nil
	}
}

// ranks of operators: higher ones bind more closely.
var ranks = map[string]int{"==": 1, "!=": 1, "+": 2, "-": 2, "*": 3, "/": 3, "%": 3}

var operations = map[string]func(x, y uint32) uint32{
	"+":   func(x, y uint32) uint32 { return x + y },
	"-":   func(x, y uint32) uint32 { return x - y },
	"*":   func(x, y uint32) uint32 { return x * y },
	"/":   func(x, y uint32) uint32 { return x / y },
	"%":   func(x, y uint32) uint32 { return x % y },
	"==":  func(x, y uint32) uint32 { return bit(x == y) },
	"!=":  func(x, y uint32) uint32 { return bit(x != y) },
	"max": func(x, y uint32) uint32 { return max(x, y) },
	"min": func(x, y uint32) uint32 { return min(x, y) },
}

func bit(on bool) uint32 {
	if on {
		return 1
	}
	return 0
}
