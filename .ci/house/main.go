// House prints how large the tree is, room by room: hand-written lines of Go and WGSL without
// tests, files of the largest package, exported names, each with its ceiling, and the files and
// functions that one causal call passes through. Run it at the root of the repository.
package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log"
	"maps"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
)

const module = "github.com/seed90331342/attn/"

// room is a part of the tree and the number of lines that it may have.
type room struct {
	of      string // one package, or with /... a package and those below it that no room above holds
	ceiling int
}

// rooms hold every hand-written line of the main module, each line once.
var rooms = []room{
	{"kernels", 3300},
	{"kernels/kvcache", 1800},
	{"kernels/nn", 2300},
	{"kernels/internal/...", 2600},
	{"kernels/...", 650}, // npy and safetensors
	{"backend", 2200},
	{"backend/oracle", 800},
	{"backend/internal/...", 450},
	{"cpu", 2200},
	{"cpu/internal/vec", 1700},
	{"cpu/internal/...", 3800},
	{"shaders/...", 5800},
	{"gpu", 3600},
	{"gpu/internal/cut", 1400},
	{"gpu/internal/queue", 2300},
	{"gpu/internal/port/...", 3800},
	{"gpu/internal/tune", 1500},
	{"gpu/internal/...", 1800},
	{"bench/...", 5000},
	{"cmd/attn/...", 5000},
	{"cmd/internal/...", 2300},
	{"cmd/...", 2000}, // attn-web and the example programs
}

// maxFiles is the number of files of a package, without tests, that can be taken in at once.
const maxFiles = 15

func main() {
	if err := house(); err != nil {
		log.Fatal(err)
	}
}

func house() error {
	tracked, err := exec.Command("git", "ls-files", "*.go", "*.wgsl").Output()
	if err != nil {
		return fmt.Errorf("git ls-files, which needs a clone: %w", err)
	}
	counts := map[string]*count{} // by folder
	total := map[string]int{}     // lines by kind
	for _, file := range strings.Fields(string(tracked)) {
		src, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		lines := bytes.Count(src, []byte("\n"))
		kind := kindOf(file, src)
		total[kind] += lines
		if kind != byHand {
			continue
		}
		c := counts[path.Dir(file)]
		if c == nil {
			c = new(count)
			counts[path.Dir(file)] = c
		}
		c.lines += lines
		if path.Ext(file) == ".go" {
			c.files++
		}
		names, err := exported(file, src)
		if err != nil {
			return err
		}
		c.exported += names
	}

	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "room\tlines\tceiling\tover\tfiles\texported")
	taken := map[string]bool{}
	for _, r := range rooms {
		var sum count
		for dir, c := range counts {
			if taken[dir] || !r.holds(dir) {
				continue
			}
			taken[dir] = true
			sum.lines += c.lines
			sum.exported += c.exported
			sum.files = max(sum.files, c.files)
		}
		over := ""
		if r.ceiling > 0 && sum.lines > r.ceiling {
			over = fmt.Sprint(sum.lines - r.ceiling)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%d\t%d\n", r.of, sum.lines, r.ceiling, over, sum.files, sum.exported)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Println()
	for _, kind := range []string{byHand, modules, tests, kit, generators, generated} {
		fmt.Printf("%-12s %d lines\n", kind, total[kind])
	}
	for _, dir := range slices.Sorted(maps.Keys(counts)) {
		if n := counts[dir].files; n > maxFiles {
			fmt.Printf("%s has %d files: at most %d\n", dir, n, maxFiles)
		}
	}
	fmt.Println()
	for _, backend := range []string{"cpu", "gpu"} {
		if err := way(backend); err != nil {
			fmt.Printf("one causal call on %s: not counted: %v\n", backend, err)
		}
	}
	return nil
}

// count is what a folder has, or a room: of a room, files are those of its largest package.
type count struct{ lines, files, exported int }

// The kinds of source files.
const (
	byHand     = "by hand"
	modules    = "modules"
	tests      = "tests"
	kit        = "kits of tests"
	generators = "generators"
	generated  = "generated"
)

func kindOf(file string, src []byte) string {
	in := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains("/"+file, "/"+p) })
	}
	switch {
	case bytes.Contains(src[:min(len(src), 500)], []byte("Code generated ")):
		return generated
	case strings.HasSuffix(file, "_test.go"), in("kernels/internal/fronttest/"):
		return tests
	case in("_generate/", ".ci/"):
		return generators
	case in("kernels/kernelstest/", "cmd/internal/pagetest/", "cmd/internal/cli/clitest/", "bench/peers/", "testdata/"):
		return kit
	case in("cmd/attn-beam/", "cmd/attn-onnx/", "kernels/adapters/"):
		return modules
	}
	return byHand
}

// exported counts the names that a Go file declares for other packages: functions, types,
// constants, variables, methods of exported types.
func exported(file string, src []byte) (n int, err error) {
	if path.Ext(file) != ".go" {
		return 0, nil
	}
	f, err := parser.ParseFile(token.NewFileSet(), file, src, parser.SkipObjectResolution)
	if err != nil {
		return 0, err
	}
	if !ast.FileExports(f) || f.Name.Name == "main" {
		return 0, nil
	}
	for _, decl := range f.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			n++
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					n++
				case *ast.ValueSpec:
					n += len(s.Names)
				}
			}
		}
	}
	return n, nil
}

func (r room) holds(dir string) bool {
	tree, all := strings.CutSuffix(r.of, "/...")
	return dir == tree || all && strings.HasPrefix(dir, tree+"/")
}

// way prints how many files and functions of attn one call passes through, beyond those that
// opening the backend and allocating the operands need.
func way(backend string) error {
	dir, err := os.MkdirTemp("", "house")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	walk := path.Join(dir, "walk")
	if err := run(nil, "go", "build", "-cover", "-coverpkg="+module+"...", "-o", walk, "./.ci/house/walk"); err != nil {
		return err
	}
	passed := func(name string, args ...string) (map[string]bool, error) {
		data := path.Join(dir, name)
		if err := os.Mkdir(data, 0o700); err != nil {
			return nil, err
		}
		if err := run([]string{"GOCOVERDIR=" + data}, walk, args...); err != nil {
			return nil, err
		}
		out, err := exec.Command("go", "tool", "covdata", "func", "-i", data).Output()
		if err != nil {
			return nil, err
		}
		// A line is file:line: function percent%.
		functions := map[string]bool{}
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(line, module) && f[2] != "0.0%" {
				functions[f[0]] = true
			}
		}
		return functions, nil
	}
	before, err := passed("before", backend, "stop")
	if err != nil {
		return err
	}
	after, err := passed("after", backend)
	if err != nil {
		return err
	}
	maps.DeleteFunc(after, func(f string, _ bool) bool { return before[f] })
	files := map[string]bool{}
	for f := range after {
		name, _, _ := strings.Cut(f, ":")
		files[name] = true
	}
	fmt.Printf("one causal call on %s passes through %d files, %d functions\n", backend, len(files), len(after))
	return nil
}

// run runs a command with more environment. Its error has what the command printed.
func run(env []string, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(out))
	}
	return nil
}
