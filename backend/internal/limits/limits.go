// Package limits grants requests for memory. It reads how much the process may have: on Linux the
// machine's memory, ulimit -v and -d and the control groups, everywhere GOMEMLIMIT. The limits, and what
// other processes use of them, are read once. What this process uses is read each time.
package limits

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
)

// Each limit keeps a reserve for memory that is allocated without a request, such as the stacks of threads.
const (
	reserve = 16 << 20
	arenas  = 128 << 20 // of mapped memory: Go maps its heap in arenas of 64 MiB
)

// Limit is a limit on one kind of memory, in bytes.
type Limit struct {
	Name string
	Max  int64 // as the system states it
	room int64 // what the process can have in all
	kind int
}

// Kinds of memory.
const (
	goHeap  = iota // Go's heap without the memory returned to the system
	used           // resident in the process, or allocated by Go and not yet written to
	mapped         // address space
	private        // mapped and not shared
	kinds
)

// usage is what the process has of each kind, 0 where the system does not report it.
type usage struct {
	of   [kinds]int64
	idle int64 // of the heap: mapped and free
	own  int64 // resident and not shared
}

// readUsage is replaced by tests.
var readUsage = func() (u usage) {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)
	total, released, free := int64(s[0].Value.Uint64()), int64(s[1].Value.Uint64()), int64(s[2].Value.Uint64())
	u.of[goHeap], u.idle = total-released, released+free
	text, _ := os.ReadFile("/proc/self/statm") // on Linux: pages
	var resident, shared, code, libraries int64
	page := int64(os.Getpagesize())
	if n, _ := fmt.Sscan(string(text), &u.of[mapped], &resident, &shared, &code, &libraries, &u.of[private]); n == 6 {
		u.own = (resident - shared) * page
		u.of[mapped] *= page
		u.of[private] *= page
	}
	u.of[used] = max(u.of[goHeap], u.own)
	return u
}

// Tightest returns the limit that leaves the least, and what that is. Free parts of the heap count as left by
// limits of mapped memory when heap is set. They are whole only after a garbage collection.
func Tightest(heap bool) (tightest Limit, least int64) {
	u, goLimit := readUsage(), debug.SetMemoryLimit(-1)
	least = math.MaxInt64
	for _, l := range append(known(), Limit{"GOMEMLIMIT", goLimit, goLimit, goHeap}) {
		free := l.room - u.of[l.kind] - reserve
		if l.kind >= mapped {
			free = l.room - u.of[l.kind] - arenas
			if heap {
				// Requests that fit into a free part of the heap map nothing. The runtime reports the sum
				// of the parts. Small objects may divide them: the largest is taken to be half of what lies
				// between blocks.
				free = max(free, min(u.idle, largestHole())/2-reserve)
			}
		}
		if free = max(free, 0); free < least {
			tightest, least = l, free
		}
	}
	return tightest, least
}

// Lowest returns the lowest limit, whatever is in use.
func Lowest() int64 {
	lowest := debug.SetMemoryLimit(-1)
	for _, l := range known() {
		lowest = min(lowest, l.Max)
	}
	return lowest
}

// known returns the limits of the process.
var known = sync.OnceValue(func() []Limit { return slices.Clip(readLimits(os.DirFS("/"), readUsage())) })

// readLimits reads the limits from the files of a root directory. u is what the process has. Files that a
// system does not have are no limits.
func readLimits(root fs.FS, u usage) []Limit {
	const address = 1 << (31 + 16*(^uint(0)>>63)) // half of what Go's allocator addresses, 2^48 bytes on 64-bit machines
	all := []Limit{{"the address space", address, address, used}}
	add := func(name string, most, room int64, kind int) {
		if most >= 0 {
			all = append(all, Limit{name, most, room, kind})
		}
	}
	read := func(name string) string {
		text, _ := fs.ReadFile(root, name)
		return string(text)
	}

	rlimits := read("proc/self/limits") // lines of name, soft limit, hard limit
	space, data := field(rlimits, "Max address space"), field(rlimits, "Max data size")
	add("ulimit -v", space, space, mapped)
	add("ulimit -d", data, data, private)

	info := read("proc/meminfo")
	kib := func(name string) int64 { return max(field(info, name), 0) << 10 }
	if total := kib("MemTotal:"); total > 0 {
		add("the machine's memory with swap", total+kib("SwapTotal:"), kib("MemAvailable:")+kib("SwapFree:")+u.own, used)
	}
	if most := kib("CommitLimit:"); field(read("proc/sys/vm/overcommit_memory"), "") == 2 {
		add("the machine's CommitLimit", most, most-kib("Committed_AS:")+u.of[private], private)
	}

	for line := range strings.Lines(read("proc/self/cgroup")) { // id:controllers:path
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		top, limit, current, total := "sys/fs/cgroup", "memory.max", "memory.current", ""
		switch {
		case len(f) < 3:
			continue
		case slices.Contains(strings.Split(f[1], ","), "memory"): // version 1
			top, limit, current, total = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
		case f[1] != "":
			continue
		}
		// A container may see the path of the host, and only its own group, at the top.
		for group := path.Join("/", f[2]); ; group = path.Dir(group) {
			dir := path.Join(top, group)
			if most := field(read(path.Join(dir, limit)), ""); most < address { // version 1 has no "max"
				stat := read(path.Join(dir, "memory.stat"))
				cache := max(field(stat, total+"inactive_file "), 0) + max(field(stat, total+"active_file "), 0) // evicted on demand
				others := field(read(path.Join(dir, current)), "") - cache - u.own
				add("/"+path.Join(dir, limit), most, most-max(others, 0), used)
			}
			if group == "/" {
				break
			}
		}
	}
	return all
}

// field returns the number after a name at the start of a line, or -1 if there is none.
func field(text, name string) int64 {
	_, rest, _ := strings.Cut("\n"+text, "\n"+name)
	n := int64(-1)
	_, _ = fmt.Sscan(rest, &n) // stays when there is another word, such as max
	return n
}
