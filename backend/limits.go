package backend

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Go ends a program whose allocation fails, and Linux kills one that exceeds the memory of its control
// group. Allocations whose size follows from a caller's input therefore go through Make or CheckMemory.
//
// The limits, and what other processes use of them, are read once. What this process uses is read again
// after each memoryStep of requests. Memory that is allocated without a request, such as the stacks of
// threads, is covered by a reserve.
const (
	memoryStep = 16 << 20
	arenas     = 128 << 20 // reserve of mapped memory: Go maps its heap in arenas of 64 MiB
)

// memory is locked until the memory of a request is mapped.
var memory struct {
	sync.Mutex
	granted int64 // since the use was read
}

// CheckMemory returns ErrMemory when the process cannot have that many bytes more. The error names the
// bytes, those available and the limit. A negative number is too many.
func CheckMemory(bytes int64) error {
	memory.Lock()
	defer memory.Unlock()
	return grant(bytes)
}

// Make returns make([]T, n), or ErrMemory as CheckMemory does. A negative n is too many.
func Make[T any](n int) ([]T, error) {
	bytes := int64(-1)
	if size := int64(max(unsafe.Sizeof(*new(T)), 1)); n >= 0 && int64(n) <= math.MaxInt64/size {
		bytes = int64(n) * size
	}
	memory.Lock()
	defer memory.Unlock()
	if err := grant(bytes); err != nil {
		return nil, err
	}
	return make([]T, n), nil
}

func grant(bytes int64) error {
	if f := injected.Load(); f != nil && f.requests.Add(1) == f.nth {
		return fmt.Errorf("%d bytes requested, a test refuses them: %w", bytes, ErrMemory)
	}
	if bytes >= 0 && memory.granted+bytes < memoryStep {
		memory.granted += bytes
		return nil
	}
	l, free := tightest()
	if 0 <= bytes && free < bytes && bytes < l.max {
		debug.FreeOSMemory()
		l, free = tightest()
	}
	switch {
	case bytes < 0:
		return fmt.Errorf("2^63 or more bytes requested, %d available, %s is %d: %w", free, l.name, l.max, ErrMemory)
	case free < bytes:
		return fmt.Errorf("%d bytes requested, %d available, %s is %d: %w", bytes, free, l.name, l.max, ErrMemory)
	}
	memory.granted = 0
	return nil
}

// fault is what FailMemory injects.
type fault struct {
	nth      int64
	requests atomic.Int64
}

var injected atomic.Pointer[fault]

// FailMemory makes the nth request of Make or CheckMemory from now on fail, for tests; 0 counts requests
// only. stop ends this and returns the number of requests.
func FailMemory(nth int) (stop func() int) {
	f := &fault{nth: int64(nth)}
	injected.Store(f)
	return func() int {
		injected.Store(nil)
		return int(f.requests.Load())
	}
}

// HostMemory returns how many bytes the process can have more, and the lowest limit, whatever is in use.
func HostMemory() (free, limit int64) {
	_, free = tightest()
	limit = debug.SetMemoryLimit(-1)
	for _, l := range hostLimits() {
		limit = min(limit, l.max)
	}
	return free, limit
}

// usage is what the process has, in bytes.
type usage struct {
	heap, idle             int64 // Go's memory less what it returned to the system, and its free part
	resident, mapped, data int64 // of the process with other libraries; 0 where the system has no /proc
}

// readUsage is replaced by tests.
var readUsage = func() usage {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)
	total, released, free := int64(s[0].Value.Uint64()), int64(s[1].Value.Uint64()), int64(s[2].Value.Uint64())
	u := usage{heap: total - released, idle: released + free}
	statm := readText(os.DirFS("/proc"), "self/statm") // pages: mapped, resident, shared, code, -, data
	if f := strings.Fields(statm); len(f) >= 6 {
		page := int64(os.Getpagesize())
		u.mapped, u.resident, u.data = number(f[0])*page, (number(f[1])-number(f[2]))*page, number(f[5])*page
	}
	return u
}

// used is the memory that the process uses, or will use once it writes to what it has allocated.
func (u usage) used() int64 { return max(u.heap, u.resident) }

// hostLimit is a limit in bytes.
type hostLimit struct {
	name   string
	max    int64 // as the system states it
	room   int64 // what the process can have in all
	use    func(u usage) int64
	mapped bool // limits mapped memory: requests that fit into a free part of the heap need none
}

