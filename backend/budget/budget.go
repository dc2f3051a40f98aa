// Package budget refuses allocations that the process cannot have. Go ends a program whose
// allocation fails, and Linux kills one that exceeds the memory of its control group, so each
// allocation whose size follows from a caller's input asks first:
//
//	data, err := budget.Make[float32](n) // make([]float32, n), or ErrMemory
//	err = budget.Check(bytes)            // for memory that something else allocates
//
// The limits are those of limits.go: on Linux the machine's memory, ulimit -v and -d and the
// control groups, everywhere GOMEMLIMIT. They are read anew after each 16 MiB of requests:
// 0.1 ms, where filling that memory takes several.
//
// It does not count memory that is allocated without a request, such as the stacks of
// threads; each limit keeps a reserve for it.
package budget

import (
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ErrMemory is backend.ErrMemory.
var ErrMemory = errors.New("out of memory")

// step is the sum of requests after which the limits are read.
const step = 16 << 20

var (
	unread atomic.Int64 // bytes that were granted since the limits were read
	making sync.Mutex   // held from reading the limits until the memory is mapped
)

// Check returns ErrMemory when the process cannot have that many bytes more: the error names
// the bytes, those available and the limit. A negative number is too many.
func Check(bytes int64) error {
	if granted, err := small(bytes); granted || err != nil {
		return err
	}
	making.Lock()
	defer making.Unlock()
	return large(bytes)
}

// Make returns make([]T, n), or ErrMemory as Check does. A negative n is too many.
func Make[T any](n int) ([]T, error) {
	return allocate(n, func(int64) []T { return make([]T, n) })
}

// MakeUncleared is Make for numbers with unspecified values: from 16 MiB on it does not
// clear memory that the process has used before. Clearing takes a second for some GB, in
// which nothing could interrupt it.
func MakeUncleared[T float32 | uint16 | byte](n int) ([]T, error) {
	return allocate(n, func(bytes int64) []T {
		if bytes < step {
			return make([]T, n)
		}
		// A Builder is the only type of the standard library that allocates memory
		// without clearing it.
		var b strings.Builder
		b.Grow(int(bytes))
		b.WriteByte(0) // an empty string need not have an address
		return unsafe.Slice((*T)(unsafe.Pointer(unsafe.StringData(b.String()))), n)
	})
}

// allocate returns n elements that alloc makes, of so many bytes, or ErrMemory.
func allocate[T any](n int, alloc func(bytes int64) []T) ([]T, error) {
	bytes := int64(-1)
	if size := int64(max(unsafe.Sizeof(*new(T)), 1)); n >= 0 && int64(n) <= math.MaxInt64/size {
		bytes = int64(n) * size
	}
	granted, err := small(bytes)
	if err != nil {
		return nil, err
	}
	if !granted {
		making.Lock()
		defer making.Unlock()
		if err := large(bytes); err != nil {
			return nil, err
		}
	}
	return alloc(bytes), nil
}

// small grants requests without reading the limits until their sum reaches a step.
func small(bytes int64) (granted bool, err error) {
	if armed.Load() && requests.Add(1) == failing.Load() {
		return false, fmt.Errorf("%d bytes requested, a test refuses them: %w", bytes, ErrMemory)
	}
	return 0 <= bytes && bytes < step && unread.Add(bytes) < step, nil
}

// large compares a request with the limits, a second time after a garbage collection.
func large(bytes int64) error {
	l := tightest(machine.limits())
	if 0 <= bytes && l.free < bytes && bytes < l.max {
		debug.FreeOSMemory()
		l = tightest(machine.limits())
	}
	if bytes < 0 || l.free < bytes {
		return fmt.Errorf("%s requested, %d available, %s is %d: %w", count(bytes), l.free, l.name, l.max, ErrMemory)
	}
	unread.Store(0)
	return nil
}

func count(bytes int64) string {
	if bytes < 0 {
		return "2^63 or more bytes"
	}
	return fmt.Sprintf("%d bytes", bytes)
}

// Free returns how many bytes the process can have at present.
func Free() int64 { return tightest(machine.limits()).free }

// Limit returns the lowest limit, in bytes, whatever is in use.
func Limit() int64 {
	lowest := int64(math.MaxInt64)
	for _, l := range machine.limits() {
		lowest = min(lowest, l.max)
	}
	return lowest
}

// The fault of Fail.
var (
	armed             atomic.Bool
	requests, failing atomic.Int64
)

// Fail makes the nth request from now on fail, for tests; 0 counts requests only. stop ends
// this and returns the number of requests.
func Fail(nth int) (stop func() int) {
	failing.Store(int64(nth))
	requests.Store(0)
	armed.Store(true)
	return func() int {
		armed.Store(false)
		return int(requests.Load())
	}
}
