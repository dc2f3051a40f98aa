package budget

import (
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
)

// arenas is the reserve of limits on mapped memory: Go maps its heap in arenas of 64 MiB, and
// other threads map theirs meanwhile.
const arenas = 128 << 20

// limit is a limit in bytes, and what it leaves for the next request.
type limit struct {
	name      string
	max, free int64
}

// tightest returns the limit that leaves the least.
func tightest(limits []limit) limit {
	return slices.MinFunc(limits, func(a, b limit) int {
		if a.free < b.free {
			return -1
		}
		return 1
	})
}

// system is where the limits are read from.
type system struct {
	files  fs.FS // of the root directory
	heap   func() heap
	groups func() []group
}

// heap is Go's memory in bytes.
type heap struct {
	limit  int64 // GOMEMLIMIT
	mapped int64 // less what was returned to the system
	idle   int64 // mapped for the heap, and free
}

var machine = newSystem(os.DirFS("/"), readHeap)

func newSystem(files fs.FS, heap func() heap) system {
	return system{files, heap, sync.OnceValue(func() []group { return groups(files) })}
}

func readHeap() heap {
	s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}
	metrics.Read(s)
	total, released, free := int64(s[0].Value.Uint64()), int64(s[1].Value.Uint64()), int64(s[2].Value.Uint64())
	return heap{debug.SetMemoryLimit(-1), total - released, released + free}
}

// limits returns all limits. Files that a system does not have are no limits.
func (s system) limits() []limit {
	h := s.heap()
	// Half of what Go's allocator addresses, 2^48 bytes on 64-bit machines.
	all := []limit{{"the address space", 1 << (31 + 16*(^uint(0)>>63)), 1 << (31 + 16*(^uint(0)>>63))}}
	add := func(name string, most, free int64) { all = append(all, limit{name, most, max(free, 0)}) }
	if h.limit < math.MaxInt64 {
		add("GOMEMLIMIT", h.limit, h.limit-h.mapped-step)
	}
	statm := strings.Fields(s.read("proc/self/statm")) // pages: mapped, resident, shared, code, -, data
	if len(statm) < 6 {
		return all
	}
	pages := func(i int) int64 { return number(statm[i]) * int64(os.Getpagesize()) }

	// Limits on mapped memory. Requests that fit into a free piece of the heap map nothing. The
	// runtime reports the sum of the pieces only; the largest is taken to be half of it.
	again := h.idle/2 - step
	rlimits := s.read("proc/self/limits") // lines of name, soft limit, hard limit
	for _, r := range []struct {
		line, name string
		used       int64
	}{{"Max address space", "ulimit -v", pages(0)}, {"Max data size", "ulimit -d", pages(5)}} {
		_, rest, _ := strings.Cut(rlimits, r.line)
		soft, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
		if most := number(soft); most >= 0 {
			add(r.name, most, max(most-r.used-arenas, again))
		}
	}

	// Limits on used memory. What is allocated and not yet written will be used too.
	soon := max(h.mapped-(pages(1)-pages(2)), 0) + step
	mem := fields(s.read("proc/meminfo"))
	kib := func(name string) int64 { return max(mem[name+":"], 0) << 10 }
	if total := kib("MemTotal"); total > 0 {
		add("the machine's memory with swap", total+kib("SwapTotal"), kib("MemAvailable")+kib("SwapFree")-soon)
	}
	if strings.TrimSpace(s.read("proc/sys/vm/overcommit_memory")) == "2" {
		add("the machine's CommitLimit", kib("CommitLimit"), max(kib("CommitLimit")-kib("Committed_AS")-arenas, again))
	}
	for _, g := range s.groups() {
		if most := number(s.read(path.Join(g.dir, g.max))); most >= 0 && most < 1<<62 { // version 1 has no word for "max"
			stat := fields(s.read(path.Join(g.dir, "memory.stat")))
			cache := stat[g.total+"inactive_file"] + stat[g.total+"active_file"] // the kernel evicts it on demand
			add("/"+path.Join(g.dir, g.max), most, most-number(s.read(path.Join(g.dir, g.used)))+cache-soon)
		}
	}
	return all
}

// group is a control group of the process that may limit its memory, with the names of its
// files.
type group struct{ dir, max, used, total string }

// groups returns the control groups of the process, inner ones first.
func groups(files fs.FS) (all []group) {
	s := system{files: files}
	for mount := range strings.Lines(s.read("proc/self/mountinfo")) { // id, parent, device, root, point, options, ... - type, source, options
		before, after, _ := strings.Cut(mount, " - ")
		f, super := strings.Fields(before), strings.Fields(after)
		if len(f) < 5 || len(super) < 3 {
			continue
		}
		g, controller := group{max: "memory.max", used: "memory.current"}, ""
		switch options := strings.Split(super[2], ","); {
		case super[0] == "cgroup2":
		case super[0] == "cgroup" && slices.Contains(options, "memory"):
			g, controller = group{max: "memory.limit_in_bytes", used: "memory.usage_in_bytes", total: "total_"}, "memory"
		default:
			continue
		}
		for line := range strings.Lines(s.read("proc/self/cgroup")) { // id:controllers:path
			own := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(own) < 3 || !slices.Contains(strings.Split(own[1], ","), controller) {
				continue
			}
			below, ok := strings.CutPrefix(own[2], strings.TrimSuffix(f[3], "/"))
			if !ok { // a container that sees only its own groups, with paths of the host
				below = ""
			}
			below = path.Join("/", below) // no path leads out of the mount point
			for point := strings.TrimPrefix(f[4], "/"); ; below = path.Dir(below) {
				g.dir = path.Join(point, below)
				all = append(all, g)
				if g.dir == point {
					break
				}
			}
		}
	}
	return all
}

// read returns a file's text; "" when there is none.
func (s system) read(name string) string {
	text, _ := fs.ReadFile(s.files, name)
	return string(text)
}

// fields returns the numbers of lines "name number".
func fields(text string) map[string]int64 {
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
