package kernels_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestModules lists the modules that programs without a GPU download, those that import any of
// kernels, the packages below it and cpu. go mod tidy loads the packages that a program needs and
// the imports of their tests, but not the tests of packages that only tests import. Tests in other
// modules are not looked at here. The GPU's libraries have 137 MB: tests that need one are in
// kernels/internal/fronttest, which nothing imports, in gpu, bench and cmd.
func TestModules(t *testing.T) {
	want := []string{"github.com/sbinet/npyio", "github.com/seed90331342/attn", "github.com/x448/float16", "go.uber.org/goleak",
		"golang.org/x/sys", "gonum.org/v1/gonum", "pgregory.net/rapid"}
	var got []string
	for _, system := range []string{"linux", "windows", "darwin"} { // tidy loads the files of all systems
		list := func(arguments ...string) []string {
			cmd := exec.Command("go", append([]string{"list", "-deps"}, arguments...)...)
			cmd.Env, cmd.Stderr = append(os.Environ(), "GOOS="+system, "GOARCH=amd64", "CGO_ENABLED=0"), os.Stderr
			out := must.Get(cmd.Output())(must.In(t, "%v", cmd))
			return strings.Fields(string(out))
		}
		needed := list("-f", "{{with .Module}}{{if .Main}}{{$.ImportPath}}{{end}}{{end}}", ".", "./kvcache", "./nn", "./npy", "./safetensors", "../cpu")
		got = append(got, list(append([]string{"-test", "-f", "{{with .Module}}{{.Path}}{{end}}"}, needed...)...)...)
	}
	slices.Sort(got)
	if got = slices.Compact(got); !slices.Equal(got, want) {
		t.Errorf("programs need the modules\n%v, should need\n%v", got, want)
	}
}
