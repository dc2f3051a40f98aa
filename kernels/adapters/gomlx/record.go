package gomlx

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

// builder records a graph. The Go backend's builder that it embeds holds all operations, for their shapes and errors,
// and is never compiled; its values are those that gomlx sees. Results of attention are parameters of it.
type builder struct {
	compute.Builder
	b        *backend
	main     *function
	made     map[compute.Value]*op // by the main function
	compiled bool
}

func newBuilder(b *backend, name string) *builder {
	r := &builder{Builder: b.Backend.Builder(name), b: b, made: map[compute.Value]*op{}}
	r.main = &function{Function: r.Builder.Main(), builder: r}
	return r
}

func (b *builder) Main() compute.Function { return b.main }

func (b *builder) NewFunction(name string) (compute.Function, error) {
	f, err := b.Builder.NewFunction(name)
	if err != nil {
		return nil, err
	}
	return &function{Function: f, builder: b}, nil
}

// function is the main function, a named one, or a closure, which has a parent.
type function struct {
	compute.Function
	builder *builder
	parent  *function
	ops     []*op
	params  []*op // of the main function
	outputs []compute.Value
	dynamic bool // a parameter of the main function has an axis of unknown length
}

// op is a recorded operation: a method of compute.Function with its arguments, or attention.
type op struct {
	method string
	args   []reflect.Value
	in     []compute.Value // arguments, and what functions among them capture
	out    []compute.Value
	param  int   // of the main function, or -1
	call   *call // attention
}

// floating reports whether o depends on nothing, as constants: each stage repeats it.
func (o *op) floating() bool { return len(o.in) == 0 && o.param < 0 && o.call == nil }

func (f *function) Builder() compute.Builder { return f.builder }

func (f *function) Parent() compute.Function {
	if f.parent == nil {
		return nil
	}
	return f.parent
}

func (f *function) Closure() (compute.Function, error) {
	c, err := f.Function.Closure()
	if err != nil {
		return nil, err
	}
	return &function{Function: c, builder: f.builder, parent: f}, nil
}

func (f *function) Parameter(name string, shape shapes.Shape, sharding *compute.ShardingSpec) (compute.Value, error) {
	v, err := one(f.op("Parameter", name, shape, sharding))
	if err == nil && f == f.builder.main {
		o := f.ops[len(f.ops)-1]
		o.param = len(f.params)
		f.params = append(f.params, o)
		f.dynamic = f.dynamic || shape.IsDynamic()
	}
	return v, err
}

func (f *function) Return(outputs []compute.Value, shardings []*compute.ShardingSpec) error {
	_, err := f.op("Return", outputs, shardings)
	if err == nil {
		f.outputs = slices.Clone(outputs)
	}
	return err
}

var (
	functionType = reflect.TypeFor[compute.Function]()
	valueType    = reflect.TypeFor[compute.Value]()
)

// op adds the operation to the graph of shapes and records it with copies of its arguments.
func (f *function) op(method string, args ...any) ([]compute.Value, error) {
	if f.builder.compiled {
		return nil, fmt.Errorf("gomlx: %s: the builder has been compiled", method)
	}
	o := &op{method: method, param: -1}
	m, _ := functionType.MethodByName(method)
	for i, a := range args {
		arg := reflect.New(m.Type.In(i)).Elem()
		if a != nil {
			arg.Set(reflect.ValueOf(a))
		}
		o.args = append(o.args, substitute(arg,
			func(v compute.Value) compute.Value { o.in = append(o.in, v); return v },
			func(g compute.Function) compute.Function {
				if g, ok := g.(*function); ok {
					o.in = append(o.in, g.captured()...)
				}
				return g
			}))
	}
	var err error
	o.out, err = o.replay(f.Function, func(v compute.Value) compute.Value { return v }, func(g compute.Function) compute.Function {
		if g, ok := g.(*function); ok {
			return g.Function
		}
		return g
	})
	if err != nil {
		return nil, err
	}
	f.record(o)
	return o.out, nil
}

