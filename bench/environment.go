package bench

import (
	"bufio"
	"bytes"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
)

// Environment says what a report was measured on and with.
type Environment struct {
	// Date is when the run began, RFC 3339 in UTC.
	Date string `json:"date"`
	// GoVersion, OS and Arch are the toolchain and its target.
	GoVersion string `json:"go_version"`
	OS        string `json:"os"`
	Arch      string `json:"arch"`
	// CPU is the processor's own name; Arch where it does not tell.
	CPU string `json:"cpu"`
	// CPUs is how many logical processors the program may use, Threads how
	// many of them Go runs on (GOMAXPROCS).
	CPUs    int `json:"cpus"`
	Threads int `json:"threads"`
	// Version is this module's version, Commit the revision it was built
	// from and Modified whether files differed from it; "" where the build
	// does not tell.
	Version  string `json:"version"`
	Commit   string `json:"commit"`
	Modified bool   `json:"modified"`
	// Args say how to repeat the run: the words after "attn".
	Args []string `json:"args"`
	// MemoryBytes is what the machine has; 0 where the system does not tell.
	MemoryBytes int64 `json:"memory_bytes"`
	// Variables are those of the process's environment that change what is
	// measured, as NAME=VALUE.
	Variables []string `json:"variables"`
	// CGO says whether the program was built with cgo.
	CGO bool `json:"cgo"`
	// Seed drew the inputs and the rows that were checked.
	Seed uint64 `json:"seed"`
	// CheckedRows is how many rows of a result were recomputed in float64.
	CheckedRows int `json:"checked_rows"`
	// BudgetS is the time in seconds that the run was given; 0 is no limit.
	BudgetS float64 `json:"budget_s"`
	// Backends are the devices that were measured.
	Backends []backend.Info `json:"backends"`
	// Missing says in words which backends there are without a device.
	Missing []string `json:"missing"`
}

// modulePath finds this module among those that a program was built from.
const modulePath = "github.com/seed90331342/attn"

// environment reads off what the program runs on.
func environment(now time.Time) Environment {
	e := Environment{
		Date:      now.UTC().Format(time.RFC3339),
		GoVersion: runtime.Version(),
		OS:        runtime.GOOS,
		Arch:      runtime.GOARCH,
		CPU:       cpuName(),
		CPUs:      runtime.NumCPU(),
		Threads:   runtime.GOMAXPROCS(0),
		Backends:  []backend.Info{},
		Missing:   []string{},
		Args:      []string{},
		Variables: []string{},
	}
	for _, v := range os.Environ() {
		if slices.ContainsFunc([]string{"ATTN_", "GOMAXPROCS=", "GOGC=", "GOMEMLIMIT=", "GODEBUG=", "VK_", "WGPU_"}, func(p string) bool { return strings.HasPrefix(v, p) }) {
			e.Variables = append(e.Variables, v)
		}
	}
	slices.Sort(e.Variables)
	e.MemoryBytes = meminfo("MemTotal")
	if e.CPU == "" {
		e.CPU = runtime.GOARCH
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		e.readBuild(build)
	}
	return e
}

func (e *Environment) readBuild(build *debug.BuildInfo) {
	settings := map[string]string{}
	for _, s := range build.Settings {
		settings[s.Key] = s.Value
	}
	e.CGO = settings["CGO_ENABLED"] == "1"
	if build.Main.Path == modulePath {
		// The revision is that of the main module: of another program's
		// repository when this is a library in it.
		e.Version = build.Main.Version
		e.Commit = settings["vcs.revision"]
		e.Modified = settings["vcs.modified"] == "true"
		return
	}
	for _, m := range build.Deps {
		if m.Path == modulePath {
			e.Version = m.Version
		}
	}
}

// field returns what follows the colon in the first line of text that starts
// with key, as the files in /proc are written; "" when there is none.
func field(text []byte, key string) string {
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		name, value, ok := strings.Cut(lines.Text(), ":")
		if ok && strings.TrimSpace(name) == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// freeMemory returns how many bytes a program may still take, as far as the
// system tells: the smaller of what the machine and what the control group has
// left. 0 when unknown.
func freeMemory() int64 {
	free := meminfo("MemAvailable")
	if free == 0 {
		return 0
	}
	limit, ok := number("/sys/fs/cgroup/memory.max")
	if !ok {
		return free // no group, or one without a limit ("max")
	}
	used, _ := number("/sys/fs/cgroup/memory.current")
	stat, _ := os.ReadFile("/sys/fs/cgroup/memory.stat")
	// Cached files count as used but give way.
	cached, _ := strconv.ParseInt(field(bytes.ReplaceAll(stat, []byte(" "), []byte(":")), "inactive_file"), 10, 64)
	return min(free, max(limit-used+cached, 1))
}

// meminfo reads a size off Linux's account of the machine; 0 when there is none.
func meminfo(name string) int64 { return kibibytes("/proc/meminfo", name) }

// kibibytes reads a line "name: 12 kB" of a file, in bytes; 0 when there is none.
func kibibytes(path, name string) int64 {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	kib, err := strconv.ParseInt(strings.TrimSuffix(field(text, name), " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return kib << 10
}

// number reads a file that holds one number.
func number(path string) (int64, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	return n, err == nil
}
