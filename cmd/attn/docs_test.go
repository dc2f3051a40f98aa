package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestDocs checks that each go test command of the pages for readers runs something: its packages
// have tests, benchmarks or fuzz targets of the names it gives. Relative links lead to files, and files that a
// page names by their path in the tree exist.
func TestDocs(t *testing.T) {
	root := filepath.Join("..", "..")
	pages := must.Get(filepath.Glob(filepath.Join(root, "docs", "*.md")))(t)
	guides := must.Get(filepath.Glob(filepath.Join(root, "docs", "guides", "*.md")))(t)
	pages = append(pages, guides...)
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/results/README.md"} {
		pages = append(pages, filepath.Join(root, name))
	}
	for _, page := range pages {
		text := clitest.ReadFile(t, page)
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`).FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s: link to %s: %v", page, m[1], err)
			}
		}
		for _, m := range regexp.MustCompile("`((?:kernels|cpu|gpu|shaders|backend|bench|cmd|docs|\\.ci)/[\\w./-]+\\.[a-z]+)`").FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				t.Errorf("%s names %s: %v", page, m[1], err)
			}
		}
		for _, m := range regexp.MustCompile("(?m)go test ([^`\n]+)").FindAllStringSubmatch(string(text), -1) {
			fields := strings.Fields(strings.ReplaceAll(m[1], `\|`, "|")) // | is escaped in tables
			var functions string
			for _, arg := range fields {
				if strings.HasPrefix(arg, "./") {
					functions += functionsOf(t, root, arg)
				}
			}
			for i, arg := range fields {
				if arg != "-run" && arg != "-bench" && arg != "-fuzz" || functions == "" {
					continue
				}
				pattern, _, _ := strings.Cut(strings.Trim(fields[i+1], "'"), "/")
				for name := range strings.SplitSeq(pattern, "|") {
					if name != "^$" && !regexp.MustCompile(name).MatchString(functions) {
						t.Errorf("%s: go test %s: no test is named %s", page, m[1], name)
					}
				}
			}
		}
	}
}

// TestMakeTargets: the Makefile has each target that the pages, the workflows and the scripts name,
// and lists it as phony.
func TestMakeTargets(t *testing.T) {
	root := filepath.Join("..", "..")
	text := string(clitest.ReadFile(t, filepath.Join(root, "Makefile")))
	phony := strings.Fields(regexp.MustCompile(`(?m)^\.PHONY: (.*)$`).FindStringSubmatch(text)[1])
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(text, -1) {
		if !slices.Contains(phony, m[1]) {
			t.Errorf("the target %s is not phony", m[1])
		}
	}
	n := 0
	for _, pattern := range []string{"*.md", "docs/*.md", ".github/workflows/*.yml", ".ci/*"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			if info, err := os.Stat(file); err != nil || info.IsDir() {
				continue
			}
			for _, m := range regexp.MustCompile("(?m)(?:`|run: |^ *)make ((?:[a-z-]+ ?)+)").FindAllStringSubmatch(string(clitest.ReadFile(t, file)), -1) {
				for _, target := range strings.Fields(m[1]) {
					n++
					if !regexp.MustCompile(`(?m)^` + target + `:`).MatchString(text) {
						t.Errorf("%s: the Makefile has no target %s", file, target)
					}
				}
			}
		}
	}
	if n < 20 {
		t.Errorf("found only %d commands of make", n)
	}
}

// TestChangelog: the sections of the changelog are Unreleased and then versions, the newest first down to v0.1.0, each
// with its date or the remark that it has no tag yet, which only the newest may have.
func TestChangelog(t *testing.T) {
	text := string(clitest.ReadFile(t, filepath.Join("..", "..", "CHANGELOG.md")))
	var sections []string
	for _, m := range regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(text, -1) {
		sections = append(sections, m[1])
	}
	if len(sections) < 2 || sections[0] != "Unreleased" {
		t.Fatalf("the sections are %q", sections)
	}
	released := regexp.MustCompile(`^v(\d+)\.(\d+)\.(\d+) - (\d{4}-\d\d-\d\d|not yet tagged)$`)
	var later []int
	for i, section := range sections[1:] {
		m := released.FindStringSubmatch(section)
		if m == nil || i > 0 && m[4] == "not yet tagged" {
			t.Fatalf("the section %q has neither version nor date, or is an old one without a tag", section)
		}
		var version []int
		for _, number := range m[1:4] {
			n := must.Get(strconv.Atoi(number))(t)
			version = append(version, n)
		}
		if later != nil && slices.Compare(version, later) >= 0 {
			t.Errorf("%s is below %v", section, later)
		}
		later = version
	}
	if !slices.Equal(later, []int{0, 1, 0}) {
		t.Errorf("the first version is %v", later)
	}
}

