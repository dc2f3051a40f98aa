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
	"path/filepath"
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

// writeAPI writes the declarations of the package in dir, if it has one that can be imported and is
// not of tests alone.
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
