package budget

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"testing/fstest"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// TestLimits reads recorded files: of which limit they leave the least, and how much.
func TestLimits(t *testing.T) {
	page := int64(os.Getpagesize())
	// 1,000 MiB are mapped, 300 as data, 80 are in use and 20 of them shared.
	statm := fmt.Sprintf("%d %d %d 100 0 %d 0\n", 1000*mib/page, 80*mib/page, 20*mib/page, 300*mib/page)
	const (
		unlimited = "Limit                     Soft Limit           Hard Limit           Units     \n" +
			"Max data size             unlimited            unlimited            bytes     \n" +
			"Max address space         unlimited            unlimited            bytes     \n"
		meminfo = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\nSwapTotal:       1048576 kB\nSwapFree:         524288 kB\n" +
			"CommitLimit:     4194304 kB\nCommitted_AS:    2097152 kB\n"
		v1mounts = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n" +
			"32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n" +
			"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n" +
			"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
		v1groups  = "9:name=systemd:/\n4:memory:/jobs/7\n1:cpu:/\n0::/\n"
		v1none    = "9223372036854771712\n"
		v2mounts  = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		v1docker  = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime master:15 - cgroup cgroup rw,memory\n"
		v1foreign = "35 31 0:32 / /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
	)
	const group = "/sys/fs/cgroup"
	// With 60 MiB in use of the 500 that Go has mapped, 440 will be written later.
	go500 := heap{math.MaxInt64, 500 * mib, 40 * mib}
	const soon = 440*mib + step
	for _, c := range []struct {
		why   string
		files map[string]string
		heap  heap
		name  string
		max   int64
		free  int64
	}{
		{"nothing is known", map[string]string{}, go500, "the address space", 1 << 47, 1 << 47},
		{"another system, GOMEMLIMIT", map[string]string{}, heap{gib, 100 * mib, 0}, "GOMEMLIMIT", gib, gib - 100*mib - step},
		{"GOMEMLIMIT is exceeded", map[string]string{}, heap{gib, 2 * gib, 0}, "GOMEMLIMIT", gib, 0},
		{"no limit but the machine", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": unlimited}, go500,
			"the machine's memory with swap", 17 * gib, 8*gib + 512*mib - soon},
		{"ulimit -v", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": strings.Replace(unlimited, "space         unlimited ", "space         4294967296", 1)}, go500,
			"ulimit -v", 4 * gib, 4*gib - 1000*mib - arenas},
		{"ulimit -d", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": strings.Replace(unlimited, "size             unlimited ", "size             4294967296", 1)}, go500,
			"ulimit -d", 4 * gib, 4*gib - 300*mib - arenas},
		{"ulimit -v is reached, but most of the heap is free", map[string]string{"/proc/meminfo": meminfo,
			"/proc/self/limits": strings.Replace(unlimited, "space         unlimited ", "space         1073741824", 1)},
			heap{math.MaxInt64, 500 * mib, 700 * mib}, "ulimit -v", gib, 350*mib - step},
		{"strict overcommit", map[string]string{"/proc/meminfo": meminfo, "/proc/sys/vm/overcommit_memory": "2\n"}, go500,
			"the machine's CommitLimit", 4 * gib, 2*gib - arenas},
		{"heuristic overcommit", map[string]string{"/proc/meminfo": meminfo, "/proc/sys/vm/overcommit_memory": "0\n"}, go500,
			"the machine's memory with swap", 17 * gib, 8*gib + 512*mib - soon},
		{"version 1, the inner group", map[string]string{"/proc/self/mountinfo": v1mounts, "/proc/self/cgroup": v1groups,
			group + "/memory/jobs/7/memory.limit_in_bytes": "1073741824\n", group + "/memory/jobs/7/memory.usage_in_bytes": "314572800\n",
			group + "/memory/jobs/7/memory.stat":         "cache 9\ninactive_file 1\ntotal_inactive_file 104857600\ntotal_active_file 1048576\n",
			group + "/memory/jobs/memory.limit_in_bytes": v1none, group + "/memory/memory.limit_in_bytes": v1none}, go500,
			"/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", gib, gib - 300*mib + 101*mib - soon},
		{"version 1, an outer group", map[string]string{"/proc/self/mountinfo": v1mounts, "/proc/self/cgroup": v1groups,
			group + "/memory/jobs/7/memory.limit_in_bytes": v1none, group + "/memory/memory.limit_in_bytes": v1none,
			group + "/memory/jobs/memory.limit_in_bytes": "1073741824\n", group + "/memory/jobs/memory.usage_in_bytes": "0\n"}, go500,
			"/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", gib, gib - soon},
		{"version 1, a container with paths of the host", map[string]string{"/proc/self/mountinfo": v1docker, "/proc/self/cgroup": "4:cpu,memory:/docker/abc\n",
			group + "/memory/memory.limit_in_bytes": "1073741824\n", group + "/memory/memory.usage_in_bytes": "0\n"}, go500,
			"/sys/fs/cgroup/memory/memory.limit_in_bytes", gib, gib - soon},
		{"version 2", map[string]string{"/proc/self/mountinfo": v2mounts, "/proc/self/cgroup": "0::/user.slice/a.scope\n",
			group + "/user.slice/a.scope/memory.max": "max\n", group + "/user.slice/memory.max": "1073741824\n",
			group + "/user.slice/memory.current": "104857600\n", group + "/user.slice/memory.stat": "anon 4\ninactive_file 52428800\nactive_file 0\n"}, go500,
			"/sys/fs/cgroup/user.slice/memory.max", gib, gib - 50*mib - soon},
		{"version 2, a container with its own name space", map[string]string{"/proc/self/mountinfo": v2mounts, "/proc/self/cgroup": "0::/\n",
			group + "/memory.max": "1073741824\n", group + "/memory.current": "0\n"}, go500, "/sys/fs/cgroup/memory.max", gib, gib - soon},
		{"version 2, a group outside of the name space", map[string]string{"/proc/self/mountinfo": v2mounts, "/proc/self/cgroup": "0::/../other\n",
			group + "/memory.max": "1073741824\n", group + "/memory.current": "0\n"}, go500, "/sys/fs/cgroup/memory.max", gib, gib - soon},
		{"lines that are cut off", map[string]string{"/proc/self/mountinfo": "35 31 0:32 /\n - cgroup2\n\n" + v1foreign, "/proc/self/cgroup": "\n4:memory\n::\n",
			"/proc/meminfo": "MemTotal:\nMemAvailable: x kB\n", "/proc/self/limits": "Max address space"}, go500, "the address space", 1 << 47, 1 << 47},
	} {
		files := fstest.MapFS{}
		for name, text := range c.files {
			files[strings.TrimPrefix(name, "/")] = &fstest.MapFile{Data: []byte(text)}
		}
		if len(c.files) > 0 {
			files["proc/self/statm"] = &fstest.MapFile{Data: []byte(statm)}
		}
		s := newSystem(files, func() heap { return c.heap })
		if got := tightest(s.limits()); got != (limit{c.name, c.max, c.free}) {
			t.Errorf("%s: %+v, want %q of %d with %d free", c.why, got, c.name, c.max, c.free)
		}
	}
}

