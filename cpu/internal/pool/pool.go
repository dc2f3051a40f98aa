// Package pool computes the calls of a process on at most GOMAXPROCS goroutines at a time.
//
// A call is a [Job], divided into tasks with disjoint outputs. The goroutine of its caller
// computes tasks, and workers help, each with a [Turn] and a [Scratch]:
//
//	caller ──► Run ──► Task, Task, ... Pause ...
//	workers ─────────► Task, Task, ... Pause ...
//
// A goroutine computes only while it holds one of GOMAXPROCS cores. Callers that find no free core wait in a queue,
// first come, first served, and leave it at once when their context ends. A goroutine that has held its core for 5
// milliseconds passes it to the first in the queue in one of its next pauses, and queues again; a worker leaves its
// call after each task. Without a queue a goroutine yields to others of the program. A deadline is therefore noticed
// soon, however many calls run.
//
// A panic in a job ends its call alone, with an error that contains the stack. So does runtime.Goexit, which a function
// of the program may call. On a worker it becomes the error of the call, and another worker starts. On the caller's
// goroutine, which ends, it stops the workers of the call.
package pool

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
)

// Job is a call that is divided into tasks.
type Job interface {
	// Task computes task n in w, whose floats are all available. Several goroutines call it
	// at once, each with a Turn and a Scratch of its own. It calls t.Pause between steps of
	// at most about a millisecond, and returns the error of Pause.
	Task(t *Turn, w *Scratch, n int) error
}

// timeSlice is how long a goroutine holds a core while others wait for it.
const timeSlice = 5 * time.Millisecond

// maxSpins is how often a worker looks for work before it sleeps: 30 to 60 microseconds.
const maxSpins = 1 << 16

// Pool is the cores, the queue for them, and the workers. Workers start when a call first
// has tasks for them, outlive it, and end when the last user of the pool closes it.
//
// A sleeping core takes some 60 microseconds to wake up, as long as a whole short call. Idle workers therefore spin
// about that long before they sleep, which costs at most twice as much as the better choice (Karlin et al. 1990,
// Competitive Randomized Algorithms for Non-Uniform Problems).
type Pool struct {
	slice time.Duration

	cores, held atomic.Int32 // that exist, that goroutines hold

	mu      sync.Mutex
	queue   list[*Turn]
	places  list[*crew] // a place for a worker in each, oldest first
	work    sync.Cond   // a worker may find work, or users is 0
	ended   sync.Cond   // a worker has ended, or there is a user again
	users   int
	started int // workers
	asleep  int // of them
}

// list is a list that is guarded by Pool.mu. Its length is read without the lock.
type list[T any] struct {
	of []T
	n  atomic.Int32
}

// set sets the elements of l.
func (l *list[T]) set(of []T) {
	l.of = of
	l.n.Store(int32(len(of)))
}

// New returns a pool without users.
func New() *Pool {
	p := &Pool{slice: timeSlice}
	p.work.L, p.ended.L = &p.mu, &p.mu
	return p
}

// Open adds a user to the pool.
func (p *Pool) Open() {
	p.mu.Lock()
	p.users++
	p.ended.Broadcast() // the new user keeps the workers that Close waits for
	p.mu.Unlock()
}

// Close removes a user, which has no calls. With the last one the workers end, and Close
// waits for them, or for another user.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users--
	p.work.Broadcast()
	for p.users == 0 && p.started > 0 {
		p.ended.Wait()
	}
}

// crew is a job and the goroutines that compute it.
type crew struct {
	pool    *Pool
	ctx     context.Context
	job     Job
	floats  int // of scratch
	caller  Turn
	helpers int          // workers that may join
	next    atomic.Int64 // tasks not taken yet; at most 0 after a failure

	// Workers that joined and have not left: busy to spin on, inside to sleep on.
	busy   atomic.Int32
	inside sync.WaitGroup

	failed atomic.Bool
	err    error // the first one, which the goroutine that sets failed writes
}

// Run computes tasks tasks of j on the caller's goroutine and up to threads-1 workers. Each needs scratch of floats,
// in at most 48 slices. They take tasks in descending order: under a causal mask the last tasks are the longest, and
// the short ones at the end balance the load. The result does not depend on which goroutine computes a task, nor on
// the number of goroutines.
//
// A caller that finds a free core begins at once, so a short call does not wait for sleeping workers; those that wake
// up late take the remaining tasks. After the first calls, Run does not allocate.
//
// It returns the first error of Task, the context's error, ErrInternal for a panic, or ErrCallback.
func (p *Pool) Run(ctx context.Context, j Job, floats, tasks, threads int) (err error) {
	c := spare.Get().(*crew)
	c.pool, c.ctx, c.job, c.floats, c.err = p, ctx, j, floats, nil
	cores := runtime.GOMAXPROCS(0) // the runtime may change it at any time
	if p.cores.Load() != int32(cores) {
		p.cores.Store(int32(cores))
	}
	c.helpers = min(threads, tasks, cores) - 1
	c.failed.Store(false)
	c.next.Store(int64(tasks))
	defer func() { err = c.end() }() // after runtime.Goexit too: workers use the operands
	c.compute(&c.caller)
	return nil
}

