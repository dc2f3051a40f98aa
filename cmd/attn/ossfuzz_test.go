package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestOSSFuzz: the build script for OSS-Fuzz has each fuzz target of the tree, and its seeds match
// files. Each target is as its compiler wants it: in the package itself, with a name that occurs in
// one file of the folder.
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
