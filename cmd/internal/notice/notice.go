// Package notice collects the licences of what commands link. Tests compare NOTICE files with
// them.
package notice

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Phrases are what the text of each licence contains.
var Phrases = map[string]string{
	"Apache-2.0":   "Apache License",
	"BSD-3-Clause": "Redistribution and use in source and binary forms",
	"CC-BY-4.0":    "Creative Commons Attribution 4.0 International Public License",
	"FTL":          "The FreeType License",
	"MIT":          "Permission is hereby granted, free of charge",
	"MPL-2.0":      "Mozilla Public License",
	"OFL-1.1":      "SIL OPEN FONT LICENSE Version 1.1",
}

// Linked returns the modules that the packages link, by path, each with its directory, and
// the folders with licences of their own: those of linked packages and of embedded data. It
// unites the Linux builds with and without cgo, which have different WebGPU providers.
func Linked(t testing.TB, args ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, cgo := range []string{"0", "1"} {
		cmd := exec.Command("go", append([]string{"list", "-deps",
			"-f", `{{$p := .}}{{with .Module}}{{if and .Version (not .Replace)}}{{.Path}}{{"\t"}}{{.Dir}}{{"\t"}}{{$p.Dir}}{{else}}{{range $p.EmbedFiles}}{{$p.Dir}}/{{.}}
{{end}}{{end}}{{end}}`}, args...)...)
		cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED="+cgo)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", cmd, err)
		}
		for line := range strings.Lines(string(out)) {
			f := strings.Split(strings.TrimSpace(line), "\t")
			if len(f) == 3 {
				found[f[0]] = f[1]
				for dir := f[2]; len(dir) > len(f[1]); dir = filepath.Dir(dir) {
					if Text(t, dir) != "" {
						found[f[0]+strings.TrimPrefix(dir, f[1])] = dir
					}
				}
			} else if dir := filepath.Dir(f[0]); Text(t, dir) != "" {
				found[filepath.Base(dir)] = dir
			} else if filepath.Ext(f[0]) == ".bin" {
				t.Errorf("%s is embedded, but no licence is next to it", f[0])
			}
		}
	}
	return found
}

// Text returns the licence files of a folder: LICENSE, COPYING, NOTICE and variants.
func Text(t testing.TB, dir string) string {
	t.Helper()
	var all strings.Builder
	for _, pattern := range []string{"LICENSE*", "COPYING*", "NOTICE*", "licenses/ftl.txt", "THIRD_PARTY_LICENSES/*"} {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil { // folders are matched by another pattern
				all.WriteString(strings.TrimSpace(strings.ReplaceAll(string(text), "\r\n", "\n")) + "\n\n")
			}
		}
	}
	return all.String()
}

// Compare compares file with head and the texts of what is linked, under the names that
// licence returns. With update it writes the file.
func Compare(t testing.TB, file, head string, linked map[string]string, licence func(path string) string, update bool) {
	t.Helper()
	owners := map[string][]string{}
	for _, path := range slices.Sorted(maps.Keys(linked)) {
		text := Text(t, linked[path])
		owners[text] = append(owners[text], path)
	}
	var want strings.Builder
	want.WriteString(head)
	for _, text := range slices.SortedFunc(maps.Keys(owners), func(x, y string) int { return strings.Compare(owners[x][0], owners[y][0]) }) {
		fmt.Fprintln(&want)
		for _, path := range owners[text] {
			fmt.Fprintf(&want, "== %s (%s)\n", path, licence(path))
		}
		fmt.Fprintf(&want, "\n%s\n", strings.TrimSpace(text))
	}
	if update {
		if err := os.WriteFile(file, []byte(want.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want.String() {
		t.Errorf("%s is stale, its first lines have the command that writes it", file)
	}
}
