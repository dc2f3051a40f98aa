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

// workers are the goroutines of a backend that help its calls to compute. They are
// started when a call first has work for them, outlive it, and end with close.
//
// A core that sleeps takes some 60 microseconds to come back to work, as long as a
// short call takes in all. So who has nothing left to do looks on for about as long
// before it sleeps: that costs at most twice what the better choice would have
// (Karlin et al. 1990, Competitive Randomized Algorithms for Non-Uniform Problems).
type workers struct {
	// places counts those in all of crews, for who looks without the lock; closing
	// adds one that nobody takes.
	places atomic.Int32

	mu      sync.Mutex
	work    sync.Cond // places or closed changed
	decoy   sync.Cond // see stand
	crews   []*crew   // with places left, oldest first
	spare   []*crew   // for calls to come
	started int
	asleep  int
	closed  bool
	ended   sync.WaitGroup
}

// lookouts is how often one looks for work before it sleeps: 30 to 60 microseconds.
const lookouts = 1 << 16

func newWorkers() *workers {
	ws := new(workers)
	ws.work.L, ws.decoy.L = &ws.mu, &ws.mu
	return ws
}

// crew is a job and those who compute it.
type crew struct {
	ctx    context.Context
	job    job
	places int          // helpers that may still join, guarded by workers.mu
	looks  int          // how often its people look on for something before they sleep
	next   atomic.Int64 // tasks not taken yet

	// Helpers that joined and have not left: busy for looking, inside for sleeping.
	busy   atomic.Int32
	inside sync.WaitGroup

	mu  sync.Mutex
	err error // the first one
}

// run computes tasks tasks of j on the caller's goroutine and up to threads-1
// workers, which take them in descending order: under a causal mask the last blocks
// are the longest, and the short ones are what evens the ends out. Which goroutine
// computes a task, and how many there are, changes nothing in the result.
//
// The caller begins at once, so that a short call does not wait for others to wake
// up; who comes late joins what is left. run allocates nothing once warm.
func (ws *workers) run(ctx context.Context, j job, tasks, threads int) error {
	c := ws.offer(ctx, j, tasks, max(min(threads, tasks)-1, 0))
	c.compute()
	return ws.finish(c)
}

// offer makes a crew with places for helpers and sees that they come.
func (ws *workers) offer(ctx context.Context, j job, tasks, helpers int) *crew {
	ws.mu.Lock()
	var c *crew
	if n := len(ws.spare); n > 0 {
		c, ws.spare = ws.spare[n-1], ws.spare[:n-1]
	} else {
		c = new(crew)
	}
	c.ctx, c.job, c.err, c.places, c.looks = ctx, j, nil, helpers, 0
	c.next.Store(int64(tasks))
	if helpers > 0 {
		if helpers < runtime.GOMAXPROCS(0) { // else who looks on keeps others from working
			c.looks = lookouts
		}
		ws.crews = append(ws.crews, c)
		ws.places.Add(int32(helpers))
		if ws.started == 0 {
			ws.ended.Go(ws.stand)
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
	}
	ws.mu.Unlock()
	return c
}

// finish takes c's places back, waits for who is inside, and returns the first
// error.
func (ws *workers) finish(c *crew) error {
	ws.mu.Lock()
	if c.places > 0 {
		ws.places.Add(-int32(c.places))
		ws.drop(c)
	}
	ws.mu.Unlock()
	for n := 0; n < c.looks && c.busy.Load() > 0; n++ {
	}
	c.inside.Wait()
	err := c.err
	c.ctx, c.job = nil, nil
	ws.mu.Lock()
	ws.spare = append(ws.spare, c)
	ws.mu.Unlock()
	return err
}

// help computes what calls offer until the workers are closed.
func (ws *workers) help() {
	looks := 0
	for c := ws.join(looks); c != nil; c = ws.join(looks) {
		c.compute()
		looks = c.looks
		c.busy.Add(-1)
		c.inside.Done()
	}
}

// stand does nothing, again and again. The goroutine that is woken last is the one
// that the caller's thread would run next, and others steal that one only after a
// sleep, of a seventh of a call of S=256: let it be one that has nothing to do.
func (ws *workers) stand() {
	ws.mu.Lock()
	for !ws.closed {
		ws.decoy.Wait()
	}
	ws.mu.Unlock()
}

// join takes a place in the oldest crew, or returns nil when there will be none.
// It looks so often before it sleeps.
func (ws *workers) join(looks int) *crew {
	for n := 0; n < looks && ws.places.Load() == 0; n++ {
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

// drop takes c off the list; the caller holds the lock.
func (ws *workers) drop(c *crew) {
	i := slices.Index(ws.crews, c)
	ws.crews = slices.Delete(ws.crews, i, i+1)
}

// close lets the workers end, once there is no call. A second close does nothing.
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

// compute computes tasks until none is left or one returns an error.
func (c *crew) compute() {
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

// scratch is the memory that one goroutine works in; it is taken from a pool
// once a goroutine and call, never once a tile.
type scratch struct {
	arena []float32
	used  int
	spans []span

	// The engine's state, which is too large to be allocated for each call.
	workspace workspace
	tiles     [maxTiles]tile
}

var scratchPool = sync.Pool{New: func() any { return new(scratch) }}

// getScratch returns a scratch whose floats method will be good for n floats in
// at most 48 pieces, with a span and a sum for each of rows query rows. putScratch takes it back.
func getScratch(n, rows int) *scratch {
	w := scratchPool.Get().(*scratch)
	n += alignSlack
	if cap(w.arena) < n {
		w.arena = make([]float32, n)
	}
	w.arena = w.arena[:n]
	if cap(w.spans) < rows {
		w.spans = make([]span, rows)
	}
	w.spans = w.spans[:rows]
	w.used = 0
	return w
}

// alignSlack is how many floats aligning 48 pieces may take.
const alignSlack = 48 * 16

// scratchKeep is how many floats a pooled scratch may hold: 4 MiB, several times
// what head sizes up to 256 take. A larger one is left to the collector.
const scratchKeep = 1 << 20

func putScratch(w *scratch) {
	if cap(w.arena) <= scratchKeep {
		scratchPool.Put(w)
	}
}

// floats cuts n floats with unspecified contents off the arena, on a 64 byte
// boundary. n = 0 gives an empty slice.
func (w *scratch) floats(n int) []float32 {
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(w.arena)))/4) % 16
	at := (w.used+off+15)&^15 - off
	w.used = at + n
	return w.arena[at : at+n : at+n]
}
