package backend

import (
	"context"
	"time"
)

// Plan is how a backend runs a call. The code that runs the call computes it.
type Plan struct {
	Backend string `json:"backend"` // the Info.Name of the device
	Path    string `json:"path"`    // name of the code path: "fused gonum kernels", "fused WGSL"
	Why     string `json:"why"`     // reason for this path and these chunks, in words
	// Pairs is the number of (query, key) pairs of all batches and query heads that the
	// visibility rule shows, including those that a Mask or Bias hides.
	Pairs   int64 `json:"pairs"`
	FLOPs   int64 `json:"flops"`   // 2·(D+Dv) operations for each visible pair
	Bytes   int64 `json:"bytes"`   // the least to move: each element of every operand and output once
	Scratch int64 `json:"scratch"` // bytes of device memory in addition to the operands
	// Streamed is the number of bytes that the call moves between host and device memory
	// in both directions: 0 when all operands are in device memory.
	Streamed int64 `json:"streamed,omitempty"`
	// Matrices is how many products of matrix units stand for one product of the operands; 0
	// where other units multiply.
	Matrices int     `json:"matrices,omitempty"`
	Chunks   int     `json:"chunks"`           // pieces of the work: tasks of goroutines, or dispatches
	Cut      string  `json:"cut"`              // the pieces in words: "2 heads x 32 query blocks of 64, key blocks of 256"
	Limits   []Limit `json:"limits,omitempty"` // of the device, that shaped the cut
}

// Limit is a named limit of a device or of a plan.
type Limit struct {
	Name  string `json:"name"`
	Value int64  `json:"value"`
}

// NewPlan returns a Plan with the fields that depend on the call alone: Pairs, FLOPs and
// Bytes. Backends add the rest.
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

// Trace is a set of functions that calls with its context run at certain events, as in
// net/http/httptrace. Any of them may be nil. They must be safe for concurrent use and
// return soon, because the call waits for them.
type Trace struct {
	// Progress receives the operations that a call has done and its total, in the units
	// of Plan.FLOPs, after each piece that the backend waits for. A call of one piece
	// reports once, at its end.
	Progress func(done, total float64)
	// Kernel receives the time that the device computed each piece, by its own clock.
	// Devices without timestamps never call it.
	Kernel func(took time.Duration)
	// Compile receives the compile time of a kernel that a call had to compile.
	Compile func(kernel string, took time.Duration)
	// Move receives the size and time of a transfer of operands between host and device.
	Move func(bytes int64, took time.Duration)
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
