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

// run computes tasks tasks of j on up to threads goroutines, which take them in
// descending order: under a causal mask the last blocks are the longest, and the
// short ones are what evens the ends out. Which goroutine computes a task, and
// how many there are, changes nothing in the result.
//
// The caller is one of the goroutines and begins at once, so that a short call
// does not wait for the others to wake up; run itself allocates nothing.
func run(ctx context.Context, j job, tasks, threads int) error {
	c := crewPool.Get().(*crew)
	c.ctx, c.job, c.err = ctx, j, nil
	c.next.Store(int64(tasks))
	if helpers := min(threads, tasks) - 1; helpers > 0 {
		c.wg.Add(helpers)
		for range helpers {
			go c.helper()
		}
		// The goroutine started last is the one that this thread would run next,
		// and others steal that one only after a sleep (10 microseconds and more,
		// as measured): let it be one that does nothing.
		go nothing()
	}
	c.work()
	c.wg.Wait()
	err := c.err
	c.ctx, c.job = nil, nil
	crewPool.Put(c)
	return err
}

func nothing() {}

// crew is the goroutines that compute one job.
type crew struct {
	ctx    context.Context
	job    job
	next   atomic.Int64 // tasks not taken yet
	wg     sync.WaitGroup
	helper func() // work, then done; made once, as starting a method would allocate

	mu  sync.Mutex
	err error // the first one
}

var crewPool = sync.Pool{New: func() any {
	c := new(crew)
	c.helper = func() {
		defer c.wg.Done()
		c.work()
	}
	return c
}}

// work computes tasks until none is left or one returns an error.
func (c *crew) work() {
	w := getScratch(c.job.size())
	defer putScratch(w)
	for t := int(c.next.Add(-1)); t >= 0; t = int(c.next.Add(-1)) {
		err := c.ctx.Err()
		if err == nil {
			w.used = 0
			err = c.job.task(c.ctx, w, t)
		}
		if err != nil {
			c.mu.Lock()
			if c.err == nil {
				c.err = err
			}
			c.mu.Unlock()
			return
		}
	}
}
