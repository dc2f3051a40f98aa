package kernels_test

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/build"
	"go/doc"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var updateAPI = flag.Bool("update", false, "write docs/api.txt instead of comparing it")

// TestAPI: docs/api.txt has every exported name of the packages that a program can import, so
// that none appears or disappears unnoticed. It is that of linux/amd64 with cgo.
func TestAPI(t *testing.T) {
	const file = "../docs/api.txt"
	var got bytes.Buffer
	must.Do(t, filepath.WalkDir("..", func(dir string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		_, nested := os.Stat(filepath.Join(dir, "go.mod"))
		if name := d.Name(); dir != ".." && (nested == nil || name == "internal" || name == "cmd" || name == "testdata" || strings.ContainsAny(name[:1], "._")) {
			return fs.SkipDir
		}
		return writeAPI(&got, dir)
	}))
	if *updateAPI {
		must.Do(t, os.WriteFile(file, got.Bytes(), 0o644))
	}
	want := must.Get(os.ReadFile(file))(t)
	was := strings.Split(string(want), "\n")
	for i, line := range strings.Split(got.String(), "\n") {
		if i >= len(was) || line != was[i] {
			t.Fatalf("line %d of docs/api.txt differs, now it is %q: go test ./kernels -run TestAPI -update writes the file", i+1, line)
		}
	}
	if got.Len() != len(want) {
		t.Error("docs/api.txt has lines too many: go test ./kernels -run TestAPI -update writes the file")
	}
}

// writeAPI writes the declarations of the package in dir, if it has one that can be imported and is not of tests alone.
func writeAPI(to *bytes.Buffer, dir string) error {
	platform := build.Default
	platform.GOOS, platform.GOARCH, platform.CgoEnabled, platform.BuildTags = "linux", "amd64", true, nil
	found, err := platform.ImportDir(dir, 0)
	if _, none := err.(*build.NoGoError); none || err == nil && (found.Name == "main" || len(found.GoFiles) == 0) {
		return nil
	}
	if err != nil {
		return err
	}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range append(found.GoFiles, found.CgoFiles...) {
		f, err := parser.ParseFile(fset, filepath.Join(dir, name), nil, 0)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	rel, err := filepath.Rel("..", dir)
	if err != nil {
		return err
	}
	p, err := doc.NewFromFiles(fset, files, "attn/"+filepath.ToSlash(rel))
	if err != nil {
		return err
	}
	fmt.Fprintf(to, "package %s\n\n", p.ImportPath)
	decl := func(d ast.Decl) {
		if f, ok := d.(*ast.FuncDecl); ok {
			f.Body = nil
		}
		var text bytes.Buffer
		(&printer.Config{Mode: printer.UseSpaces, Tabwidth: 4}).Fprint(&text, fset, d)
		fmt.Fprintln(to, strings.ReplaceAll(text.String(), "\n\n", "\n"))
	}
	values := func(all []*doc.Value) {
		for _, v := range all {
			decl(v.Decl)
		}
	}
	functions := func(all []*doc.Func) {
		for _, f := range all {
			decl(f.Decl)
		}
	}
	values(p.Consts)
	values(p.Vars)
	functions(p.Funcs)
	for _, t := range p.Types {
		decl(t.Decl)
		values(t.Consts)
		values(t.Vars)
		functions(t.Funcs)
		functions(t.Methods)
	}
	to.WriteByte('\n')
	return nil
}

// TestModules lists the modules that programs without a GPU download, those that import any of kernels, the packages
// below it and cpu. go mod tidy loads the packages that a program needs and the imports of their tests, but not the
// tests of packages that only tests import. Tests in other modules are not looked at here. The GPU's libraries have 137
// MB: tests that need one are in kernels/internal/fronttest, which nothing imports, in gpu, bench and cmd.
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

// TestReadmeHoldsTheExample: README contains the program of Example, which also imports gpu there: see TestModules.
func TestReadmeHoldsTheExample(t *testing.T) {
	example := must.Get(os.ReadFile("example_test.go"))(t)
	readme := must.Get(os.ReadFile("../README.md"))(t)
	want := strings.NewReplacer("package kernels_test", "package main", "func Example()", "func main()",
		" // and attn/gpu, for a GPU\n", "\n\t_ \"github.com/seed90331342/attn/gpu\"\n").Replace(string(example))
	want = regexp.MustCompile(`(?m)^\t// Output: (.*)$`).ReplaceAllString(want, "\t// prints $1")
	if !strings.Contains(string(readme), "```go\n"+want+"```") {
		t.Errorf("README.md does not hold this program:\n%s", want)
	}
}
