package limits

import (
	"runtime/debug"
	"strings"
	"testing"
	"testing/fstest"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// TestLimits reads recorded files: which limit leaves the least, and how much.
func TestLimits(t *testing.T) {
	defer func(use func() usage, limits func() []Limit) { readUsage, known = use, limits }(readUsage, known)
	const (
		unlimited = "Limit                     Soft Limit           Hard Limit           Units     \n" +
			"Max data size             unlimited            unlimited            bytes     \n" +
			"Max address space         unlimited            unlimited            bytes     \n"
		meminfo = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\nSwapTotal:       1048576 kB\n" +
			"SwapFree:         524288 kB\nCommitLimit:     4194304 kB\nCommitted_AS:    2097152 kB\n"
		v1groups = "9:name=systemd:/\n4:memory:/jobs/7\n1:cpu:/\n0::/\n"
		v1none   = "9223372036854771712\n"
		group    = "/sys/fs/cgroup"
	)
	most := func(line string) string { return strings.Replace(unlimited, line+" unlimited ", line+" 4294967296", 1) }
	// With 60 MiB in use of the 500 that Go has mapped, 440 will be written later.
	normal := usage{of: [kinds]int64{500 * mib, 500 * mib, 1000 * mib, 300 * mib}, idle: 40 * mib, own: 60 * mib}
	idle := normal
	idle.idle = 700 * mib
	const soon = 440*mib + reserve
	for _, c := range []struct {
		why   string
		files map[string]string
		use   usage
		name  string
		max   int64
		free  int64
	}{
		{"nothing is known", nil, usage{}, "the address space", 1 << 47, 1<<47 - reserve},
		{"no limit but the machine", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": unlimited}, normal,
			"the machine's memory with swap", 17 * gib, 8*gib + 512*mib - soon},
		{"ulimit -v", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": most("Max address space        ")}, normal,
			"ulimit -v", 4 * gib, 4*gib - 1000*mib - arenas},
		{"ulimit -d", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": most("Max data size            ")}, normal,
			"ulimit -d", 4 * gib, 4*gib - 300*mib - arenas},
		{"ulimit -v is reached, but most of the heap is free", map[string]string{"/proc/meminfo": meminfo,
			"/proc/self/limits": strings.Replace(unlimited, "space         unlimited ", "space         1073741824", 1)},
			idle, "ulimit -v", gib, 350*mib - reserve},
		{"strict overcommit", map[string]string{"/proc/meminfo": meminfo, "/proc/sys/vm/overcommit_memory": "2\n"}, normal,
			"the machine's CommitLimit", 4 * gib, 2*gib - arenas},
		{"heuristic overcommit", map[string]string{"/proc/meminfo": meminfo, "/proc/sys/vm/overcommit_memory": "0\n"}, normal,
			"the machine's memory with swap", 17 * gib, 8*gib + 512*mib - soon},
		{"version 1, the inner group", map[string]string{"/proc/self/cgroup": v1groups,
			group + "/memory/jobs/7/memory.limit_in_bytes": "1073741824\n", group + "/memory/jobs/7/memory.usage_in_bytes": "314572800\n",
			group + "/memory/jobs/7/memory.stat":         "cache 9\ninactive_file 1\ntotal_inactive_file 104857600\ntotal_active_file 1048576\n",
			group + "/memory/jobs/memory.limit_in_bytes": v1none, group + "/memory/memory.limit_in_bytes": v1none}, normal,
			"/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", gib, gib - 300*mib + 101*mib - soon},
		{"version 1, an outer group", map[string]string{"/proc/self/cgroup": v1groups,
			group + "/memory/jobs/7/memory.limit_in_bytes": v1none, group + "/memory/memory.limit_in_bytes": v1none,
			group + "/memory/jobs/memory.limit_in_bytes": "1073741824\n", group + "/memory/jobs/memory.usage_in_bytes": "62914560\n"}, normal,
			"/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", gib, gib - 60*mib - soon},
		{"version 1, a container with paths of the host", map[string]string{"/proc/self/cgroup": "4:cpu,memory:/docker/abc\n",
			group + "/memory/memory.limit_in_bytes": "1073741824\n", group + "/memory/memory.usage_in_bytes": "62914560\n"}, normal,
			"/sys/fs/cgroup/memory/memory.limit_in_bytes", gib, gib - 60*mib - soon},
		{"version 2", map[string]string{"/proc/self/cgroup": "0::/user.slice/a.scope\n",
			group + "/user.slice/a.scope/memory.max": "max\n", group + "/user.slice/memory.max": "1073741824\n",
			group + "/user.slice/memory.current": "157286400\n", group + "/user.slice/memory.stat": "anon 4\ninactive_file 52428800\nactive_file 0\n"},
			normal, "/sys/fs/cgroup/user.slice/memory.max", gib, gib - 100*mib - soon},
		{"version 2, a container with its own name space", map[string]string{"/proc/self/cgroup": "0::/\n",
			group + "/memory.max": "1073741824\n", group + "/memory.current": "62914560\n"}, normal, "/sys/fs/cgroup/memory.max", gib, gib - 60*mib - soon},
		{"version 2, a group outside of the name space", map[string]string{"/proc/self/cgroup": "0::/../other\n",
			group + "/memory.max": "1073741824\n", group + "/memory.current": "62914560\n"}, normal, "/sys/fs/cgroup/memory.max", gib, gib - 60*mib - soon},
		{"version 2, more is used than the group reports", map[string]string{"/proc/self/cgroup": "0::/\n",
			group + "/memory.max": "1073741824\n"}, normal, "/sys/fs/cgroup/memory.max", gib, gib - 500*mib - reserve},
		{"lines that are cut off", map[string]string{"/proc/self/cgroup": "\n4:memory\n::\n4:memory:\n",
			"/proc/meminfo": "MemTotal:\nMemAvailable: x kB\n", "/proc/self/limits": "Max address space"}, usage{}, "the address space", 1 << 47, 1<<47 - reserve},
	} {
		files := fstest.MapFS{}
		for name, text := range c.files {
			files[strings.TrimPrefix(name, "/")] = &fstest.MapFile{Data: []byte(text)}
		}
		readUsage, known = func() usage { return c.use }, func() []Limit { return readLimits(files, c.use) }
		if got, free := Tightest(true); got.Name != c.name || got.Max != c.max || free != c.free {
			t.Errorf("%s: %q of %d with %d free, want %q of %d with %d", c.why, got.Name, got.Max, free, c.name, c.max, c.free)
		}
	}
}

// TestGoMemoryLimit shows that the limit of Go's runtime counts, whenever it is set.
func TestGoMemoryLimit(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(512 * mib))
	if l, free := Tightest(true); l.Name != "GOMEMLIMIT" || l.Max != 512*mib || free >= 512*mib || Lowest() != 512*mib {
		t.Errorf("%+v with %d free, the lowest is %d", l, free, Lowest())
	}
	debug.SetMemoryLimit(1)
	if _, free := Tightest(true); free != 0 {
		t.Errorf("%d bytes are free above the limit", free)
	}
}
