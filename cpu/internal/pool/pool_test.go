package pool

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open returns a pool with one user and slices of the given length, on cores cores.
func open(t *testing.T, cores int, slice time.Duration) *Pool {
	p := New()
	p.slice = slice
	p.Open()
	before := runtime.GOMAXPROCS(cores)
	t.Cleanup(func() {
		p.Close()
		runtime.GOMAXPROCS(before)
		if n := p.held.Load(); n != 0 || len(p.places.of) != 0 || len(p.queue.of) != 0 || p.places.n.Load() != 0 || p.queue.n.Load() != 0 || p.started != 0 {
			t.Errorf("left behind: %d held cores, %d places, %d in the queue, %d places counted, %d queued, %d workers",
				n, len(p.places.of), len(p.queue.of), p.places.n.Load(), p.queue.n.Load(), p.started)
		}
	})
	return p
}

// job calls itself for each task.
type job func(turn *Turn, n int) error

func (j job) Task(turn *Turn, _ *Scratch, n int) error { return j(turn, n) }

// nothing is a task.
func nothing(*Turn, int) error { return nil }

// run runs a call without scratch in a goroutine of calls. It must succeed.
func run(t *testing.T, calls *sync.WaitGroup, p *Pool, tasks, threads int, f job) {
	calls.Go(func() {
		if err := p.Run(t.Context(), f, 0, tasks, threads); err != nil {
			t.Error(err)
		}
	})
}

var errFail = errors.New("a task failed")

// TestEachTaskOnce shows that each task is computed once, whatever the number of concurrent calls and of their threads,
// whether goroutines pass their cores at each pause or never, that at most GOMAXPROCS compute at one time, and that the
// error of a task ends its call and no other.
func TestEachTaskOnce(t *testing.T) {
	for _, slice := range []time.Duration{0, time.Hour} {
		p := open(t, 3, slice)
		var calls sync.WaitGroup
		var computing atomic.Int32
		for n := range 8 {
			calls.Go(func() {
				for i := range 300 {
					done := make([]atomic.Int32, i%40)
					fail := -1
					if n == 0 && len(done) > 0 {
						fail = i % len(done)
					}
					err := p.Run(t.Context(), job(func(turn *Turn, k int) error {
						if now := computing.Add(1); now > 3 {
							t.Errorf("%d goroutines compute on 3 cores", now)
						}
						done[k].Add(1)
						computing.Add(-1)
						if k == fail {
							return errFail
						}
						return turn.Pause()
					}), 0, len(done), 1+n%4)
					if fail >= 0 {
						must.Fail(t, fmt.Sprintf("task %d fails", fail), err, errFail)
						continue
					}
					if err != nil {
						t.Error(err)
					}
					for k := range done {
						if got := done[k].Load(); got != 1 {
							t.Errorf("task %d of %d was computed %d times", k, len(done), got)
						}
					}
				}
			})
		}
		calls.Wait()
	}
}

// occupy holds every core of p until the returned function is called.
func occupy(t *testing.T, p *Pool, cores int) (release func()) {
	var calls, inside sync.WaitGroup
	end := make(chan struct{})
	inside.Add(cores)
	for range cores {
		run(t, &calls, p, 1, 1, func(*Turn, int) error { inside.Done(); <-end; return nil })
	}
	inside.Wait()
	return func() { close(end); calls.Wait() }
}

// await waits until n goroutines are in the queue.
func await(p *Pool, n int) {
	for int(p.queue.n.Load()) != n {
		runtime.Gosched()
	}
}

// TestQueue shows that calls without a core begin in the order in which they came, and that
// one whose context ends leaves the queue while all cores are held.
func TestQueue(t *testing.T) {
	p := open(t, 1, time.Hour)
	release := occupy(t, p, 1)
	var calls sync.WaitGroup
	var order []int
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error)
	for n := range 5 {
		if n == 2 {
			go func() { left <- p.Run(ctx, job(nothing), 0, 1, 1) }()
			await(p, n+1)
			continue
		}
		run(t, &calls, p, 1, 1, func(*Turn, int) error { order = append(order, n); return nil })
		await(p, n+1)
	}
	cancel()
	must.Fail(t, "the call whose context ended", <-left, context.Canceled)
	await(p, 4)
	release()
	calls.Wait()
	if want := []int{0, 1, 3, 4}; !slices.Equal(order, want) {
		t.Errorf("calls began in the order %v, want %v", order, want)
	}
}

// TestTurns shows that calls on one core compute alternately when their slices end.
func TestTurns(t *testing.T) {
	p := open(t, 1, 0)
	release := occupy(t, p, 1)
	var calls sync.WaitGroup
	const tasks = 20 * stride
	var done [3]int
	for n := range done {
		run(t, &calls, p, tasks, 1, func(*Turn, int) error {
			if done[n]++; done[n] == tasks {
				for other, did := range done {
					if did < tasks/2 {
						t.Errorf("call %d ends when call %d has computed %d of %d tasks", n, other, did, tasks)
					}
				}
			}
			return nil
		})
		await(p, n+1)
	}
	release()
	calls.Wait()
}

