package report

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/machine"
	"github.com/seed90331342/attn/bench/page"
	"github.com/seed90331342/attn/kernels"
)

// Environment is what a report was measured on and with.
type Environment struct {
	// Date is when the run began, RFC 3339 in UTC.
	Date string `json:"date"`
	// GoVersion, OS and Arch are the toolchain and its target.
	GoVersion string `json:"go_version"`
	OS        string `json:"os"`
	Arch      string `json:"arch"`
	// CPU is the processor's name; Arch where the system does not report it.
	CPU string `json:"cpu"`
	// CPUs is the number of logical processors, Threads is GOMAXPROCS.
	CPUs    int `json:"cpus"`
	Threads int `json:"threads"`
	// Version is this module's version, Commit the revision of the build and Modified
	// whether files differed from it; "" when unknown.
	Version  string `json:"version"`
	Commit   string `json:"commit"`
	Modified bool   `json:"modified"`
	// Args are the command-line arguments that repeat the run, without "attn".
	Args []string `json:"args"`
	// MemoryBytes is the machine's memory; 0 when unknown.
	MemoryBytes int64 `json:"memory_bytes"`
	// Variables are the environment variables that affect speed, as NAME=VALUE.
	Variables []string `json:"variables"`
	// CGO is set for programs built with cgo.
	CGO bool `json:"cgo"`
	// Seed drew the inputs and the checked rows.
	Seed uint64 `json:"seed"`
	// CheckedRows is the number of rows of a result that were recomputed in float64.
	CheckedRows int `json:"checked_rows"`
	// BudgetS is the time limit of the run in seconds; 0 is no limit.
	BudgetS float64 `json:"budget_s"`
	// Backends are the devices that were measured.
	Backends []kernels.Info `json:"backends"`
	// Missing has a line for each backend that has no device.
	Missing []string `json:"missing"`
}

// modulePath is this module among those that a program was built from.
const modulePath = "github.com/seed90331342/attn"

// affecting are prefixes of the environment variables that affect speed.
var affecting = []string{"ATTN_", "GOMAXPROCS=", "GOGC=", "GOMEMLIMIT=", "GODEBUG=", "VK_", "WGPU_"}

// ThisMachine returns the environment of the process at a time.
func ThisMachine(now time.Time) Environment {
	e := Environment{
		Date:        now.UTC().Format(time.RFC3339),
		GoVersion:   runtime.Version(),
		OS:          runtime.GOOS,
		Arch:        runtime.GOARCH,
		CPU:         machine.CPU(),
		CPUs:        runtime.NumCPU(),
		Threads:     runtime.GOMAXPROCS(0),
		MemoryBytes: machine.Memory(),
		Backends:    []kernels.Info{},
		Missing:     []string{},
		Args:        []string{},
		Variables:   []string{},
	}
	for _, v := range os.Environ() {
		if slices.ContainsFunc(affecting, func(prefix string) bool { return strings.HasPrefix(v, prefix) }) {
			e.Variables = append(e.Variables, v)
		}
	}
	slices.Sort(e.Variables)
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
	if build.Main.Path == modulePath { // otherwise the revision is that of another repository
		e.Version, e.Commit, e.Modified = build.Main.Version, settings["vcs.revision"], settings["vcs.modified"] == "true"
		return
	}
	for _, m := range build.Deps {
		if m.Path == modulePath {
			e.Version = m.Version
		}
	}
}

// backend returns the backend that m ran on; the zero Info when it is not listed.
func (e *Environment) backend(m *Measurement) kernels.Info {
	for i := range e.Backends {
		if m.on(&e.Backends[i]) {
			return e.Backends[i]
		}
	}
	return kernels.Info{Provider: m.Provider}
}

// revision returns the first digits of the commit with a mark for modified files, or the
// module's version.
func (e *Environment) revision() string {
	switch {
	case e.Commit == "":
		return e.Version
	case e.Modified:
		return fmt.Sprintf("%.10s+", e.Commit)
	}
	return fmt.Sprintf("%.10s", e.Commit)
}

// describe writes a device on a line.
func describe(b *kernels.Info) string { return details(b, b.Name, b.Device, b.Provider, b.Driver) }

// details joins texts about a device and its number of threads, if any.
func details(b *kernels.Info, texts ...string) string {
	if b.Threads > 0 {
		texts = append(texts, format.Count(b.Threads, "thread"))
	}
	return page.Line(strings.Join(nonEmpty(texts...), " · "))
}

// limits writes a device's limits as "name=value name=value".
func limits(b *kernels.Info) string {
	var words []string
	for _, l := range b.Limits {
		words = append(words, fmt.Sprintf("%s=%d", l.Name, l.Value))
	}
	return strings.Join(words, " ")
}

// table lists the environment by name and value.
func (e *Environment) table() [][2]string {
	var rows [][2]string
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, [2]string{name, value})
		}
	}
	add("date", e.Date)
	add("CPU", fmt.Sprintf("%s, %s, %s for Go", e.CPU, format.Count(e.CPUs, "CPU"), format.Count(e.Threads, "thread")))
	if e.MemoryBytes > 0 {
		add("memory", format.Size(float64(e.MemoryBytes)))
	}
	for _, b := range e.Backends {
		add("backend "+b.Name, details(&b, b.Device, string(b.Type), b.Provider, b.Driver))
		var limits []string
		for _, l := range b.Limits {
			value := strconv.FormatInt(l.Value, 10)
			if l.Value >= 1<<20 { // bytes: limits of other kinds are at most 65,535
				value = format.Size(float64(l.Value))
			}
			limits = append(limits, l.Name+" "+value)
		}
		add("limits of "+b.Name, strings.Join(limits, " · "))
	}
	for _, m := range e.Missing {
		add("missing", m)
	}
	add("system", e.OS+"/"+e.Arch)
	cgo := "without cgo"
	if e.CGO {
		cgo = "with cgo"
	}
	add("Go", e.GoVersion+", "+cgo)
	add("version", e.Version)
	if e.Commit != "" {
		add("commit", e.revision())
	}
	add("variables", strings.Join(e.Variables, " "))
	add("seed", strconv.FormatUint(e.Seed, 10))
	if e.BudgetS > 0 {
		add("budget", format.Duration(e.BudgetS))
	}
	return rows
}

// command returns the command that repeats the run, quoted for a shell.
func (e *Environment) command() string {
	var words []string
	for _, v := range e.Variables {
		name, value, _ := strings.Cut(v, "=")
		words = append(words, name+"="+quoted(value))
	}
	words = append(words, "attn")
	for _, a := range e.Args {
		words = append(words, quoted(a))
	}
	return strings.Join(words, " ")
}

// quoted quotes a word unless a shell reads it unchanged.
func quoted(word string) string {
	special := func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-_=.,:/+@%", c))
	}
	if word != "" && !strings.ContainsFunc(word, special) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
