package shaders

import (
	"fmt"
	"go/ast"
	"go/parser"
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

var literal = regexp.MustCompile(`\b(\d+)u\b`)

// evaluate returns the value of a constant expression; true is 1. Except for the suffix of literals it reads
// the same in Go.
func evaluate(wgsl string, consts map[string]uint32) (n uint32, ok bool) {
	e, err := parser.ParseExpr(literal.ReplaceAllString(wgsl, "$1"))
	if err != nil {
		return 0, false
	}
	return valueOf(e, consts)
}

func valueOf(e ast.Expr, consts map[string]uint32) (n uint32, ok bool) {
	var name string
	var operands []ast.Expr
	switch e := e.(type) {
	case *ast.ParenExpr:
		return valueOf(e.X, consts)
	case *ast.BasicLit:
		x, err := strconv.ParseUint(e.Value, 10, 32)
		return uint32(x), err == nil
	case *ast.Ident:
		n, ok = consts[e.Name]
		return n, ok
	case *ast.BinaryExpr:
		name, operands = e.Op.String(), []ast.Expr{e.X, e.Y}
	case *ast.CallExpr:
		f, _ := e.Fun.(*ast.Ident)
		if f == nil {
			return 0, false
		}
		name, operands = f.Name, e.Args
	}
	operation := operations[name]
	if operation == nil || len(operands) != 2 {
		return 0, false
	}
	x, ok := valueOf(operands[0], consts)
	y, also := valueOf(operands[1], consts)
	if !ok || !also || y == 0 && (name == "/" || name == "%") {
		return 0, false
	}
	return operation(x, y), true
}

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