// TestGroupsEnd shows that every path of a group leads up to the mount point.
func TestGroupsEnd(t *testing.T) {
	for _, own := range []string{"", "/", "a", "/a/b", "../..", "/..", "//", "/a/../../b"} {
		files := fstest.MapFS{
			"proc/self/mountinfo": {Data: []byte("30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n")},
			"proc/self/cgroup":    {Data: []byte("0::" + own + "\n")},
		}
		got := groups(files)
		if len(got) == 0 || got[len(got)-1].dir != "cg" {
			t.Errorf("group %q: %v", own, got)
		}
		for _, g := range got {
			if !fs.ValidPath(path.Join(g.dir, g.max)) {
				t.Errorf("group %q: %q", own, g.dir)
			}
		}
	}
}

// with replaces the machine by one that has a limit that leaves free bytes.
func with(t *testing.T, free func() int64) {
	old := machine
	t.Cleanup(func() { machine = old; unread.Store(0) })
	unread.Store(0)
	machine = newSystem(fstest.MapFS{}, func() heap { return heap{limit: gib, mapped: gib - step - free()} })
}

func TestCheck(t *testing.T) {
	left := int64(100 * mib)
	with(t, func() int64 { return left })
	for _, c := range []struct {
		why   string
		bytes int64
		ok    bool
	}{
		{"nothing", 0, true}, {"what is there", 100 * mib, true}, {"a byte more", 100*mib + 1, false},
		{"a negative number", -1, false}, {"any number", math.MaxInt64, false}, {"a small one", step - 1, true},
	} {
		err := Check(c.bytes)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, ErrMemory) {
			t.Errorf("%s: %v", c.why, err)
		}
	}
	want := "2000000000 bytes requested, 104857600 available, GOMEMLIMIT is 1073741824: out of memory"
	if err := Check(2_000_000_000); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}

	// Small requests are compared with the limits once their sum reaches a step.
	left = 0
	unread.Store(0)
	granted := 0
	for Check(mib) == nil {
		granted++
	}
	if granted != step/mib-1 {
		t.Errorf("%d small requests granted at a limit that is reached, want %d", granted, step/mib-1)
	}
	left = 100 * mib // for example because a caller released memory
	if err := Check(mib); err != nil {
		t.Error(err)
	}
}

