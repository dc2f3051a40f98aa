package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// TestDocs checks that each go test command of the pages for readers runs something: its packages
// have tests, benchmarks or fuzz targets of the names it gives. Relative links lead to files.
func TestDocs(t *testing.T) {
	root := filepath.Join("..", "..")
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	clitest.NoError(t, err)
	for _, page := range append(pages, filepath.Join(root, "README.md"), filepath.Join(root, "CONTRIBUTING.md")) {
		text := clitest.ReadFile(t, page)
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`).FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s: link to %s: %v", page, m[1], err)
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

// functionsOf returns the names of the test functions of a package or, with /..., below it, a
// line each.
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
		for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)\w+)\(`).FindAllStringSubmatch(string(text), -1) {
			names += m[1] + "\n"
		}
		return err
	})
	if err != nil || names == "" {
		t.Errorf("%s has no tests, %v", pattern, err)
	}
	return names
}
