package limits

import (
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// ErrMemory is backend.ErrMemory.
var ErrMemory = errors.New("out of memory")

// What the process uses is read again after each step of requests.
const step = 16 << 20

// tightest is replaced by tests.
var tightest = Tightest

// memory is locked from reading the use until the memory of a large request is mapped.
var memory struct {
	sync.Mutex
	granted atomic.Int64 // since the use was read
}

// Request calls take, which may allocate bytes and returns where they are, or nil. It returns ErrMemory when
// the process cannot have so many. It grants requests without the lock until their sum reaches a step: no
// request waits while another goroutine clears gigabytes.
func Request(bytes int64, take func() *byte) error {
	if f := injected.Load(); f != nil && f.requests.Add(1) == f.nth {
		return fmt.Errorf("%d bytes requested, a test refuses them: %w", bytes, ErrMemory)
	}
	if bytes < 0 || bytes >= step || memory.granted.Add(bytes) >= step {
		memory.Lock()
		defer memory.Unlock()
		if err := large(bytes); err != nil {
			return err
		}
	}
	if start := take(); start != nil && bytes >= recorded && mappingIsLimited() {
		record(start, bytes)
	}
	return nil
}

// large compares a request with the limits, a second time after a garbage collection. Garbage that is only
// half collected leaves many small holes, so that large requests count on holes of the heap after it alone.
func large(bytes int64) error {
	l, free := tightest(bytes < step)
	if 0 <= bytes && free < bytes && bytes < l.Max {
		debug.FreeOSMemory()
		l, free = tightest(true)
	}
	if bytes < 0 || free < bytes {
		count := fmt.Sprint(bytes)
		if bytes < 0 {
			count = "2^63 or more"
		}
		return fmt.Errorf("%s bytes requested, %d available, %s is %d: %w", count, free, l.Name, l.Max, ErrMemory)
	}
	memory.granted.Store(0)
	return nil
}

// fault is what Fail injects.
type fault struct {
	nth      int64
	requests atomic.Int64
}

var injected atomic.Pointer[fault]

// Fail is backend.FailMemory.
func Fail(nth int) (stop func() int) {
	f := &fault{nth: int64(nth)}
	injected.Store(f)
	return func() int {
		injected.Store(nil)
		return int(f.requests.Load())
	}
}