func TestCheckCollectsGarbage(t *testing.T) {
	collected := false
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	before := stats.NumForcedGC
	with(t, func() int64 {
		runtime.ReadMemStats(&stats)
		if collected = stats.NumForcedGC > before; collected {
			return 100 * mib
		}
		return 0
	})
	if err := Check(100 * mib); err != nil || !collected {
		t.Errorf("%v, garbage collected: %v", err, collected)
	}
}

func TestMake(t *testing.T) {
	with(t, func() int64 { return 100 * mib })
	for _, n := range []int{-1, math.MinInt, math.MaxInt, math.MaxInt / 8, math.MaxInt/8 + 1, 20 * mib} {
		if s, err := Make[float64](n); !errors.Is(err, ErrMemory) || s != nil {
			t.Errorf("%d: %d elements, %v", n, len(s), err)
		}
	}
	for _, n := range []int{0, 1, 3 * mib} {
		if s, err := Make[float64](n); err != nil || len(s) != n {
			t.Errorf("%d: %d elements, %v", n, len(s), err)
		}
	}
	if s, err := Make[struct{}](7); err != nil || len(s) != 7 {
		t.Errorf("no bytes: %d elements, %v", len(s), err)
	}
}

func TestFail(t *testing.T) {
	stop := Fail(2)
	_, first := Make[byte](1)
	second := Check(1)
	third := Check(1)
	if first != nil || !errors.Is(second, ErrMemory) || third != nil {
		t.Errorf("%v, %v, %v, want the second alone to fail", first, second, third)
	}
	if n := stop(); n != 3 {
		t.Errorf("%d requests, want 3", n)
	}
	if err := Check(1); err != nil {
		t.Error(err)
	}
}

// TestMemoryLimit shows that a request observes the limit of Go's runtime.
func TestMemoryLimit(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(512 * mib))
	if err := Check(gib); !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "GOMEMLIMIT is 536870912") {
		t.Errorf("%v, want GOMEMLIMIT", err)
	}
	if Limit() != 512*mib || Free() > 512*mib {
		t.Errorf("limit %d, free %d", Limit(), Free())
	}
}

const limitedChild = "ATTN_BUDGET_CHILD"

// TestUlimit fills a process that ulimit limits: the requests end with ErrMemory, not with the
// process, and what is released can be requested again.
func TestUlimit(t *testing.T) {
	if os.Getenv(limitedChild) != "" {
		fill(t)
		return
	}
	if raceEnabled {
		t.Skip("the race detector maps more than any limit")
	}
	for _, limit := range []string{"-v 2500000", "-d 1048576"} {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "ulimit "+limit+" && exec \"$0\" -test.run='^TestUlimit$'", os.Args[0])
		cmd.Env = append(os.Environ(), limitedChild+"=1")
		out, err := cmd.CombinedOutput()
		if runtime.GOOS != "linux" {
			t.Skipf("limits of processes are read on Linux only: %v", err)
		}
		if err != nil || !strings.Contains(string(out), "ulimit "+limit[:2]+" is") {
			t.Errorf("ulimit %s: %v\n%.2000s", limit, err, out)
		}
	}
}

func fill(t *testing.T) {
	for _, bytes := range []int{4 * mib, 30 * mib, 200 * mib} {
		var err error
		var all [2]int
		for turn := range all {
			var held [][]byte
			for err = nil; err == nil; {
				var b []byte
				b, err = Make[byte](bytes)
				held = append(held, b)
			}
			all[turn] = len(held) - 1
		}
		fmt.Println(bytes, all, err)
		if !errors.Is(err, ErrMemory) || all[0] == 0 || all[1] < all[0]/2 {
			t.Errorf("%d bytes: granted %d times, then %d: %v", bytes, all[0], all[1], err)
		}
	}
}

func BenchmarkLimits(b *testing.B) {
	for b.Loop() {
		_ = Check(step)
	}
}
