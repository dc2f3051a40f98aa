// Package version is the command attn version.
package version

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/seed90331342/attn/cmd/internal/cli"
)

// licences has a line PATH, tab, LICENCES for Go, each module that attn links with either WebGPU library, and each
// folder of a module or data set with a licence of its own. The tests of cmd/internal/notice write it.
//
//go:embed licences.tsv
var licences string

// Command is attn version.
type Command struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Report is the output of attn version --json.
type Report struct {
	Version  string   `json:"version"` // (devel) for a build without version control
	Revision string   `json:"revision,omitempty"`
	Modified bool     `json:"modified"` // files differed from the revision
	Go       string   `json:"go"`
	OS       string   `json:"os"`
	Arch     string   `json:"arch"`
	CGO      bool     `json:"cgo"`
	Licence  string   `json:"licence"`
	Modules  []Module `json:"modules"`
}

// Module is a module in the binary. Licences are those that its texts name; they are separated
// by commas where parts have different ones.
type Module struct {
	Path     string `json:"path"`
	Version  string `json:"version"`
	Licences string `json:"licences"`
}

// Run prints the version.
func (c *Command) Run(_ context.Context, out *cli.Streams) error {
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return errors.New("the binary was built without information about its modules")
	}
	r := report(build)
	if c.JSON {
		return out.PrintJSON(r)
	}
	_, err := out.Out.Write([]byte(r.text()))
	return err
}

// report describes a build.
func report(build *debug.BuildInfo) Report {
	r := Report{Version: build.Main.Version, Go: build.GoVersion, OS: runtime.GOOS, Arch: runtime.GOARCH, Licence: "MIT",
		Modules: []Module{{"Go's runtime and standard library", build.GoVersion, licencesOf("Go's runtime and standard library")}}}
	for _, s := range build.Settings {
		switch s.Key {
		case "vcs.revision":
			r.Revision = s.Value
		case "vcs.modified":
			r.Modified = s.Value == "true"
		case "CGO_ENABLED":
			r.CGO = s.Value == "1"
		}
	}
	for _, m := range build.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		r.Modules = append(r.Modules, Module{m.Path, m.Version, licencesOf(m.Path)})
	}
	return r
}

// licencesOf returns the licences of a module and of the folders in it, "unknown" for none.
func licencesOf(module string) string {
	var all []string
	for line := range strings.Lines(licences) {
		path, names, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if path == module || strings.HasPrefix(path, module+"/") {
			all = append(all, strings.Split(names, ", ")...)
		}
	}
	slices.Sort(all)
	if all = slices.Compact(all); len(all) == 0 {
		return "unknown"
	}
	return strings.Join(all, ", ")
}

// text formats the report.
func (r Report) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "attn %s, %s %s/%s, ", r.Version, r.Go, r.OS, r.Arch)
	if r.CGO {
		b.WriteString("with cgo\n")
	} else {
		b.WriteString("without cgo\n")
	}
	if r.Revision != "" {
		fmt.Fprintf(&b, "revision %s", r.Revision)
		if r.Modified {
			b.WriteString(", modified")
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "licence %s; the file NOTICE has the licences of the modules below\n\n", r.Licence)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, m := range r.Modules {
		fmt.Fprintf(w, "%s\t%s\t%s\n", m.Path, m.Version, m.Licences)
	}
	w.Flush() // cannot fail on a strings.Builder
	return b.String()
}
