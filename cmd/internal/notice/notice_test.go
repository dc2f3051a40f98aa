// Package notice compares the NOTICE files, and the table of attn version, with the licences of what binaries contain.
package notice

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var update = flag.Bool("update", false, "write the NOTICE files again")

// root is the folder of the project, cmds that of the commands.
const root, cmds = "../../../", root + "cmd/"

// phrases are what the text of each licence contains.
var phrases = map[string]string{
	"Apache-2.0":   "Apache License",
	"BSD-2-Clause": "Redistribution and use in source and binary forms",
	"BSD-3-Clause": "to endorse or promote products derived from",
	"CC-BY-4.0":    "Creative Commons Attribution 4.0 International Public License",
	"FTL":          "The FreeType License",
	"MIT":          "Permission is hereby granted, free of charge",
	"MPL-2.0":      "Mozilla Public License",
	"OFL-1.1":      "SIL OPEN FONT LICENSE Version 1.1",
}

// crates lists what the prebuilt wgpu-native libraries of the cgo builds contain, those for Linux,
// macOS or Windows, with the licences that the crates' authors state.
var crates = map[string]string{
	"addr2line": "Apache-2.0 OR MIT", "adler": "0BSD OR MIT OR Apache-2.0", "ahash": "MIT OR Apache-2.0",
	"arrayvec": "MIT OR Apache-2.0", "ash": "MIT OR Apache-2.0", "base64": "MIT OR Apache-2.0",
	"bit-set": "MIT OR Apache-2.0", "bit-vec": "MIT OR Apache-2.0", "cfg-if": "MIT OR Apache-2.0",
	"codespan-reporting": "Apache-2.0", "compiler_builtins": "MIT OR Apache-2.0", "core-foundation": "MIT OR Apache-2.0",
	"d3d12": "MIT OR Apache-2.0", "gimli": "MIT OR Apache-2.0",
	"glow": "MIT OR Apache-2.0 OR Zlib", "gpu-alloc": "MIT OR Apache-2.0", "gpu-descriptor": "MIT OR Apache-2.0",
	"hashbrown": "MIT OR Apache-2.0", "indexmap": "Apache-2.0 OR MIT", "khronos-egl": "MIT OR Apache-2.0",
	"libc": "MIT OR Apache-2.0", "libloading": "ISC", "log": "MIT OR Apache-2.0", "memchr": "Unlicense OR MIT", "metal": "MIT OR Apache-2.0",
	"miniz_oxide": "MIT OR Zlib OR Apache-2.0", "num-traits": "MIT OR Apache-2.0", "objc": "MIT", "object": "Apache-2.0 OR MIT",
	"parking_lot": "MIT OR Apache-2.0", "parking_lot_core": "MIT OR Apache-2.0", "petgraph": "MIT OR Apache-2.0",
	"pp-rs": "BSD-3-Clause", "range-alloc": "MIT OR Apache-2.0", "ron": "MIT OR Apache-2.0", "rustc-demangle": "MIT OR Apache-2.0",
	"serde": "MIT OR Apache-2.0", "smallvec": "MIT OR Apache-2.0", "termcolor": "Unlicense OR MIT",
	"unicode-width": "MIT OR Apache-2.0", "winapi-util": "Unlicense OR MIT", "windows-sys": "MIT OR Apache-2.0",
}

// TestLicences: each module that commands or tests link has a licence that is known.
func TestLicences(t *testing.T) { linked(t, cmds, "-test", "../...") }

// TestCrates compares the list of crates with the paths that the compiler left in the prebuilt libraries.
func TestCrates(t *testing.T) {
	dir := moduleDir(t, "github.com/rajveermalviya/go-webgpu/wgpu")
	found := map[string]bool{}
	for _, platform := range []string{"linux/amd64", "darwin/amd64", "darwin/arm64", "windows/amd64"} {
		library := must.Get(os.ReadFile(filepath.Join(dir, "lib", platform, "libwgpu_native.a")))(t)
		for _, m := range regexp.MustCompile(`registry[/\\]src[/\\][^/\\]{1,60}[/\\]([A-Za-z0-9_-]{1,40})-[0-9]+\.[0-9]+`).FindAllSubmatch(library, -1) {
			found[string(m[1])] = true
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(found)), slices.Sorted(maps.Keys(crates))); diff != "" {
		t.Errorf("crates differ from the libraries' (- libraries, + list):\n%s", diff)
	}
}

