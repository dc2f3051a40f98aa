package version

import (
	"runtime/debug"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestReport describes builds with and without version control.
func TestReport(t *testing.T) {
	build := &debug.BuildInfo{GoVersion: "go1.26.8", Main: debug.Module{Path: "github.com/seed90331342/attn", Version: "v0.1.0"},
		Deps: []*debug.Module{
			{Path: "gonum.org/v1/gonum", Version: "v0.17.0"},
			{Path: "example.com/a", Version: "v1.0.0", Replace: &debug.Module{Path: "gonum.org/v1/plot", Version: "v0.17.0"}},
			{Path: "example.com/b", Version: "v1.2.3"},
		},
		Settings: []debug.BuildSetting{{Key: "CGO_ENABLED", Value: "1"}, {Key: "vcs.revision", Value: "0123abcd"}, {Key: "vcs.modified", Value: "true"}}}
	got := report(build)
	want := []Module{{"Go's runtime and standard library", "go1.26.8", "BSD-3-Clause"}, {"gonum.org/v1/gonum", "v0.17.0", "BSD-3-Clause, MIT"},
		{"gonum.org/v1/plot", "v0.17.0", "BSD-3-Clause"}, {"example.com/b", "v1.2.3", "unknown"}}
	if diff := cmp.Diff(want, got.Modules); diff != "" {
		t.Errorf("modules (-want +got):\n%s", diff)
	}
	text := got.text()
	for _, part := range []string{"attn v0.1.0, go1.26.8 ", ", with cgo\nrevision 0123abcd, modified\nlicence MIT; ", "gonum.org/v1/plot                  v0.17.0   BSD-3-Clause\n"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is missing from:\n%s", part, text)
		}
	}
	build.Settings, build.Main.Version = nil, "(devel)"
	if text := report(build).text(); !strings.Contains(text, "attn (devel), ") || !strings.Contains(text, ", without cgo\nlicence MIT; ") {
		t.Errorf("without version control:\n%s", text)
	}
}
