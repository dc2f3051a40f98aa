package cpu

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/seed90331342/attn/backend"
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
	if err := f(); err != nil {
		return fmt.Errorf("cpu: %s: %w", what, err)
	}
	return nil
}

// threads returns the maximum number of goroutines for a call that starts now.
func (be *Backend) threads() int {
	if be.opt.Threads > 0 {
		return be.opt.Threads
	}
	return runtime.GOMAXPROCS(0)
}

// job is work that is cut into tasks with disjoint outputs.
type job interface {
	// size returns the floats and the rows of scratch that one goroutine needs.
	size() (floats, rows int)
	// task computes task t in w. Its only error is that of the context, when it
	// stops early.
	task(ctx context.Context, w *scratch, t int) error
}

// workers are the goroutines of a backend that help its calls to compute. They
// start when a call first has work for them, outlive it, and end with close.
//
// A sleeping core takes some 60 microseconds to wake up, as long as a whole short
// call. Idle workers therefore spin about that long before they sleep, which costs
// at most twice as much as the better choice (Karlin et al. 1990, Competitive
// Randomized Algorithms for Non-Uniform Problems).
type workers struct {
	// places is the sum of the places of all crews, for workers that spin without
	// the lock; close adds one that no worker takes.
	places atomic.Int32

	mu      sync.Mutex
	work    sync.Cond // places or closed changed
	decoy   sync.Cond // see idleDecoy
	crews   []*crew   // with places left, oldest first
	spare   []*crew   // for later calls
	started int
	asleep  int
	closed  bool
	ended   sync.WaitGroup
}

// maxSpins is how often a worker looks for work before it sleeps: 30 to 60
// microseconds.
const maxSpins = 1 << 16

func newWorkers() *workers {
	ws := new(workers)
	ws.work.L, ws.decoy.L = &ws.mu, &ws.mu
	return ws
}

// crew is a job and the goroutines that compute it.
type crew struct {
	ctx    context.Context
	job    job
	places int          // helpers that may still join, guarded by workers.mu
	spins  int          // how often its goroutines look for work before they sleep
	next   atomic.Int64 // tasks not taken yet

	// Workers that joined and have not left: busy to spin on, inside to sleep on.
	busy   atomic.Int32
	inside sync.WaitGroup

	mu  sync.Mutex
	err error // the first one
}

// run computes tasks tasks of j on the caller's goroutine and up to threads-1
// workers. They take tasks in descending order: under a causal mask the last tasks
// are the longest, and the short ones at the end balance the load. The result does
// not depend on which goroutine computes a task, nor on the number of goroutines.
//
// The caller begins at once, so a short call does not wait for sleeping workers;
// those that wake up late take the remaining tasks. After the first call, run does
// not allocate.
func (ws *workers) run(ctx context.Context, j job, tasks, threads int) error {
	helpers := min(threads, tasks) - 1
	if helpers <= 0 {
		var next atomic.Int64
		next.Store(int64(tasks))
		return compute(ctx, j, &next)
	}
	c := ws.offer(ctx, j, tasks, helpers)
	c.compute()
	return ws.finish(c)
}

// offer makes a crew with places for helpers and wakes or starts workers.
func (ws *workers) offer(ctx context.Context, j job, tasks, helpers int) *crew {
	ws.mu.Lock()
	var c *crew
	if n := len(ws.spare); n > 0 {
		c, ws.spare = ws.spare[n-1], ws.spare[:n-1]
	} else {
		c = new(crew)
	}
	c.ctx, c.job, c.err, c.places, c.spins = ctx, j, nil, helpers, 0
	c.next.Store(int64(tasks))
	if helpers < runtime.GOMAXPROCS(0) { // otherwise spinning takes a core from another goroutine
		c.spins = maxSpins
	}
	ws.crews = append(ws.crews, c)
	ws.places.Add(int32(helpers))
	if ws.started == 0 {
		ws.ended.Go(ws.idleDecoy)
	}
	for ; ws.started < helpers; ws.started++ {
		ws.ended.Go(ws.help)
	}
	if wake := min(helpers, ws.asleep); wake > 0 {
		for range wake {
			ws.work.Signal()
		}
		ws.decoy.Signal()
	}
	ws.mu.Unlock()
	return c
}