// modules are the commands and packages with a module and a NOTICE of their own.
var modules = []string{"cmd/attn-beam", "cmd/attn-onnx", "kernels/adapters/born", "kernels/adapters/gomlx"}

// TestModules: each module below the folders of commands and adapters is one of modules.
func TestModules(t *testing.T) {
	var files []string
	for _, pattern := range []string{"cmd/*/go.mod", "kernels/adapters/*/go.mod"} {
		some := must.Get(filepath.Glob(root + pattern))(t)
		files = append(files, some...)
	}
	for i := range files {
		files[i] = strings.TrimPrefix(filepath.ToSlash(filepath.Dir(files[i])), root)
	}
	if diff := cmp.Diff(modules, files); diff != "" {
		t.Errorf("(- listed, + in the tree):\n%s", diff)
	}
}

// TestNotice compares the NOTICE files with what binaries contain, each text under the licences
// that it names. It skips a module whose dependencies are not downloaded.
func TestNotice(t *testing.T) {
	// First those that the first page lists.
	for _, name := range modules {
		t.Run(name, func(t *testing.T) {
			compare(t, root+name+"/NOTICE", name+` is distributed under the MIT licence (file LICENSE of attn). A binary with it contains the
works below, under their own licences. NOTICE of attn, in the root folder, lists the crates of
wgpu-native, which the build with cgo contains. After each name are the licences that its text names.
Generated by go test ./cmd/internal/notice -update.
`, linked(t, root+name, "."))
		})
	}
	own := linked(t, cmds, "./attn", "./attn-web", "./recall", "./stories")
	var head, table strings.Builder
	fmt.Fprint(&head, `attn is distributed under the MIT licence (file LICENSE). Its binaries, attn, attn-web, recall and
stories, contain the works below, under their own licences. Those of other modules are listed
first, with their texts in NOTICE of each module. After each name are the licences that its text names.
Generated by go test ./cmd/internal/notice -update.

The default build contains one of the two WebGPU providers, with CGO_ENABLED=0 or the tag
gogpu the other: github.com/rajveermalviya/go-webgpu brings wgpu-native, a prebuilt
library in Rust.

Tests also run the npm package webgpu (Dawn and Tint, BSD-3-Clause). It is a tool of
tests, and no binary contains it.

== wgpu-native and its crates

wgpu-native, wgpu-core, wgpu-hal, wgpu-types, naga and the Rust standard library:
MIT OR Apache-2.0. Crates that the library names:

`)
	for _, name := range slices.Sorted(maps.Keys(crates)) {
		fmt.Fprintf(&head, "  %-20s %s\n", name, crates[name])
	}
	for _, name := range modules {
		text := must.Get(os.ReadFile(root + name + "/NOTICE"))(t)
		fmt.Fprintf(&head, "\n== %s contains in addition, with texts in %s/NOTICE\n\n", filepath.Base(name), name)
		var lines []string
		for _, m := range regexp.MustCompile(`(?m)^== (\S+) (\(.*\))$`).FindAllStringSubmatch(string(text), -1) {
			if own[m[1]] == "" {
				lines = append(lines, fmt.Sprintf("  %s %s\n", m[1], m[2]))
			}
		}
		slices.Sort(lines)
		fmt.Fprint(&head, strings.Join(lines, ""))
	}
	compare(t, root+"NOTICE", head.String(), own)
	for _, path := range slices.Sorted(maps.Keys(own)) {
		fmt.Fprintf(&table, "%s\t%s\n", path, names(own[path]))
	}
	golden(t, cmds+"attn/internal/version/licences.tsv", table.String())
}

// compare compares file with head and texts by path.
func compare(t *testing.T, file, head string, texts map[string]string) {
	t.Helper()
	want, done := head, map[string]bool{}
	for _, path := range slices.Sorted(maps.Keys(texts)) {
		text := texts[path]
		if done[text] {
			continue
		}
		done[text] = true
		want += "\n"
		for _, path := range slices.Sorted(maps.Keys(texts)) {
			if texts[path] == text {
				want += fmt.Sprintf("== %s (%s)\n", path, names(text))
			}
		}
		want += "\n" + strings.TrimSpace(text) + "\n"
	}
	golden(t, file, want)
}