// tightest returns the limit that leaves the least, and what that is.
func tightest() (tightest hostLimit, least int64) {
	u := readUsage()
	goMemory := debug.SetMemoryLimit(-1)
	heap := hostLimit{"GOMEMLIMIT", goMemory, goMemory, func(u usage) int64 { return u.heap + memoryStep }, false}
	least = math.MaxInt64
	for _, l := range append(hostLimits(), heap) {
		free := l.room - l.use(u)
		if l.mapped { // the runtime reports the sum of the free parts: the largest is taken to be half of it
			free = max(free, u.idle/2-memoryStep)
		}
		if free = max(free, 0); free < least {
			tightest, least = l, free
		}
	}
	return tightest, least
}

// hostLimits returns the limits of the process.
var hostLimits = sync.OnceValue(func() []hostLimit { return slices.Clip(readLimits(os.DirFS("/"), readUsage())) })

// readLimits reads the limits from the files of a root directory. u is what the process has. Files that a
// system does not have are no limits.
func readLimits(root fs.FS, u usage) []hostLimit {
	const address = 1 << (31 + 16*(^uint(0)>>63)) // half of what Go's allocator addresses, 2^48 bytes on 64-bit machines
	used := func(u usage) int64 { return u.used() + memoryStep }
	mapped := func(u usage) int64 { return u.mapped + arenas }
	data := func(u usage) int64 { return u.data + arenas }
	all := []hostLimit{{"the address space", address, address, used, false}}

	rlimits := readText(root, "proc/self/limits") // lines of name, soft limit, hard limit
	ulimit := func(line, name string, use func(usage) int64) {
		_, rest, _ := strings.Cut(rlimits, line)
		soft, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
		if most := number(soft); most >= 0 {
			all = append(all, hostLimit{name, most, most, use, true})
		}
	}
	ulimit("Max address space", "ulimit -v", mapped)
	ulimit("Max data size", "ulimit -d", data)

	info := numbers(readText(root, "proc/meminfo"))
	kib := func(name string) int64 { return max(info[name+":"], 0) << 10 }
	if total := kib("MemTotal"); total > 0 {
		room := kib("MemAvailable") + kib("SwapFree") + u.resident
		all = append(all, hostLimit{"the machine's memory with swap", total + kib("SwapTotal"), room, used, false})
	}
	if strings.TrimSpace(readText(root, "proc/sys/vm/overcommit_memory")) == "2" {
		most := kib("CommitLimit")
		all = append(all, hostLimit{"the machine's CommitLimit", most, most - kib("Committed_AS") + u.data, data, true})
	}

	for line := range strings.Lines(readText(root, "proc/self/cgroup")) { // id:controllers:path
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) < 3 {
			continue
		}
		top, limit, current, total := "sys/fs/cgroup", "memory.max", "memory.current", ""
		if f[1] != "" {
			top, limit, current, total = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
			if !slices.Contains(strings.Split(f[1], ","), "memory") {
				continue
			}
		}
		// A container may see the path of the host, and only its own group, at the top.
		for group := path.Join("/", f[2]); ; group = path.Dir(group) {
			dir := path.Join(top, group)
			if most := number(readText(root, path.Join(dir, limit))); most >= 0 && most < address { // version 1 has no "max"
				stat := numbers(readText(root, path.Join(dir, "memory.stat")))
				cache := stat[total+"inactive_file"] + stat[total+"active_file"] // the kernel evicts it on demand
				others := number(readText(root, path.Join(dir, current))) - cache - u.resident
				all = append(all, hostLimit{"/" + path.Join(dir, limit), most, most - max(others, 0), used, false})
			}
			if group == "/" {
				break
			}
		}
	}
	return all
}

// readText returns a file's text; "" when there is none.
func readText(files fs.FS, name string) string {
	text, _ := fs.ReadFile(files, name)
	return string(text)
}

// numbers returns the numbers of lines "name number".
func numbers(text string) map[string]int64 {
	all := map[string]int64{}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 {
			all[f[0]] = number(f[1])
		}
	}
	return all
}

// number returns -1 for text that is no number, such as "max" or "unlimited".
func number(text string) int64 {
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		return -1
	}
	return n
}
