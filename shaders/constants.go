package shaders

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
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
	k, err := describe(v)
	if err != nil {
		k = new(Kernel)
	}
	kernels.Store(v, k)
	return k
}

var (
	binding = regexp.MustCompile(`@binding\(.*?\) var<(storage, read_write|storage, read|uniform)>`)
	shared  = regexp.MustCompile(`var<workgroup> \w+: (.*);`)
	group   = regexp.MustCompile(`@workgroup_size\((.*?)\)`)
)

func describe(v Variant) (*Kernel, error) {
	r, file, err := newRenderer(v)
	if err != nil {
		return nil, err
	}
	k := &Kernel{Threads: 1}
	for _, d := range file {
		if m := group.FindStringSubmatch(d.text); m != nil {
			for _, size := range strings.Split(m[1], ",") {
				n, err := r.eval(size)
				if err != nil {
					return nil, err
				}
				k.Threads *= int(n)
			}
		} else if strings.Contains(d.text, "var<") || declared.FindString(d.text) == "const "+d.name {
			if err := r.declare(d); err != nil {
				return nil, err
			}
		}
	}
	head := r.out.String()
	for _, m := range binding.FindAllStringSubmatch(head, -1) {
		k.Bindings += map[string]string{"storage, read": "r", "storage, read_write": "w", "uniform": "u"}[m[1]]
	}
	for _, m := range shared.FindAllStringSubmatch(head, -1) {
		n, err := r.size(m[1])
		if err != nil {
			return nil, err
		}
		k.WorkgroupMemory += int(n)
	}
	k.Constants = r.consts
	return k, nil
}

// size returns the bytes of a type.
func (r *renderer) size(wgsl string) (uint32, error) {
	if of, ok := strings.CutPrefix(wgsl, "array<"); ok {
		i := strings.LastIndexByte(of, ',')
		length, err := r.eval(of[i+1 : len(of)-1])
		if err != nil {
			return 0, err
		}
		n, err := r.size(of[:i])
		return n * length, err
	}
	n, ok := map[string]uint32{"vec4<f32>": 16, "vec4<u32>": 16, "vec2<f32>": 8, "f32": 4, "u32": 4, "atomic<u32>": 4}[wgsl]
	if !ok {
		return 0, fmt.Errorf("type %s has no known size", wgsl)
	}
	return n, nil
}

// Key identifies a variant by its kernel and constants, such as softmax EXPAND=1 BOTH=0 HELD=1 ROW=1024.
func Key(v Variant) string {
	var s strings.Builder
	s.WriteString(v.Name())
	if _, own := v.(OwnExp2); own {
		s.WriteString(" EXP2=1")
	}
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
		v = own.Variant
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

// eval evaluates a constant expression; true is 1. Except for the suffix of literals it reads the same in
// Go.
func (r *renderer) eval(wgsl string) (uint32, error) {
	e, err := parser.ParseExpr(literal.ReplaceAllString(wgsl, "$1"))
	if err != nil {
		return 0, fmt.Errorf("%q: %w", wgsl, err)
	}
	n, ok := r.value(e)
	if !ok {
		return 0, fmt.Errorf("%q is no constant", wgsl)
	}
	return n, nil
}

func (r *renderer) value(e ast.Expr) (n uint32, ok bool) {
	switch e := e.(type) {
	case *ast.ParenExpr:
		return r.value(e.X)
	case *ast.BasicLit:
		x, err := strconv.ParseUint(e.Value, 10, 32)
		return uint32(x), err == nil
	case *ast.Ident:
		n, ok = r.consts[e.Name]
	case *ast.UnaryExpr:
		n, ok = r.value(e.X)
		return bit(n == 0), ok && e.Op == token.NOT
	case *ast.BinaryExpr:
		return r.apply(e.Op.String(), e.X, e.Y)
	case *ast.CallExpr:
		if f, named := e.Fun.(*ast.Ident); named && len(e.Args) == 2 {
			return r.apply(f.Name, e.Args[0], e.Args[1])
		}
	}
	return n, ok
}

// apply evaluates an operation of two operands.
func (r *renderer) apply(name string, left, right ast.Expr) (n uint32, ok bool) {
	x, ok := r.value(left)
	y, also := r.value(right)
	if !ok || !also || y == 0 && (name == "/" || name == "%") {
		return 0, false
	}
	switch name {
	case "+":
		n = x + y
	case "-":
		n = x - y
	case "*":
		n = x * y
	case "/":
		n = x / y
	case "%":
		n = x % y
	case "==":
		n = bit(x == y)
	case "!=":
		n = bit(x != y)
	case "<":
		n = bit(x < y)
	case ">":
		n = bit(x > y)
	case "&&":
		n = bit(x != 0 && y != 0)
	case "||":
		n = bit(x != 0 || y != 0)
	case "max":
		n = max(x, y)
	case "min":
		n = min(x, y)
	default:
		return 0, false
	}
	return n, true
}

func bit(on bool) uint32 {
	if on {
		return 1
	}
	return 0
}