// golden compares a file with its text, or writes it.
func golden(t *testing.T, file, want string) {
	t.Helper()
	if *update {
		must.Do(t, os.WriteFile(file, []byte(want), 0o644))
	}
	have, err := os.ReadFile(file)
	if err != nil || string(have) != want {
		t.Errorf("%s is stale, go test ./cmd/internal/notice -update writes it: %v", file, err)
	}
}

// linked returns the licence texts of the modules that the packages link, by path, and of the
// folders with licences of their own: those of linked packages and of embedded data. It unites the
// Linux builds with and without cgo, which have different WebGPU providers.
func linked(t *testing.T, dir string, args ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, cgo := range []string{"0", "1"} {
		cmd := exec.Command("go", append([]string{"list", "-deps",
			"-f", `{{$p := .}}{{with .Module}}{{if and .Version (not .Replace)}}{{.Path}}{{"\t"}}{{.Dir}}{{"\t"}}{{$p.Dir}}{{else}}{{range $p.EmbedFiles}}{{$p.Dir}}/{{.}}
{{end}}{{end}}{{end}}`}, args...)...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED="+cgo, "GOPROXY=off")
		if strings.Contains(dir, "adapters") { // not in the workspace
			cmd.Env = append(cmd.Env, "GOWORK=off")
		}
		out, err := cmd.Output()
		if err != nil && dir != cmds {
			t.Skipf("dependencies of %s are not downloaded: %v", dir, err)
		}
		must.Do(must.In(t, "%v", cmd), err)
		for line := range strings.Lines(string(out)) {
			f := strings.Split(strings.TrimSpace(line), "\t")
			if len(f) == 3 {
				found[f[0]] = licence(t, f[1])
				for dir := f[2]; len(dir) > len(f[1]); dir = filepath.Dir(dir) {
					if text := licence(t, dir); text != "" {
						found[f[0]+strings.TrimPrefix(dir, f[1])] = text
					}
				}
			} else if dir := filepath.Dir(f[0]); licence(t, dir) != "" {
				found[filepath.Base(dir)] = licence(t, dir)
			} else if filepath.Ext(f[0]) == ".bin" {
				t.Errorf("%s is embedded, but no licence is next to it", f[0])
			}
		}
	}
	// Go's own licence has this text. A distribution may keep it apart from the toolchain.
	found["Go's runtime and standard library"] = licence(t, moduleDir(t, "golang.org/x/sys"))
	for path, text := range found {
		if names(text) == "" {
			t.Errorf("%s has no licence that is known: read it, and add its phrase if it permits use in an MIT-licensed program", path)
		}
	}
	return found
}

// moduleDir returns the folder of a module that attn requires.
func moduleDir(t *testing.T, path string) string {
	t.Helper()
	dir := must.Get(exec.Command("go", "list", "-m", "-f", "{{.Dir}}", path).Output())(t)
	return strings.TrimSpace(string(dir))
}

// licence returns the licence files of a folder: LICENSE, COPYING, NOTICE, ATTRIB and variants.
func licence(t *testing.T, dir string) string {
	var all strings.Builder
	for _, pattern := range []string{"LICENSE*", "COPYING*", "NOTICE*", "ATTRIB*", "licenses/ftl.txt", "THIRD_PARTY_LICENSES/*"} {
		files := must.Get(filepath.Glob(filepath.Join(dir, pattern)))(t)
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil { // folders are matched by another pattern
				all.WriteString(strings.TrimSpace(strings.ReplaceAll(string(text), "\r\n", "\n")) + "\n\n")
			}
		}
	}
	return all.String()
}

// names returns the licences that a text names.
func names(text string) string {
	var names []string
	text = strings.Join(strings.Fields(text), " ")
	for name, phrase := range phrases {
		n := strings.Count(text, phrase)
		if name == "BSD-2-Clause" { // the texts of three clauses contain those of two
			n -= strings.Count(text, phrases["BSD-3-Clause"])
		}
		if n > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}
