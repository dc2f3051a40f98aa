package cpu

import (
	"context"
	"errors"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// countJob counts how often each of its tasks is computed.
type countJob struct {
	done []atomic.Int32
	fail int // the task that returns errFail, or -1
}

var errFail = errors.New("a task failed")

func (*countJob) size() (floats, rows int) { return 0, 0 }

func (j *countJob) task(_ context.Context, _ *scratch, t int) error {
	j.done[t].Add(1)
	if t == j.fail {
		return errFail
	}
	return nil
}

// TestWorkersComputeEachTaskOnce shows that each task is computed once, whatever the
// number of concurrent calls and of their threads, that a call returns after all of its
// tasks, and that the error of a task ends no other call.
func TestWorkersComputeEachTaskOnce(t *testing.T) {
	be := open(t, Options{})
	var calls sync.WaitGroup
	for n := range 8 {
		calls.Go(func() {
			for i := range 500 {
				j := &countJob{done: make([]atomic.Int32, i%40), fail: -1}
				if n == 0 && len(j.done) > 0 {
					j.fail = i % len(j.done)
				}
				err := be.workers.run(t.Context(), j, len(j.done), 1+n%4)
				if j.fail >= 0 {
					if !errors.Is(err, errFail) {
						t.Errorf("error %v, want that of task %d", err, j.fail)
					}
					continue
				}
				if err != nil {
					t.Error(err)
				}
				for k := range j.done {
					if got := j.done[k].Load(); got != 1 {
						t.Errorf("task %d of %d was computed %d times", k, len(j.done), got)
					}
				}
			}
		})
	}
	calls.Wait()
	if n := len(be.workers.crews); n != 0 || be.workers.places.Load() != 0 {
		t.Errorf("%d crews are left on the list, %d places", n, be.workers.places.Load())
	}
	if be.workers.started > 3 {
		t.Errorf("%d goroutines for calls of at most 4 threads", be.workers.started)
	}
}

// TestWorkersOutliveCalls shows that calls use the backend's goroutines once these have
// started, and that the goroutines end with Close or with an unreachable backend.
func TestWorkersOutliveCalls(t *testing.T) {
	created := func() uint64 {
		s := []metrics.Sample{{Name: "/sched/goroutines-created:goroutines"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	c := plain(t, 4, 256, 64)
	call := func(be *Backend) {
		if err := be.Attention(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	running := runtime.NumGoroutine()
	be := New(Options{Threads: 3})
	call(be)
	if got := runtime.NumGoroutine(); got != running+3 {
		t.Errorf("%d goroutines more after a call with 3 threads, want 2 workers and the decoy", got-running)
	}
	before := created()
	for range 100 {
		call(be)
	}
	if n := created() - before; n > 10 { // the runtime's own may be among them
		t.Errorf("100 calls started %d goroutines", n)
	}
	// end waits without a deadline: the limit of the whole test binary reports a hang.
	end := func(help func()) {
		for runtime.NumGoroutine() > running {
			help()
			time.Sleep(time.Millisecond)
		}
	}
	be.Close()
	end(func() {})
	call(New(Options{Threads: 3}))
	end(runtime.GC)
}
