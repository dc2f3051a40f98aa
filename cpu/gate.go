package cpu

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
)

// gate lets calls in until it is closed, and lets Close wait for those inside.
type gate struct {
	mu      sync.Mutex
	running int
	closed  bool
	idle    chan struct{} // made by the first close, closed when no call is inside
	err     error         // why the backend cannot be used
}

// enter begins a call, or returns ErrClosed or the context's error.
func (g *gate) enter(ctx context.Context, what string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("cpu: %s: %w", what, err)
	}
	if g.err != nil {
		return g.err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return fmt.Errorf("cpu: %s: %w", what, backend.ErrClosed)
	}
	g.running++
	return nil
}

// leave ends the call that enter began.
func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	if g.closed && g.running == 0 {
		close(g.idle)
	}
}

// close refuses further calls and waits for those inside. It may be called more
// than once; each of its calls waits.
func (g *gate) close() {
	g.mu.Lock()
	if !g.closed {
		g.closed = true
		g.idle = make(chan struct{})
		if g.running == 0 {
			close(g.idle)
		}
	}
	g.mu.Unlock()
	<-g.idle
}

// do runs f, a call named what, unless the backend is closed. It adds the name to
// f's error.
func (be *Backend) do(ctx context.Context, what string, f func() error) error {
	if err := be.gate.enter(ctx, what); err != nil {
		return err
	}
	defer be.gate.leave()
	err := func() (err error) {
		defer pool.Recover(&err)
		return f()
	}()
	if err != nil {
		return fmt.Errorf("cpu: %s: %w", what, err)
	}
	return nil
}

// doPinned is do for a call with operands, which it pins.
func (be *Backend) doPinned(ctx context.Context, what string, out, in []backend.Operand, f func() error) error {
	return be.do(ctx, what, func() error {
		var pinned backend.Pinned
		if err := pinned.Pin(nil, where, out, in); err != nil {
			return err
		}
		defer pinned.Unpin()
		return f()
	})
}

// threads returns the maximum number of goroutines for a call that starts now.
func (be *Backend) threads() int {
	if be.opt.Threads > 0 {
		return be.opt.Threads
	}
	return runtime.GOMAXPROCS(0)
}

// workers computes the calls of all backends of the process.
var workers = pool.New()
