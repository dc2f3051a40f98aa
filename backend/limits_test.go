package backend

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
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

// TestLimits reads recorded files: which limit leaves the least, and how much.
func TestLimits(t *testing.T) {
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
	normal := usage{heap: 500 * mib, idle: 40 * mib, resident: 60 * mib, mapped: 1000 * mib, data: 300 * mib}
	idle := normal
	idle.idle = 700 * mib
	const soon = 440*mib + memoryStep
	for _, c := range []struct {
		why   string
		files map[string]string
		use   usage
		name  string
		max   int64
		free  int64
	}{
		{"nothing is known", nil, usage{}, "the address space", 1 << 47, 1<<47 - memoryStep},
		{"no limit but the machine", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": unlimited}, normal,
			"the machine's memory with swap", 17 * gib, 8*gib + 512*mib - soon},
		{"ulimit -v", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": most("Max address space        ")}, normal,
			"ulimit -v", 4 * gib, 4*gib - 1000*mib - arenas},
		{"ulimit -d", map[string]string{"/proc/meminfo": meminfo, "/proc/self/limits": most("Max data size            ")}, normal,
			"ulimit -d", 4 * gib, 4*gib - 300*mib - arenas},
		{"ulimit -v is reached, but most of the heap is free", map[string]string{"/proc/meminfo": meminfo,
			"/proc/self/limits": strings.Replace(unlimited, "space         unlimited ", "space         1073741824", 1)},
			idle, "ulimit -v", gib, 350*mib - memoryStep},
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
			group + "/memory.max": "1073741824\n"}, normal, "/sys/fs/cgroup/memory.max", gib, gib - 500*mib - memoryStep},
		{"lines that are cut off", map[string]string{"/proc/self/cgroup": "\n4:memory\n::\n4:memory:\n",
			"/proc/meminfo": "MemTotal:\nMemAvailable: x kB\n", "/proc/self/limits": "Max address space"}, usage{}, "the address space", 1 << 47, 1<<47 - memoryStep},
	} {
		files := fstest.MapFS{}
		for name, text := range c.files {
			files[strings.TrimPrefix(name, "/")] = &fstest.MapFile{Data: []byte(text)}
		}
		with(t, func() usage { return c.use }, readLimits(files, c.use)...)
		if got, free := tightest(); got.name != c.name || got.max != c.max || free != c.free {
			t.Errorf("%s: %q of %d with %d free, want %q of %d with %d", c.why, got.name, got.max, free, c.name, c.max, c.free)
		}
	}
}

// with replaces what the process uses and its limits.
func with(t *testing.T, use func() usage, limits ...hostLimit) {
	oldUse, oldLimits := readUsage, hostLimits
	t.Cleanup(func() { readUsage, hostLimits, memory.granted = oldUse, oldLimits, 0 })
	readUsage, hostLimits, memory.granted = use, func() []hostLimit { return limits }, 0
}

// withFree sets a GOMEMLIMIT of 1 GiB that leaves free bytes.
func withFree(t *testing.T, free func() int64) {
	with(t, func() usage { return usage{heap: gib - memoryStep - free()} })
	old := debug.SetMemoryLimit(gib)
	t.Cleanup(func() { debug.SetMemoryLimit(old) })
}

func TestCheckMemory(t *testing.T) {
	left := int64(100 * mib)
	withFree(t, func() int64 { return left })
	for _, c := range []struct {
		why   string
		bytes int64
		ok    bool
	}{
		{"nothing", 0, true}, {"what is there", 100 * mib, true}, {"a byte more", 100*mib + 1, false},
		{"a negative number", -1, false}, {"any number", math.MaxInt64, false}, {"a small one", memoryStep - 1, true},
	} {
		err := CheckMemory(c.bytes)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, ErrMemory) {
			t.Errorf("%s: %v", c.why, err)
		}
	}
	want := "2000000000 bytes requested, 104857600 available, GOMEMLIMIT is 1073741824: out of memory"
	if err := CheckMemory(2_000_000_000); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	left = -1 // exceeded
	if err := CheckMemory(memoryStep); err == nil || !strings.Contains(err.Error(), " 0 available") {
		t.Errorf("a limit that is exceeded: %v", err)
	}

	// Small requests are compared with the limits once their sum reaches a step.
	left, memory.granted = 0, 0
	granted := 0
	for CheckMemory(mib) == nil {
		granted++
	}
	if granted != memoryStep/mib-1 {
		t.Errorf("%d small requests granted at a limit that is reached, want %d", granted, memoryStep/mib-1)
	}
	left = 100 * mib // for example because a caller released memory
	if err := CheckMemory(mib); err != nil {
		t.Error(err)
	}
}

func TestCheckCollectsGarbage(t *testing.T) {
	collected := false
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	before := stats.NumForcedGC
	withFree(t, func() int64 {
		runtime.ReadMemStats(&stats)
		if collected = stats.NumForcedGC > before; collected {
			return 100 * mib
		}
		return 0
	})
	if err := CheckMemory(100 * mib); err != nil || !collected {
		t.Errorf("%v, garbage collected: %v", err, collected)
	}
}

func TestMake(t *testing.T) {
	withFree(t, func() int64 { return 100 * mib })
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

func TestFailMemory(t *testing.T) {
	stop := FailMemory(2)
	_, first := Make[byte](1)
	second := CheckMemory(1)
	third := CheckMemory(1)
	if first != nil || !errors.Is(second, ErrMemory) || third != nil {
		t.Errorf("%v, %v, %v, want the second alone to fail", first, second, third)
	}
	if n := stop(); n != 3 {
		t.Errorf("%d requests, want 3", n)
	}
	if err := CheckMemory(1); err != nil {
		t.Error(err)
	}
}

// TestGoMemoryLimit shows that a request observes the limit of Go's runtime.
func TestGoMemoryLimit(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(512 * mib))
	if err := CheckMemory(gib); !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "GOMEMLIMIT is 536870912") {
		t.Errorf("%v, want GOMEMLIMIT", err)
	}
	if free, limit := HostMemory(); limit != 512*mib || free > 512*mib {
		t.Errorf("limit %d, free %d", limit, free)
	}
}

const limitedChild = "ATTN_LIMITED_CHILD"

// TestUlimit fills a process that ulimit limits: the requests end with ErrMemory, not with the process, and
// what is released can be requested again.
func TestUlimit(t *testing.T) {
	if os.Getenv(limitedChild) != "" {
		fill(t)
		return
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-race" && s.Value == "true" {
				t.Skip("the race detector maps more than any limit")
			}
		}
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
		_ = CheckMemory(memoryStep)
	}
}