// record appends o. The Go backend returns an earlier value for an operation that repeats another.
func (f *function) record(o *op) {
	f.ops = append(f.ops, o)
	if f != f.builder.main {
		return
	}
	for _, v := range o.out {
		if f.builder.made[v] == nil {
			f.builder.made[v] = o
		}
	}
}

// learned reports whether v depends on a parameter of the main function by floating-point numbers.
func (f *function) learned(v compute.Value) bool {
	seen := map[compute.Value]bool{}
	var depends func(v compute.Value) bool
	depends = func(v compute.Value) bool {
		o := f.builder.made[v]
		if o == nil || seen[v] {
			return false
		}
		seen[v] = true
		shape, err := f.Shape(v)
		return err == nil && shape.DType.IsFloat() && (o.param >= 0 || slices.ContainsFunc(o.in, depends))
	}
	return depends(v)
}

// captured returns the values of other functions that f uses.
func (f *function) captured() (values []compute.Value) {
	own := map[compute.Value]bool{}
	for _, o := range f.ops {
		for _, v := range o.in {
			if !own[v] {
				values = append(values, v)
			}
		}
		for _, v := range o.out {
			own[v] = true
		}
	}
	return values
}

// replay calls the method of o on d with its values and functions replaced.
func (o *op) replay(d compute.Function, value func(compute.Value) compute.Value, function func(compute.Function) compute.Function) (out []compute.Value, err error) {
	args := make([]reflect.Value, len(o.args))
	for i, a := range o.args {
		args[i] = substitute(a, value, function)
	}
	m := reflect.ValueOf(d).MethodByName(o.method)
	call := m.Call
	if m.Type().IsVariadic() {
		call = m.CallSlice
	}
	results := call(args)
	last := len(results) - 1
	if err, _ := results[last].Interface().(error); err != nil {
		return nil, err
	}
	for _, r := range results[:last] {
		if values, ok := r.Interface().([]compute.Value); ok {
			out = append(out, values...)
		} else {
			out = append(out, r.Interface())
		}
	}
	return out, nil
}

// substitute returns a copy of x in which values and functions are replaced, in slices and structs too.
func substitute(x reflect.Value, value func(compute.Value) compute.Value, function func(compute.Function) compute.Function) reflect.Value {
	n := reflect.New(x.Type()).Elem()
	n.Set(x)
	switch x.Kind() {
	case reflect.Interface:
		switch {
		case x.IsNil():
		case x.Type() == valueType:
			n.Set(reflect.ValueOf(value(x.Interface())))
		case x.Type() == functionType:
			n.Set(reflect.ValueOf(function(x.Interface().(compute.Function))))
		default: // the numbers of a constant
			n.Set(substitute(x.Elem(), value, function))
		}
	case reflect.Slice:
		if x.IsNil() {
			break
		}
		n.Set(reflect.MakeSlice(x.Type(), x.Len(), x.Len()))
		reflect.Copy(n, x)
		switch x.Type().Elem().Kind() {
		case reflect.Interface, reflect.Slice, reflect.Struct, reflect.Pointer:
			for i := range x.Len() {
				n.Index(i).Set(substitute(x.Index(i), value, function))
			}
		}
	case reflect.Struct:
		for i := range x.NumField() {
			if n.Field(i).CanSet() {
				n.Field(i).Set(substitute(x.Field(i), value, function))
			}
		}
	case reflect.Pointer:
		if !x.IsNil() {
			n.Set(reflect.New(x.Type().Elem()))
			n.Elem().Set(substitute(x.Elem(), value, function))
		}
	}
	return n
}

// one, two and three return the results of an operation.
func one(v []compute.Value, err error) (compute.Value, error) {
	if err != nil {
		return nil, err
	}
	return v[0], nil
}

func two(v []compute.Value, err error) (a, b compute.Value, _ error) {
	if err != nil {
		return nil, nil, err
	}
	return v[0], v[1], nil
}

func three(v []compute.Value, err error) (a, b, c compute.Value, _ error) {
	if err != nil {
		return nil, nil, nil, err
	}
	return v[0], v[1], v[2], nil
}
