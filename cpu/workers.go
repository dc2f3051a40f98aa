package cpu

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"unsafe"

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
	// task computes task t in w. Its only error is that of turn.Pause, when it
	// stops early.
	task(turn *pool.Turn, w *scratch, t int) error
}

// workers computes the calls of all backends of the process.
var workers = pool.New()

// run computes tasks tasks of j on at most threads goroutines.
func (be *Backend) run(ctx context.Context, j job, tasks, threads int) error {
	r := runners.Get().(*runner)
	r.job = j
	defer func() {
		r.job = nil
		runners.Put(r)
	}()
	return workers.Run(ctx, r, tasks, threads)
}

// runner gives the goroutines of a job their scratch.
type runner struct{ job job }

var runners = sync.Pool{New: func() any { return new(runner) }}

// Work implements pool.Job.
func (r *runner) Work(turn *pool.Turn) error {
	w, err := getScratch(r.job.size())
	if err != nil {
		return err
	}
	for t := turn.Next(); t >= 0; t = turn.Next() {
		if err = turn.Pause(); err != nil {
			break
		}
		w.used = 0
		if err = r.job.task(turn, w, t); err != nil {
			break
		}
	}
	putScratch(w) // not after a panic: it may be in use
	return err
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
