package backend

import (
	"context"
	"time"
)

// Trace is told what goes on inside the calls that are made with its context,
// as in net/http/httptrace. Functions that are nil are not called; those that
// are set must be safe for concurrent use and return soon, as the call waits.
type Trace struct {
	// Progress tells how many operations of a call are done, of how many in all
	// (both in the units of Plan.FLOPs), at the end of each piece that the
	// backend waits for. A call of one piece reports once, at its end.
	Progress func(done, total float64)
	// Kernel tells how long the device computed, by its own clock, for each
	// piece. Devices without timestamps never call it.
	Kernel func(took time.Duration)
	// Compile tells how long a kernel took to compile, when a call had to.
	Compile func(kernel string, took time.Duration)
	// Move tells how long a transfer of operands between host and device took.
	Move func(bytes int64, took time.Duration)
}

type traceKey struct{}

// WithTrace returns a context whose calls tell t.
func WithTrace(ctx context.Context, t *Trace) context.Context {
	return context.WithValue(ctx, traceKey{}, t)
}

// TraceOf returns the context's Trace, or one without functions, never nil.
func TraceOf(ctx context.Context) *Trace {
	if t, ok := ctx.Value(traceKey{}).(*Trace); ok && t != nil {
		return t
	}
	return &noTrace
}

var noTrace Trace
