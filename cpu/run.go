package cpu

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
)

// gate lets calls in until it is closed, and lets Close wait for those inside.
type gate struct {
	mu      sync.Mutex
	running int
	closed  bool
	idle    chan struct{} // made by the first close, closed when nobody is inside
}

// enter begins a call, or returns ErrClosed or the context's error.
func (g *gate) enter(ctx context.Context, what string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("cpu: %s: %w", what, err)
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

// run computes tasks tasks of j on up to threads goroutines, which take them in
// descending order: under a causal mask the last blocks are the longest, and the
// short ones are what evens the ends out. Which goroutine computes a task, and
// how many there are, changes nothing in the result.
func run(ctx context.Context, j job, tasks, threads int) error {
	threads = min(threads, tasks)
	if threads <= 1 {
		return runTasks(ctx, j, func() int { tasks--; return tasks })
	}
	var (
		next   atomic.Int64
		wg     sync.WaitGroup
		first  error
		failed sync.Once
	)
	next.Store(int64(tasks))
	take := func() int { return int(next.Add(-1)) }
	for range threads {
		wg.Go(func() {
			if err := runTasks(ctx, j, take); err != nil {
				failed.Do(func() { first = err })
			}
		})
	}
	wg.Wait()
	return first
}

// runTasks computes the tasks that take hands out until it returns a negative
// number.
func runTasks(ctx context.Context, j job, take func() int) error {
	w := getScratch(j.size())
	defer putScratch(w)
	for t := take(); t >= 0; t = take() {
		if err := ctx.Err(); err != nil {
			return err
		}
		w.used = 0
		if err := j.task(ctx, w, t); err != nil {
			return err
		}
	}
	return nil
}
