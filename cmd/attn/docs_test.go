package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDocs checks the pages for readers: relative links lead to files, and each
// go test command names packages, tests and fuzz targets that exist.
func TestDocs(t *testing.T) {
	root := filepath.Join("..", "..")
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	links, commands := 0, 0
	for _, page := range append(pages, filepath.Join(root, "README.md"), filepath.Join(root, "CONTRIBUTING.md")) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`).FindAllStringSubmatch(string(text), -1) {
			links++
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s: link to %s: %v", page, m[1], err)
			}
		}
		for _, m := range regexp.MustCompile("(?m)go test ([^`\n]+)").FindAllStringSubmatch(string(text), -1) {
			commands++
			for _, problem := range missingTests(t, root, m[1]) {
				t.Errorf("%s: go test %s: %s", page, m[1], problem)
			}
		}
	}
	if links < 20 || commands < 30 {
		t.Errorf("%d links and %d commands: the pages are not read as they are written", links, commands)
	}
}

// missingTests returns what the arguments of go test name and the tree does not contain.
func missingTests(t *testing.T, root, args string) (problems []string) {
	fields := strings.Fields(strings.ReplaceAll(args, `\|`, "|")) // | is escaped in tables
	var names, packages []string
	for i, arg := range fields {
		switch {
		case (arg == "-run" || arg == "-bench" || arg == "-fuzz") && i+1 < len(fields):
			if pattern := strings.Trim(fields[i+1], "'"); pattern != "^$" {
				names = append(names, strings.Split(strings.Split(pattern, "/")[0], "|")...)
			}
		case strings.HasPrefix(arg, "./"):
			packages = append(packages, arg)
		}
	}
	var functions []string
	for _, p := range packages {
		dir, deep := strings.CutSuffix(p, "/...")
		before := len(functions)
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() && !deep && path != filepath.Join(root, dir) {
				return filepath.SkipDir
			}
			if !strings.HasSuffix(path, "_test.go") {
				return nil
			}
			text, err := os.ReadFile(path)
			for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)\w+)\(`).FindAllStringSubmatch(string(text), -1) {
				functions = append(functions, m[1])
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(functions) == before {
			problems = append(problems, p+" has no tests")
		}
	}
	for _, name := range names {
		if len(packages) > 0 && !regexp.MustCompile(name).MatchString(strings.Join(functions, "\n")) {
			problems = append(problems, "no test is named "+name)
		}
	}
	return problems
}
