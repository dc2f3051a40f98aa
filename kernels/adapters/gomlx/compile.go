package gomlx

import (
	"fmt"
	"math"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	"github.com/seed90331342/attn/kernels"
)

// program is a compiled graph. Values that leave a stage are in numbered slots: first the inputs.
type program struct {
	b       *backend
	names   []string
	inputs  []shapes.Shape
	shapes  []shapes.Shape // of the outputs
	stages  []*stage
	outputs []int // slots
	last    []int // of each slot: the step after which it is free, -1 before the first
}

// kept is the last step of a slot that the caller receives.
const kept = math.MaxInt

// stage is a graph that the Go backend runs, in step 2n for stage n, and the attention that uses
// its results, in step 2n+1.
type stage struct {
	exec    compute.Executable // nil for a stage without results
	in, out []int              // slots
	calls   []*call

	builder compute.Builder
	main    compute.Function
	local   map[compute.Value]compute.Value // the stage's value for a recorded one
	named   map[*function]compute.Function
	exports []compute.Value
}

// compiler distributes the operations over stages.
type compiler struct {
	*program
	recorded *builder
	level    map[compute.Value]int // the stage from which on a value exists
	slots    map[compute.Value]int
	err      error // the first one
}

// Compile returns an executable of the operations that the outputs need.
func (b *builder) Compile() (compute.Executable, error) {
	main := b.main
	if main.outputs == nil {
		return nil, fmt.Errorf("gomlx: %s: the main function has not returned", b.Name())
	}
	b.compiled = true
	c := &compiler{program: &program{b: b.b}, recorded: b, level: map[compute.Value]int{}, slots: map[compute.Value]int{}}
	for i, o := range main.params {
		c.names, c.inputs = append(c.names, o.args[0].String()), append(c.inputs, c.shape(o.out[0]))
		c.slots[o.out[0]] = i
		c.last = append(c.last, -1)
	}
	for _, o := range c.live(main) {
		level := 0
		for _, v := range o.in {
			level = max(level, c.level[v])
		}
		switch s := c.stage(level); {
		case o.call != nil:
			level++ // of the results
			s.calls = append(s.calls, c.bind(o))
		case o.param < 0 && !o.floating():
			c.add(s, s.main, o, s.local)
		}
		for _, v := range o.out {
			c.level[v] = max(c.level[v], level)
		}
	}
	c.bindOutputs(main.outputs)
	c.finish()
	if c.err != nil {
		return nil, c.err
	}
	return c.program, nil
}

// live returns the operations of f that its outputs need, in their order.
func (c *compiler) live(f *function) []*op {
	needed := map[compute.Value]bool{}
	for _, v := range f.outputs {
		needed[v] = true
	}
	live := make([]*op, len(f.ops))
	n := len(live)
	for i := len(f.ops) - 1; i >= 0; i-- {
		o := f.ops[i]
		for _, v := range o.out {
			if needed[v] && c.recorded.made[v] == o {
				n--
				live[n] = o
				for _, v := range o.in {
					needed[v] = true
				}
				break
			}
		}
	}
	return live[n:]
}

// fail keeps the first error.
func (c *compiler) fail(err error) {
	if c.err == nil && err != nil {
		c.err = err
	}
}

func (c *compiler) shape(v compute.Value) shapes.Shape {
	shape, err := c.recorded.main.Shape(v)
	c.fail(err)
	return shape
}

// stage returns stage n.
func (c *compiler) stage(n int) *stage {
	for len(c.stages) <= n {
		b := c.b.Backend.Builder(fmt.Sprintf("%s, stage %d", c.recorded.Name(), len(c.stages)))
		c.stages = append(c.stages, &stage{builder: b, main: b.Main(), local: map[compute.Value]compute.Value{}, named: map[*function]compute.Function{}})
	}
	return c.stages[n]
}

// add replays o on f, a function of s. local has the values of f; those of functions around f are looked up there.
func (c *compiler) add(s *stage, f compute.Function, o *op, local map[compute.Value]compute.Value) {
	if c.err != nil {
		return
	}
	out, err := o.replay(f, func(v compute.Value) compute.Value {
		if l, ok := local[v]; ok {
			return l
		}
		return c.value(s, v)
	}, func(g compute.Function) compute.Function { return c.function(s, f, g, local) })
	c.fail(err)
	for i, v := range out {
		local[o.out[i]] = v
	}
}

