// Package pool computes the calls of a process on at most GOMAXPROCS goroutines at a time.
//
// A call is a [Job], divided into tasks with disjoint outputs. The goroutine of its caller
// computes tasks, and workers help, each with a [Turn] and a [Scratch]:
//
//	caller ──► Run ──► Task, Task, ... Pause ...
//	workers ─────────► Task, Task, ... Pause ...
//
// A goroutine computes only while it holds one of GOMAXPROCS cores. Callers that find no
// free core wait in a queue, first come, first served, and leave it at once when their
// context ends. A goroutine that has held its core for 5 milliseconds passes it to the
// first in the queue in one of its next pauses, and queues again; a worker leaves its call
// after each task. Without a queue a goroutine yields to others of the program. A deadline
// is therefore noticed soon, however many calls run.
//
// A panic in a job ends its call alone, with an error that contains the stack.
package pool

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
)

// Job is a call that is divided into tasks.
type Job interface {
	// Floats returns the floats of scratch that one goroutine needs, in at most 48 slices.
	Floats() int
	// Task computes task n in w, whose floats are all available. Several goroutines call it
	// at once, each with a Turn and a Scratch of its own. It calls t.Pause between steps of
	// at most about a millisecond, and returns the error of Pause.
	Task(t *Turn, w *Scratch, n int) error
}

// slice is how long a goroutine holds a core while others wait for it.
const slice = 5 * time.Millisecond

// maxSpins is how often a worker looks for work before it sleeps: 30 to 60
// microseconds.
const maxSpins = 1 << 16

// Pool is the cores, the queue for them, and the workers. Workers start when a call first
// has tasks for them, outlive it, and end when the last user of the pool closes it.
//
// A sleeping core takes some 60 microseconds to wake up, as long as a whole short
// call. Idle workers therefore spin about that long before they sleep, which costs
// at most twice as much as the better choice (Karlin et al. 1990, Competitive
// Randomized Algorithms for Non-Uniform Problems).
type Pool struct {
	slice time.Duration

	// Read without the lock: the cores that exist and that are held, the goroutines in
	// the queue, the places of all crews, and the workers that sleep or are about to.
	cores, held, queued, places, asleep atomic.Int32

	mu      sync.Mutex
	queue   []*Turn
	crews   []*crew   // with places left, oldest first
	work    sync.Cond // a worker may find work, or users is 0
	decoy   sync.Cond // see idleDecoy
	ended   sync.Cond // a worker or the decoy has ended, or there is a user again
	users   int
	started int // workers
	decoys  int // 0 or 1
}

// New returns a pool without users.
func New() *Pool {
	p := &Pool{slice: slice}
	p.work.L, p.decoy.L, p.ended.L = &p.mu, &p.mu, &p.mu
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
	p.decoy.Broadcast()
	for p.users == 0 && p.started+p.decoys > 0 {
		p.ended.Wait()
	}
}

// crew is a job and the goroutines that compute it.
type crew struct {
	pool    *Pool
	ctx     context.Context
	job     Job
	caller  Turn
	helpers int
	places  int          // workers that may still join, guarded by Pool.mu
	spins   int          // how often its goroutines look for work before they sleep
	next    atomic.Int64 // tasks not taken yet

	// Workers that joined and have not left: busy to spin on, inside to sleep on.
	busy   atomic.Int32
	inside sync.WaitGroup

	failed atomic.Bool
	mu     sync.Mutex
	err    error // the first one
}

// Run computes tasks tasks of j on the caller's goroutine and up to threads-1
// workers. They take tasks in descending order: under a causal mask the last tasks
// are the longest, and the short ones at the end balance the load. The result does
// not depend on which goroutine computes a task, nor on the number of goroutines.
//
// A caller that finds a free core begins at once, so a short call does not wait for
// sleeping workers; those that wake up late take the remaining tasks. After the first
// calls, Run does not allocate.
//
// It returns the first error of Task, the context's error, or ErrInternal for a panic.
func (p *Pool) Run(ctx context.Context, j Job, tasks, threads int) error {
	c := spare.Get().(*crew)
	c.pool, c.ctx, c.job, c.err = p, ctx, j, nil
	cores := runtime.GOMAXPROCS(0) // the runtime may change it at any time
	if p.cores.Load() != int32(cores) {
		p.cores.Store(int32(cores))
	}
	c.helpers = min(threads, tasks, cores) - 1
	c.failed.Store(false)
	c.next.Store(int64(tasks))
	c.compute(&c.caller)
	if c.helpers > 0 {
		p.dismiss(c)
	}
	if c.caller.holds {
		p.release(&c.caller)
	}
	if c.helpers > 0 {
		c.inside.Wait()
	}
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
	c.spins = 0
	if c.helpers < int(p.cores.Load()) { // otherwise spinning takes a core from another goroutine
		c.spins = maxSpins
	}
	c.places = c.helpers
	p.crews = append(p.crews, c)
	p.places.Add(int32(c.helpers))
	if p.decoys == 0 {
		p.decoys++
		go p.idleDecoy()
	}
	for ; p.started < c.helpers; p.started++ {
		go p.help()
	}
	p.wake()
}