// TestDeadlineMidway shows that a call that has passed its core to another one returns when
// its context ends, while that one still computes.
func TestDeadlineMidway(t *testing.T) {
	p := open(t, 1, 0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began, ended := make(chan struct{}), make(chan error)
	go func() {
		first := true
		ended <- p.Run(ctx, job(func(turn *Turn, _ int) error {
			if first {
				first = false
				close(began)
				await(p, 1)
			}
			return nil
		}), 0, 1<<40, 1)
	}()
	<-began
	release := occupy(t, p, 1)
	cancel()
	must.Fail(t, "cancelled", <-ended, context.Canceled)
	release()
}

// TestPanic shows that a panic or runtime.Goexit on the caller's goroutine or on a worker's ends the call with an error,
// or with its caller, and that the pool computes afterwards.
func TestPanic(t *testing.T) {
	p := open(t, 4, 0)
	for n := range 200 {
		worker, exit := n%2 == 0, n%4 < 2
		var once sync.Once
		var fails atomic.Bool
		var err error
		returned, ended := false, make(chan struct{})
		go func() {
			defer close(ended)
			err = p.Run(t.Context(), job(func(turn *Turn, k int) error {
				if turn.worker == worker {
					fails.Store(true)
					once.Do(func() {
						if exit {
							runtime.Goexit()
						}
						var none []int
						none[k]++
					})
				}
				for !fails.Load() { // leaves a task to the other kind
					runtime.Gosched()
				}
				return nil
			}), 0, 64, 4)
			returned = true
		}()
		<-ended // the limit of the whole test binary reports a hang
		switch {
		case exit && !worker:
			if returned {
				t.Fatal("runtime.Goexit did not end its goroutine")
			}
		case exit:
			if !errors.Is(err, backend.ErrCallback) || errors.Is(err, backend.ErrInternal) {
				t.Fatalf("error %v", err)
			}
		case !errors.Is(err, backend.ErrInternal) || !strings.Contains(err.Error(), "index out of range") || !strings.Contains(err.Error(), "pool_test.go"):
			t.Fatalf("error %v", err)
		}
		var done atomic.Int32
		if err := p.Run(t.Context(), job(func(*Turn, int) error { done.Add(1); return nil }), 0, 10, 4); err != nil || done.Load() != 10 {
			t.Fatalf("afterwards %d of 10 tasks were computed, error %v", done.Load(), err)
		}
	}
}

// TestGOMAXPROCSChanges shows that calls of one task use the cores that a program adds after the first call.
func TestGOMAXPROCSChanges(t *testing.T) {
	p := open(t, 1, time.Hour)
	must.Do(t, p.Run(t.Context(), job(nothing), 0, 1, 1))
	runtime.GOMAXPROCS(3)
	occupy(t, p, 3)()
}

// doneContext panics when it is asked for its channel.
type doneContext struct{ context.Context }

func (doneContext) Done() <-chan struct{} { panic("injected") }

// TestPanicOfTheContext shows that a context that panics where a call begins to wait leaves the queue as it was.
func TestPanicOfTheContext(t *testing.T) {
	p := open(t, 1, 0)
	release := occupy(t, p, 1)
	err := p.Run(doneContext{t.Context()}, job(nothing), 0, 1, 1)
	if !errors.Is(err, backend.ErrInternal) || len(p.queue.of) != 0 {
		t.Errorf("error %v, %d in the queue", err, len(p.queue.of))
	}
	release()
}

// TestUsers shows that workers end with the last user, and start again for the next one.
func TestUsers(t *testing.T) {
	before := runtime.GOMAXPROCS(4)
	defer runtime.GOMAXPROCS(before)
	p, goroutines := New(), runtime.NumGoroutine()
	for range 20 {
		p.Open()
		p.Open()
		for range 2 {
			must.Do(t, p.Run(t.Context(), job(nothing), 0, 8, 3))
		}
		p.Close()
		if p.started != 2 {
			t.Errorf("%d workers for calls of 3 threads", p.started)
		}
		p.Close()
		if p.started != 0 {
			t.Errorf("%d workers are left", p.started)
		}
	}
	for runtime.NumGoroutine() > goroutines { // they are about to return
		runtime.Gosched()
	}
}

// TestCloseNextToOpen shows that Close does not wait for the workers once there is another user, which keeps them.
func TestCloseNextToOpen(t *testing.T) {
	for range 1000 {
		p := open(t, 2, timeSlice)
		must.Do(t, p.Run(t.Context(), job(nothing), 0, 8, 2))
		closed := make(chan struct{})
		go func() {
			p.Close()
			close(closed)
		}()
		for users := 1; users > 0; { // until Close waits, or has waited
			p.mu.Lock()
			users = p.users
			p.mu.Unlock()
		}
		p.Open()
		<-closed // the limit of the whole test binary reports a hang
	}
}

// TestScratchAligned shows that slices of scratch are disjoint and start on a cache line.
func TestScratchAligned(t *testing.T) {
	w := scratches.Get().(*Scratch)
	must.Do(t, w.Grow(1000))
	defer scratches.Put(w)
	end := uintptr(0)
	for _, n := range []int{1, 64, 3, 0, 128, 7, 500} {
		p := w.Floats(n)
		at := uintptr(unsafe.Pointer(unsafe.SliceData(p)))
		if len(p) != n || cap(p) != n || n > 0 && (at%64 != 0 || at < end) {
			t.Errorf("%d floats: got %d with room for %d at %#x, after slices up to %#x", n, len(p), cap(p), at, end)
		}
		end = max(end, at+4*uintptr(n))
	}
}