// function returns g, which an operation of f takes: a named function once a stage, a closure new.
func (c *compiler) function(s *stage, f, g compute.Function, around map[compute.Value]compute.Value) compute.Function {
	r, ok := g.(*function)
	if !ok {
		return g
	}
	if d := s.named[r]; d != nil {
		return d
	}
	var d compute.Function
	var err error
	local := map[compute.Value]compute.Value{}
	if r.parent == nil {
		d, err = s.builder.NewFunction(r.Name())
		s.named[r] = d
	} else {
		d, err = f.Closure()
		for v, l := range around {
			local[v] = l
		}
	}
	if c.fail(err); err == nil {
		for _, o := range r.ops {
			c.add(s, d, o, local)
		}
	}
	return d
}

// value returns the value of s for v of the main function: its own, or a parameter.
func (c *compiler) value(s *stage, v compute.Value) compute.Value {
	if l, ok := s.local[v]; ok {
		return l
	}
	o := c.recorded.made[v]
	switch {
	case o == nil:
		c.fail(fmt.Errorf("gomlx: a value of another function or builder"))
		return v
	case o.floating():
		c.add(s, s.main, o, s.local)
		return s.local[v]
	case o.param < 0 && o.call == nil && s == c.stages[c.level[v]]:
		c.fail(fmt.Errorf("gomlx: %s is used before it is computed: %w", o.method, kernels.ErrInternal))
		return v
	}
	slot := c.slot(v)
	l, err := s.main.Parameter(fmt.Sprintf("slot%d", slot), c.shape(v), nil)
	c.fail(err)
	s.in, s.local[v] = append(s.in, slot), l
	return l
}

// slot returns the slot of v, which the stage that computes it exports.
func (c *compiler) slot(v compute.Value) int {
	slot, ok := c.slots[v]
	if !ok {
		if o := c.recorded.made[v]; o != nil && o.call != nil {
			slot = c.newSlot()
		} else {
			slot = c.export(v)
		}
		c.slots[v] = slot
	}
	return slot
}

func (c *compiler) newSlot() int {
	c.last = append(c.last, -1)
	return len(c.last) - 1
}

// export makes v a result of its stage, in a new slot.
func (c *compiler) export(v compute.Value) int {
	s, slot := c.stage(c.level[v]), c.newSlot()
	s.exports, s.out = append(s.exports, c.value(s, v)), append(s.out, slot)
	return slot
}

// bind returns the call of o with its slots.
func (c *compiler) bind(o *op) *call {
	bound := *o.call
	for i, v := range bound.values {
		if bound.slots[i] = -1; v != nil {
			bound.slots[i] = c.slot(v)
		}
	}
	bound.results = o.out
	return &bound
}

// bindOutputs gives each output a slot of its own, which the caller owns.
func (c *compiler) bindOutputs(values []compute.Value) {
	taken := map[int]bool{}
	for _, v := range values {
		c.shapes = append(c.shapes, c.shape(v))
		slot, ok := c.slots[v]
		switch {
		case !ok:
			slot = c.slot(v)
		case taken[slot] || slot < len(c.inputs): // a copy, unless nothing else needs it
			slot = c.export(v)
		}
		taken[slot] = true
		c.outputs = append(c.outputs, slot)
	}
}

// finish compiles the stages and finds the last use of each slot.
func (c *compiler) finish() {
	for n, s := range c.stages {
		if len(s.exports) > 0 && c.err == nil {
			c.fail(s.main.Return(s.exports, nil))
			if c.err == nil {
				var err error
				s.exec, err = s.builder.Compile()
				c.fail(err)
			}
			for _, slot := range s.in {
				c.last[slot] = 2 * n
			}
		}
		for _, call := range s.calls {
			call.out = make([]int, len(call.results))
			for i, v := range call.results {
				if slot, ok := c.slots[v]; ok {
					call.out[i] = slot
				} else {
					call.out[i] = -1
				}
			}
			for _, slot := range call.slots {
				if slot >= 0 {
					c.last[slot] = 2*n + 1
				}
			}
		}
		s.builder, s.main, s.local, s.named, s.exports = nil, nil, nil, nil, nil
	}
	for _, slot := range c.outputs {
		c.last[slot] = kept
	}
}