// compute computes tasks of c with a core. It keeps the first error, after which no goroutine begins a task.
func (c *crew) compute(t *Turn) {
	err := errGoexit
	defer func() {
		if err != nil {
			if c.failed.CompareAndSwap(false, true) {
				c.err = err
			}
			c.next.Store(0)
		}
	}()
	err = c.work(t)
}

// errGoexit is the error of a call whose goroutine has neither returned nor panicked.
var errGoexit = fmt.Errorf("a score mod or another function of the program called runtime.Goexit: %w", backend.ErrCallback)

// work computes the tasks that no other goroutine takes.
func (c *crew) work(t *Turn) (err error) {
	defer backend.Recover(&err)
	if !t.worker {
		if err = c.ctx.Err(); err == nil && (c.pool.queue.n.Load() > 0 || !c.pool.acquire(t)) {
			err = c.pool.wait(t)
		}
		if err != nil {
			return err
		}
		if c.helpers > 0 {
			c.pool.invite(c)
		}
	}
	w := scratches.Get().(*Scratch)
	for err = w.Grow(c.floats); err == nil && !(t.worker && c.pool.queue.n.Load() > 0); { // a worker leaves when callers wait for a core
		n := int(c.next.Add(-1))
		if n < 0 {
			break
		}
		if err = t.Pause(); err == nil {
			w.used = 0
			err = c.job.Task(t, w, n)
		}
	}
	if cap(w.arena) <= keptFloats { // not after a panic: it may be in use
		scratches.Put(w)
	}
	return err
}

// end waits for the workers of c, and returns the first error.
func (c *crew) end() error {
	p := c.pool
	if c.helpers > 0 {
		p.mu.Lock()
		p.places.set(slices.DeleteFunc(p.places.of, func(other *crew) bool { return other == c }))
		p.mu.Unlock()
		// The workers may end soon.
		for n := 0; n < maxSpins && c.busy.Load() > 0 && c.caller.holds && p.queue.n.Load() == 0; n++ {
		}
	}
	p.release(&c.caller)
	c.inside.Wait()
	err := c.err
	c.pool, c.ctx, c.job, c.err = nil, nil, nil, nil
	spare.Put(c)
	return err
}

// spare holds crews for later calls.
var spare = sync.Pool{New: func() any {
	c := new(crew)
	c.caller = Turn{crew: c, ready: make(chan struct{}, 1)}
	return c
}}

// invite offers places to helpers, and wakes or starts workers.
func (p *Pool) invite(c *crew) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range c.helpers {
		p.places.set(append(p.places.of, c))
	}
	for ; p.started < c.helpers; p.started++ {
		go p.help()
	}
	p.wake()
	if p.asleep > 0 {
		// The Go scheduler puts the goroutine that became ready last into the slot that the
		// caller's thread runs next, and other threads steal from that slot only after a
		// sleep, a seventh of a call of S=256. An empty goroutine keeps a worker out of it.
		go func() {}()
	}
}

// wake wakes workers for the places, as far as cores are free. The caller holds the lock.
func (p *Pool) wake() {
	for range min(len(p.places.of), p.asleep, int(p.cores.Load()-p.held.Load())) {
		p.work.Signal()
	}
}

// help is a worker: it computes the tasks of crews until the pool has no users.
func (p *Pool) help() {
	t := &Turn{worker: true, ready: make(chan struct{}, 1)}
	for p.join(t) {
		p.assist(t)
		for n := 0; n < maxSpins && p.places.n.Load() == 0 && p.held.Load() < p.cores.Load(); n++ {
		}
	}
}

// assist computes tasks of the crew that t has joined, and leaves it.
func (p *Pool) assist(t *Turn) {
	c, returned := t.crew, false
	defer func() {
		p.mu.Lock()
		if c.next.Load() > 0 { // t has left early: see work
			p.places.set(append(p.places.of, c))
		}
		p.mu.Unlock()
		p.release(t)
		if !returned { // runtime.Goexit: this goroutine ends
			go p.help()
		}
		c.busy.Add(-1)
		c.inside.Done()
	}()
	c.compute(t)
	returned = true
}

// join takes a core and the oldest place, and returns false once the pool has no users.
func (p *Pool) join(t *Turn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.places.of) == 0 || p.queue.n.Load() > 0 || !p.acquire(t) {
		if p.users == 0 {
			p.started--
			p.ended.Broadcast()
			return false
		}
		p.asleep++
		p.work.Wait()
		p.asleep--
	}
	t.crew = p.places.of[0]
	p.places.set(slices.Delete(p.places.of, 0, 1))
	t.crew.busy.Add(1)
	t.crew.inside.Add(1)
	return true
}