// finish withdraws c's open places, waits for its workers, and returns the first
// error.
func (ws *workers) finish(c *crew) error {
	ws.mu.Lock()
	if c.places > 0 {
		ws.places.Add(-int32(c.places))
		ws.drop(c)
	}
	ws.mu.Unlock()
	for n := 0; n < c.spins && c.busy.Load() > 0; n++ {
	}
	c.inside.Wait()
	err := c.err
	c.ctx, c.job = nil, nil
	ws.mu.Lock()
	ws.spare = append(ws.spare, c)
	ws.mu.Unlock()
	return err
}

// help is a worker: it computes the tasks of crews until the workers are closed.
func (ws *workers) help() {
	spins := 0
	for c := ws.join(spins); c != nil; c = ws.join(spins) {
		c.compute()
		spins = c.spins
		c.busy.Add(-1)
		c.inside.Done()
	}
}

// idleDecoy is a goroutine that does nothing. The Go scheduler puts the goroutine
// that was woken last into the slot that the caller's thread runs next, and other
// threads steal from that slot only after a sleep, a seventh of a call of S=256.
// Waking the decoy last keeps a worker out of that slot.
func (ws *workers) idleDecoy() {
	ws.mu.Lock()
	for !ws.closed {
		ws.decoy.Wait()
	}
	ws.mu.Unlock()
}

// join takes a place in the oldest crew. It looks that often before it sleeps, and
// returns nil once the workers are closed.
func (ws *workers) join(spins int) *crew {
	for n := 0; n < spins && ws.places.Load() == 0; n++ {
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for len(ws.crews) == 0 {
		if ws.closed {
			return nil
		}
		ws.asleep++
		ws.work.Wait()
		ws.asleep--
	}
	c := ws.crews[0]
	c.busy.Add(1)
	c.inside.Add(1)
	c.places--
	ws.places.Add(-1)
	if c.places == 0 {
		ws.drop(c)
	}
	return c
}

// drop removes c from the list; the caller holds the lock.
func (ws *workers) drop(c *crew) {
	i := slices.Index(ws.crews, c)
	ws.crews = slices.Delete(ws.crews, i, i+1)
}

// close ends the workers, once there is no call. A second close does nothing.
func (ws *workers) close() {
	ws.mu.Lock()
	if !ws.closed {
		ws.closed = true
		ws.places.Add(1)
		ws.work.Broadcast()
		ws.decoy.Broadcast()
	}
	ws.mu.Unlock()
}

// compute computes tasks and keeps the first error.
func (c *crew) compute() {
	err := compute(c.ctx, c.job, &c.next)
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
}

// compute takes tasks of j until none of next is left or one returns an error.
func compute(ctx context.Context, j job, next *atomic.Int64) error {
	w, err := getScratch(j.size())
	if err != nil {
		return err
	}
	defer putScratch(w)
	for t := int(next.Add(-1)); t >= 0; t = int(next.Add(-1)) {
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

// scratch is the memory that one goroutine works in. Each goroutine of a call takes
// one from a pool.
type scratch struct {
	arena []float32
	used  int
	spans []span

	// The engine's state, which is too large to be allocated for each call.
	workspace workspace
	gradients gradientSpace
	tiles     [maxTiles]tile
}

var scratchPool = sync.Pool{New: func() any { return new(scratch) }}

// getScratch returns a scratch from which floats can cut n floats in at most 48
// pieces, with a span for each of rows query rows, or ErrMemory. putScratch returns it to
// the pool.
func getScratch(n, rows int) (w *scratch, err error) {
	w = scratchPool.Get().(*scratch)
	if w.arena, err = resized(w.arena, n+alignSlack); err == nil {
		w.spans, err = resized(w.spans, rows)
	}
	w.used = 0
	if err != nil {
		putScratch(w)
		return nil, fmt.Errorf("scratch of a thread: %w", err)
	}
	return w, nil
}

// alignSlack is the most floats that the alignment of 48 pieces takes.
const alignSlack = 48 * 16

// scratchKeep is the most floats that a pooled scratch holds: 4 MiB, several times
// the need of head sizes up to 256. A larger one is left to the garbage collector.
const scratchKeep = 1 << 20

func putScratch(w *scratch) {
	if cap(w.arena) <= scratchKeep {
		scratchPool.Put(w)
	}
}

// floats cuts n floats with unspecified contents from the arena, on a 64 byte
// boundary. For n = 0 the slice is empty.
func (w *scratch) floats(n int) []float32 {
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(w.arena)))/4) % 16
	at := (w.used+off+15)&^15 - off
	w.used = at + n
	return w.arena[at : at+n : at+n]
}
