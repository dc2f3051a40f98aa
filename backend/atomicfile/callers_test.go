package atomicfile

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestAllFilesGoThroughHere: no other package of the module creates, replaces or renames
// files, and commands open their inputs in one package, which knows about pipes.
func TestAllFilesGoThroughHere(t *testing.T) {
	writes := []string{
		"Create", "CreateTemp", "WriteFile", "OpenFile", "Rename", "Link", "Symlink", "Truncate", "Remove", "RemoveAll", "Chmod", "Chown", "CopyFS", "OpenRoot",
	}
	reads := []string{"Open", "ReadFile", "OpenInRoot", "DirFS"}
	allowed := map[string][]string{
		"backend/backendtest/digest.go":              {"WriteFile"},                     // a test with -update-digests
		"backend/backendtest/recording/recording.go": {"WriteFile"},                     // a test with -update-recordings
		"bench/internal/machine/memory.go":           {"WriteFile"},                     // a file of /proc
		"cmd/attn/internal/cli/clitest/clitest.go":   {"WriteFile", "Open", "ReadFile"}, // of tests
		"cmd/attn/internal/files/files.go":           {"Open"},
		"cmd/attn/internal/onnx/onnx.go":             {"DirFS"},                 // lists names
		"cmd/internal/notice/notice.go":              {"WriteFile", "ReadFile"}, // tests with -update
	}
	root := filepath.Join("..", "..")
	checked := 0
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := e.Name(); e.IsDir() && path != root && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata") {
			return filepath.SkipDir // tools that write generated code are in folders with "_"
		}
		name, err := filepath.Rel(root, path)
		if name = filepath.ToSlash(name); err != nil || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "backend/atomicfile/") {
			return err
		}
		checked++
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, i := range f.Imports {
			if i.Path.Value == `"os"` && i.Name != nil || i.Path.Value == `"io/ioutil"` {
				t.Errorf("%s imports %s in a way that hides its calls", name, i.Path.Value)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			of, ok := call.X.(*ast.Ident)
			forbidden := slices.Contains(writes, call.Sel.Name) || strings.HasPrefix(name, "cmd/") && slices.Contains(reads, call.Sel.Name)
			if ok && of.Name == "os" && forbidden && !slices.Contains(allowed[name], call.Sel.Name) {
				t.Errorf("%v: os.%s: files are written by backend/atomicfile and read by cmd/attn/internal/files", set.Position(n.Pos()), call.Sel.Name)
			}
			return true
		})
		return nil
	})
	if err != nil || checked < 100 {
		t.Errorf("%d files were checked, %v", checked, err)
	}
}