// wake wakes workers for the open places, as far as cores are free. The caller holds the
// lock.
func (p *Pool) wake() {
	n := min(p.places.Load(), p.asleep.Load(), p.cores.Load()-p.held.Load())
	if n <= 0 {
		return
	}
	for range n {
		p.work.Signal()
	}
	p.decoy.Signal()
}

// dismiss withdraws c's open places and waits for its workers as long as they may end soon.
func (p *Pool) dismiss(c *crew) {
	p.mu.Lock()
	p.withdraw(c)
	if c.busy.Load() > 0 {
		p.promote(c)
	}
	p.mu.Unlock()
	for n := 0; n < c.spins && c.busy.Load() > 0 && c.caller.holds && p.queued.Load() == 0; n++ {
	}
}

// promote puts the workers of c that wait in the middle of a task before all others: c's
// caller has nothing left to do but to leave its core to one of them. The caller holds the
// lock.
func (p *Pool) promote(c *crew) {
	slices.SortStableFunc(p.queue, func(x, y *Turn) int {
		switch {
		case x.crew == c && y.crew != c:
			return -1
		case x.crew != c && y.crew == c:
			return 1
		}
		return 0
	})
}

// withdraw takes c from the list, with its places. The caller holds the lock.
func (p *Pool) withdraw(c *crew) {
	if c.places > 0 {
		p.places.Add(-int32(c.places))
		i := slices.Index(p.crews, c)
		p.crews = slices.Delete(p.crews, i, i+1)
		c.places = 0
	}
}

// help is a worker: it computes the tasks of crews until the pool has no users.
func (p *Pool) help() {
	t := &Turn{worker: true, ready: make(chan struct{}, 1)}
	spins := 0
	for p.join(t, spins) {
		c := t.crew
		c.compute(t)
		if spins = c.spins; t.leaves {
			p.rejoin(c)
		}
		if t.holds {
			p.release(t)
		}
		t.crew = nil
		c.busy.Add(-1)
		c.inside.Done()
	}
}

// join takes a core and a place in the oldest crew. It looks that often before it sleeps,
// and returns false once the pool has no users.
func (p *Pool) join(t *Turn, spins int) bool {
	for n := 0; n < spins && p.places.Load() == 0 && p.held.Load() < p.cores.Load(); n++ {
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asleep.Add(1) // before the look at held: see release
	defer p.asleep.Add(-1)
	for len(p.crews) == 0 || !p.tryAcquire(t) {
		if p.users == 0 {
			p.started--
			p.ended.Broadcast()
			return false
		}
		p.work.Wait()
	}
	c := p.crews[0]
	t.crew, t.leaves = c, false
	c.busy.Add(1)
	c.inside.Add(1)
	if c.places--; c.places == 0 {
		p.crews = slices.Delete(p.crews, 0, 1)
	}
	p.places.Add(-1)
	return true
}

// rejoin gives back a place of c that a worker leaves before the tasks end.
func (p *Pool) rejoin(c *crew) {
	p.mu.Lock()
	if c.next.Load() > 0 {
		if c.places++; c.places == 1 {
			p.crews = append(p.crews, c)
		}
		p.places.Add(1)
	}
	p.mu.Unlock()
}

// idleDecoy is a goroutine that does nothing. The Go scheduler puts the goroutine
// that was woken last into the slot that the caller's thread runs next, and other
// threads steal from that slot only after a sleep, a seventh of a call of S=256.
// Waking the decoy last keeps a worker out of that slot.
func (p *Pool) idleDecoy() {
	p.mu.Lock()
	for p.users > 0 {
		p.decoy.Wait()
	}
	p.decoys--
	p.ended.Broadcast()
	p.mu.Unlock()
}

// compute computes tasks of c with a core. It keeps the first error, after which no
// goroutine begins a task.
func (c *crew) compute(t *Turn) {
	err := func() (err error) {
		defer Recover(&err)
		if !t.worker {
			if err := c.pool.acquire(t); err != nil {
				return err
			}
			if c.helpers > 0 {
				c.pool.invite(c)
			}
		}
		return c.work(t)
	}()
	if err == nil {
		return
	}
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
	c.failed.Store(true)
	c.next.Store(0)
}

// work computes the tasks that no other goroutine takes.
func (c *crew) work(t *Turn) error {
	w, err := takeScratch(c.job.Floats())
	if err != nil {
		return err
	}
	for n := t.next(); n >= 0; n = t.next() {
		if err = t.Pause(); err != nil {
			break
		}
		w.Reset()
		if err = c.job.Task(t, w, n); err != nil {
			break
		}
	}
	w.giveBack() // not after a panic: it may be in use
	return err
}

// Recover, deferred, turns a panic into ErrInternal with the stack.
func Recover(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("%w: panic: %v\n%s", backend.ErrInternal, r, debug.Stack())
	}
}
