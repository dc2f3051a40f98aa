package cpu

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/seed90331342/attn/backend"
)

// gate lets calls in until it is closed, and lets Close wait for those inside.
type gate struct {
	mu      sync.Mutex
	running int
	closed  bool
	idle    chan struct{} // made by the first close, closed when nobody is inside
	err     error         // why the backend is good for nothing
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

// leave ends what enter began.
func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	if g.closed && g.running == 0 {
		close(g.idle)
	}
}

// close refuses further calls and waits for those inside. It may be called more
// than once, and every call waits.
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

// threads returns how many goroutines compute a call that starts now.
func (be *Backend) threads() int {
	if be.opt.Threads > 0 {
		return be.opt.Threads
	}
	return runtime.GOMAXPROCS(0)
}

// job is work cut into tasks that do not touch each other's outputs.
type job interface {
	// size returns how many floats and rows of scratch one goroutine needs.
	size() (floats, rows int)
	// task computes task t in w. It returns the context's error when it stops
	// early, and no other.
	task(ctx context.Context, w *scratch, t int) error
}
