package report

import (
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/machine"
	"github.com/seed90331342/attn/bench/plain"
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
	// Version is this module's version. In a build of its repository it has the revision, and
	// "+dirty" where files differed from it.
	Version string `json:"version"`
	// Args are the command-line arguments that repeat the run, without "attn".
	Args []string `json:"args"`
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
	// Missing has a line for each backend that has no device, and for each device with matrix units that no
	// library reaches or that fused calls leave idle.
	Missing []string `json:"missing"`
}

// modulePath is this module among those that a program was built from.
const modulePath = "github.com/seed90331342/attn"

// affecting are prefixes of the environment variables that affect speed.
var affecting = []string{"ATTN_", "GOMAXPROCS=", "GOGC=", "GOMEMLIMIT=", "GODEBUG=", "VK_", "WGPU_"}

// ThisMachine returns the environment of the process at a time.
func ThisMachine(now time.Time) Environment {
	e := Environment{
		Date:      now.UTC().Format(time.RFC3339),
		GoVersion: runtime.Version(),
		OS:        runtime.GOOS,
		Arch:      runtime.GOARCH,
		CPU:       machine.CPU(),
		CPUs:      runtime.NumCPU(),
		Threads:   runtime.GOMAXPROCS(0),
		Backends:  []kernels.Info{},
		Missing:   []string{},
		Args:      []string{},
		Variables: []string{},
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
	e.CGO = slices.Contains(build.Settings, debug.BuildSetting{Key: "CGO_ENABLED", Value: "1"})
	for _, m := range append(build.Deps, &build.Main) {
		if m.Path == modulePath {
			e.Version = m.Version
		}
	}
}

// describe writes a device on a line.
func describe(b *kernels.Info) string {
	threads := ""
	if b.Threads > 0 {
		threads = format.Count(b.Threads, "thread")
	}
	return plain.Line(strings.Join(nonEmpty(b.Name, b.Device, b.Provider, b.Driver, threads), " · "))
}
