package backend

import (
	"context"
	"time"
)

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
