package pool

import (
	"errors"
	"runtime"
	"slices"
	"time"
)

// Turn is the part of one goroutine in a call. It holds a core while the goroutine computes.
type Turn struct {
	crew   *crew
	worker bool
	holds  bool          // a core
	ready  chan struct{} // receives when the queue gives it a core

	since time.Duration // when its slice of time began; -1: Pause has not looked since
	skip  int           // pauses until Pause reads the clock
}

// errStopped is what Pause returns when another goroutine of the call has failed.
var errStopped = errors.New("another goroutine of the call has failed")

// Pause returns the error of the context, or an error when the call has failed elsewhere.
// From time to time it lets other goroutines run, and returns when it holds a core again.
func (t *Turn) Pause() error {
	if err := t.crew.ctx.Err(); err != nil {
		return err
	}
	if t.crew.failed.Load() {
		return errStopped
	}
	if t.skip--; t.skip > 0 {
		return nil
	}
	t.skip = stride
	now := time.Since(start)
	if t.since < 0 {
		t.since = now
	}
	if now-t.since < t.crew.pool.slice {
		return nil
	}
	return t.Yield()
}

// stride is the number of pauses from one reading of the clock to the next. A reading takes as
// long as some of the shortest blocks, and short calls never read it.
const stride = 8

var start = time.Now()

// Yield lets other goroutines run, and returns when it holds a core again.
func (t *Turn) Yield() error {
	if p := t.crew.pool; p.queue.n.Load() > 0 {
		return p.wait(t)
	}
	runtime.Gosched()
	t.since, t.skip = -1, stride
	return nil
}

// acquire takes a free core for t and starts its slice of time.
func (p *Pool) acquire(t *Turn) bool {
	for n := p.held.Load(); n < p.cores.Load(); n = p.held.Load() {
		if p.held.CompareAndSwap(n, n+1) {
			t.holds, t.since, t.skip = true, -1, stride
			return true
		}
	}
	return false
}

// dispatch gives free cores to the queue, then to workers. The caller holds the lock.
func (p *Pool) dispatch() {
	for len(p.queue.of) > 0 && p.acquire(p.queue.of[0]) {
		t := p.queue.of[0]
		p.queue.set(slices.Delete(p.queue.of, 0, 1))
		t.ready <- struct{}{}
	}
	if len(p.queue.of) == 0 {
		p.wake()
	}
}

// wait gives back the core that t holds, if it holds one, and waits in the queue until
// dispatch gives it another one or the context ends.
func (p *Pool) wait(t *Turn) error {
	ctx := t.crew.ctx
	done := ctx.Done() // before t is in the queue: a caller's context may panic
	p.mu.Lock()
	if t.holds {
		t.holds = false
		p.held.Add(-1)
	}
	p.queue.set(append(p.queue.of, t)) // before the look at held: see release
	p.dispatch()
	p.mu.Unlock()
	select {
	case <-t.ready:
	case <-done:
		p.mu.Lock()
		defer p.mu.Unlock()
		if i := slices.Index(p.queue.of, t); i >= 0 {
			p.queue.set(slices.Delete(p.queue.of, i, i+1))
			p.dispatch()
		} else {
			<-t.ready // dispatch was faster
		}
	}
	return ctx.Err()
}

// release gives back the core that t holds, if it holds one. A goroutine that waits for a core is in the queue, and a
// crew among the places, before anyone looks at held for them. Either they see the core, or release sees them.
func (p *Pool) release(t *Turn) {
	if !t.holds {
		return
	}
	t.holds = false
	p.held.Add(-1)
	if p.queue.n.Load() > 0 || p.places.n.Load() > 0 {
		p.mu.Lock()
		p.dispatch()
		p.mu.Unlock()
	}
}
