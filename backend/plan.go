package backend

import (
	"context"
	"fmt"
	"time"
)

// Plan is how a backend runs a call, with the fields of kernels.Plan. The code that runs the call computes it.
type Plan struct {
	Backend, Path, Why           string
	Pairs, FLOPs, Bytes, Scratch int64
	Streamed                     int64
	Matrices, Chunks             int
	Cut                          string
	Limits                       []Limit
}

// Limit is a named limit of a device or of a plan.
type Limit struct {
	Name  string `json:"name"`
	Value int64  `json:"value"`
}

// NewPlan returns a Plan with the fields that depend on the call alone: Pairs, FLOPs and Bytes. Backends add the rest.
func NewPlan(c *Call) Plan {
	d := c.Dims()
	pairs := c.Visible.Pairs(d.Batch, d.SeqQ, d.SeqK) * int64(d.Heads)
	if !c.Lists.IsZero() { // as if all keys of the lists were seen
		pairs = int64(d.Batch) * int64(d.Heads) * int64(d.SeqK)
	}
	p := Plan{Pairs: pairs, FLOPs: pairs * 2 * int64(d.Dim+d.ValueDim)}
	outputs, inputs := c.Operands()
	keys := inputs[1:3] // and values
	switch {
	case c.Listed != nil || !c.Lists.IsZero():
		p.Bytes = c.listedBytes()
		clear(keys)
	case c.Pages != nil:
		p.Bytes = c.Pages.bytes(c)
		clear(keys)
	}
	p.Bytes += bytesOf(outputs[:]) + bytesOf(inputs[:])
	return p
}

// PlanEach returns the plan of parts that run together, by the plan of each.
func PlanEach[T any](parts []T, plan func(part T) (Plan, error)) (sum Plan, err error) {
	var largest int64
	for i, part := range parts {
		p, err := plan(part)
		if err != nil {
			return p, err
		}
		counts := sum
		if i == 0 || p.Pairs >= largest {
			largest, sum = p.Pairs, p
			sum.Add(counts)
		} else {
			sum.Add(p)
		}
		sum.Bytes = counts.Bytes + p.Bytes
	}
	if n := len(parts); n > 1 {
		sum.Why = fmt.Sprintf("%d calls over slices of the operands, run together; the counts are their sums; the largest: %s", n, sum.Why)
		sum.Cut = fmt.Sprintf("%d calls; the largest: %s", n, sum.Cut)
	}
	return sum, nil
}

// Add adds the counts of a plan to p, except for Bytes.
func (p *Plan) Add(other Plan) {
	p.Pairs, p.FLOPs = p.Pairs+other.Pairs, p.FLOPs+other.FLOPs
	p.Scratch = max(p.Scratch, other.Scratch) // calls share it
	p.Streamed, p.Chunks = p.Streamed+other.Streamed, p.Chunks+other.Chunks
}

// listedBytes returns the bytes of the keys and values of all lists.
func (c *Call) listedBytes() int64 {
	n, k, v := c.Lists.Shape().Elements(), c.K.Shape(), c.V.Shape()
	for _, list := range c.Listed {
		n += len(list)
	}
	return c.K.dtype.Bytes(Shape{1, k[Heads], n, k[Dim]}) + c.V.dtype.Bytes(Shape{1, v[Heads], n, v[Dim]})
}

// bytesOf returns the bytes of the operands that are set.
func bytesOf(operands []Operand) (n int64) {
	for _, o := range operands {
		if !o.Tensor.IsZero() {
			n += o.Tensor.Bytes()
		}
	}
	return n
}

// Trace is a set of functions that calls with its context run at certain events, those of kernels.Trace.
// Any of them may be nil.
type Trace struct {
	Progress func(done, total float64)
	Kernel   func(took time.Duration)
	Compile  func(kernel string, took time.Duration)
	Move     func(bytes int64, took time.Duration)
}

type traceKey struct{}

// WithTrace returns a context whose calls run the functions of t.
func WithTrace(ctx context.Context, t *Trace) context.Context {
	return context.WithValue(ctx, traceKey{}, t)
}

// TraceOf returns the Trace of ctx, or one without functions; never nil.
func TraceOf(ctx context.Context) *Trace {
	if t, ok := ctx.Value(traceKey{}).(*Trace); ok && t != nil {
		return t
	}
	return &noTrace
}

var noTrace Trace