// TestAliases: the comments of package kernels name commands that find something, and one for each alias
// with methods or fields.
func TestAliases(t *testing.T) {
	code := string(clitest.ReadFile(t, "../../kernels/names.go"))
	found := regexp.MustCompile(`go\s+(?://\s+)?doc \./backend (\w+)(?:\.(\w+))?`).FindAllStringSubmatch(code, -1)
	if len(found) < 8 {
		t.Fatalf("only %v", found)
	}
	files := must.Get(filepath.Glob("../../backend/*.go"))(t)
	var declared string
	for _, file := range files {
		declared += string(clitest.ReadFile(t, file))
	}
	named := map[string]bool{}
	for _, m := range found {
		named[m[1]] = true
		doc := exec.Command("go", "doc", "./backend", strings.TrimSuffix(m[1]+"."+m[2], "."))
		doc.Dir = "../.."
		if out, err := doc.CombinedOutput(); err != nil {
			t.Errorf("%v: %v\n%s", doc.Args, err, out)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^type (\w+) += backend\.`).FindAllStringSubmatch(code, -1) {
		has := regexp.MustCompile(`(?m)^(type ` + m[1] + ` struct|func \(\w+ \*?` + m[1] + `\) [A-Z])`)
		if has.MatchString(declared) && !named[m[1]] {
			t.Errorf("no comment names go doc ./backend %s", m[1])
		}
	}
}

// functionsOf returns the names of the tests and examples of a package or, with /..., below it, a line each.
func functionsOf(t *testing.T, root, pattern string) (names string) {
	dir, deep := strings.CutSuffix(pattern, "/...")
	dir = filepath.Join(root, dir)
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() && !deep && path != dir {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz|Example)\w*)\(`).FindAllStringSubmatch(string(text), -1) {
			names += m[1] + "\n"
		}
		return err
	})
	if err != nil || names == "" {
		t.Errorf("%s has no tests, %v", pattern, err)
	}
	return names
}

// TestOSSFuzz: the build script for OSS-Fuzz has each fuzz target of the tree, and its seeds match files. Each target
// is as its compiler wants it: in the package itself, with a name that occurs in one file of the folder.
func TestOSSFuzz(t *testing.T) {
	root := filepath.Join("..", "..")
	var want []string
	must.Do(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text := string(clitest.ReadFile(t, path))
		for _, m := range regexp.MustCompile(`(?m)^func (Fuzz\w+)\(f \*testing\.F\)`).FindAllStringSubmatch(text, -1) {
			folder := must.Get(filepath.Rel(root, filepath.Dir(path)))(t)
			want = append(want, filepath.ToSlash(folder)+" "+m[1])
			if regexp.MustCompile(`(?m)^package \w+_test$`).MatchString(text) {
				t.Errorf("%s: %s is in a package of tests", path, m[1])
			}
			files := must.Get(filepath.Glob(filepath.Join(filepath.Dir(path), "*.go")))(t)
			for _, file := range files {
				if file != path && strings.Contains(string(clitest.ReadFile(t, file)), m[1]) {
					t.Errorf("%s contains the name %s of %s", file, m[1], path)
				}
			}
		}
		return nil
	}))
	var got []string
	script := string(clitest.ReadFile(t, filepath.Join(root, ".ci", "oss-fuzz", "build.sh")))
	for _, m := range regexp.MustCompile(`(?m)^target (\S+) (Fuzz\w+) '\S+' (.+)$`).FindAllStringSubmatch(script, -1) {
		got = append(got, m[1]+" "+m[2])
		for _, seeds := range strings.Fields(m[3]) {
			if name, ok := strings.CutPrefix(strings.Trim(seeds, `"`), "$made/"); ok {
				clitest.Contains(t, script, `>"$made/`+name+`"`)
			} else if files, err := filepath.Glob(filepath.Join(root, seeds)); err != nil || len(files) == 0 {
				t.Errorf("%s: no file is %s, %v", m[2], seeds, err)
			}
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("targets of .ci/oss-fuzz/build.sh (-tree +script):\n%s", diff)
	}
}
