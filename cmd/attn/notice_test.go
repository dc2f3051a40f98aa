package main

import (
	"bytes"
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
)

// licences lists the modules and the data that the commands and the tests link. Each licence
// permits use in an MIT-licensed program.
var licences = map[string]string{
	"codeberg.org/go-fonts/liberation":         "BSD-3-Clause, the fonts OFL-1.1",
	"codeberg.org/go-latex/latex":              "BSD-3-Clause",
	"codeberg.org/go-pdf/fpdf":                 "MIT",
	"git.sr.ht/~sbinet/gg":                     "MIT",
	"github.com/aclements/go-moremath":         "BSD-3-Clause",
	"github.com/ajstarks/svgo":                 "CC-BY-4.0",
	"github.com/alecthomas/kong":               "MIT",
	"github.com/chromedp/cdproto":              "MIT",
	"github.com/chromedp/chromedp":             "MIT",
	"github.com/go-json-experiment/json":       "BSD-3-Clause",
	"github.com/go-webgpu/goffi":               "MIT",
	"github.com/gogpu/gpucontext":              "MIT",
	"github.com/gogpu/gputypes":                "MIT",
	"github.com/gogpu/naga":                    "MIT",
	"github.com/gogpu/wgpu":                    "MIT",
	"github.com/golang/freetype":               "FTL",
	"github.com/google/go-cmp":                 "BSD-3-Clause",
	"github.com/rajveermalviya/go-webgpu/wgpu": "Apache-2.0",
	"github.com/sbinet/npyio":                  "BSD-3-Clause",
	"github.com/tidwall/jsonc":                 "MIT",
	"github.com/x448/float16":                  "MIT",
	"go.uber.org/goleak":                       "MIT",
	"golang.org/x/image":                       "BSD-3-Clause",
	"golang.org/x/sys":                         "BSD-3-Clause",
	"golang.org/x/term":                        "BSD-3-Clause",
	"golang.org/x/text":                        "BSD-3-Clause",
	"gonum.org/v1/gonum":                       "BSD-3-Clause",
	"gonum.org/v1/plot":                        "BSD-3-Clause",
	"google.golang.org/protobuf":               "BSD-3-Clause",
	"stories260K":                              "MIT",
	"pgregory.net/rapid":                       "MPL-2.0, in tests only",
}

// phrases are what the text of each licence contains.
var phrases = map[string]string{
	"Apache-2.0":   "Apache License",
	"BSD-3-Clause": "Redistribution and use in source and binary forms",
	"CC-BY-4.0":    "Creative Commons Attribution 4.0 International Public License",
	"FTL":          "The FreeType License",
	"MIT":          "Permission is hereby granted, free of charge",
	"MPL-2.0":      "Mozilla Public License",
	"OFL-1.1":      "SIL OPEN FONT LICENSE Version 1.1",
}

// crates lists what the prebuilt wgpu-native library of the cgo build contains, with the
// licences that the crates' authors state.
var crates = map[string]string{
	"addr2line": "Apache-2.0 OR MIT", "adler": "0BSD OR MIT OR Apache-2.0", "ahash": "MIT OR Apache-2.0",
	"arrayvec": "MIT OR Apache-2.0", "ash": "MIT OR Apache-2.0", "base64": "MIT OR Apache-2.0",
	"bit-set": "MIT OR Apache-2.0", "bit-vec": "MIT OR Apache-2.0", "cfg-if": "MIT OR Apache-2.0",
	"codespan-reporting": "Apache-2.0", "compiler_builtins": "MIT OR Apache-2.0", "gimli": "MIT OR Apache-2.0",
	"glow": "MIT OR Apache-2.0 OR Zlib", "gpu-alloc": "MIT OR Apache-2.0", "gpu-descriptor": "MIT OR Apache-2.0",
	"hashbrown": "MIT OR Apache-2.0", "indexmap": "Apache-2.0 OR MIT", "khronos-egl": "MIT OR Apache-2.0",
	"libc": "MIT OR Apache-2.0", "log": "MIT OR Apache-2.0", "memchr": "Unlicense OR MIT",
	"miniz_oxide": "MIT OR Zlib OR Apache-2.0", "num-traits": "MIT OR Apache-2.0", "object": "Apache-2.0 OR MIT",
	"parking_lot": "MIT OR Apache-2.0", "parking_lot_core": "MIT OR Apache-2.0", "petgraph": "MIT OR Apache-2.0",
	"pp-rs": "BSD-3-Clause", "ron": "MIT OR Apache-2.0", "rustc-demangle": "MIT OR Apache-2.0",
	"serde": "MIT OR Apache-2.0", "smallvec": "MIT OR Apache-2.0", "termcolor": "Unlicense OR MIT",
	"unicode-width": "MIT OR Apache-2.0",
}

// linked returns the modules that the packages link, by path, each with its directory, and
// the folders of embedded data with a licence of their own. It unites the Linux builds with
// and without cgo, which have different WebGPU providers.
func linked(t *testing.T, args ...string) map[string]string {
	t.Helper()
	modules := map[string]string{}
	for _, cgo := range []string{"0", "1"} {
		cmd := exec.Command("go", append([]string{"list", "-deps",
			"-f", `{{$p := .}}{{with .Module}}{{if .Version}}{{.Path}}{{"\t"}}{{.Dir}}{{else}}{{range $p.EmbedFiles}}{{$p.Dir}}/{{.}}
{{end}}{{end}}{{end}}`}, args...)...)
		cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED="+cgo)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", cmd, err)
		}
		for line := range strings.Lines(string(out)) {
			path, dir, ok := strings.Cut(strings.TrimSpace(line), "\t")
			if ok {
				modules[path] = dir
			} else if dir = filepath.Dir(path); texts(t, dir) != "" {
				modules[filepath.Base(dir)] = dir
			} else if filepath.Ext(path) == ".bin" {
				t.Errorf("%s is embedded, but no licence is next to it", path)
			}
		}
	}
	return modules
}

// texts returns the licence files of a module: LICENSE, COPYING, NOTICE and variants.
func texts(t *testing.T, dir string) string {
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

// TestLicences holds every linked module to the list of licences, and each module's own text
// to the entry.
func TestLicences(t *testing.T) {
	modules := linked(t, "-test", "../../...")
	for path, dir := range modules {
		entry, ok := licences[path]
		if !ok {
			t.Errorf("%s is linked, but has no entry in licences: read its licence and add it", path)
			continue
		}
		text := texts(t, dir)
		for name, phrase := range phrases {
			if strings.Contains(entry, name) && !strings.Contains(text, phrase) {
				t.Errorf("%s: the list has %s, but its licence file does not contain %q", path, entry, phrase)
			}
		}
	}
	for path := range licences {
		if _, ok := modules[path]; !ok {
			t.Errorf("%s has an entry in licences, but nothing links it", path)
		}
	}
}

// TestCrates compares the list of crates with the paths that the compiler left in the
// prebuilt library.
func TestCrates(t *testing.T) {
	dir := linked(t, ".")["github.com/rajveermalviya/go-webgpu/wgpu"]
	library, err := os.ReadFile(filepath.Join(dir, "lib/linux/amd64/libwgpu_native.a"))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, m := range regexp.MustCompile(`registry/src/[^/]{1,60}/([A-Za-z0-9_-]{1,40})-[0-9]+\.[0-9]+`).FindAllSubmatch(library, -1) {
		found[string(m[1])] = true
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(found)), slices.Sorted(maps.Keys(crates))); diff != "" {
		t.Errorf("crates differ from the library's (- library, + list):\n%s", diff)
	}
}

// TestNotice compares NOTICE with what the binaries contain.
func TestNotice(t *testing.T) {
	var notice bytes.Buffer
	fmt.Fprint(&notice, `attn is distributed under the MIT licence (file LICENSE). Its binaries, attn and stories,
contain the works below, under their own licences.
Generated by go test ./cmd/attn -run Notice -update.

The default build contains one of the two WebGPU providers, with CGO_ENABLED=0 or the tag
gogpu the other: github.com/rajveermalviya/go-webgpu brings wgpu-native, a prebuilt
library in Rust.

== wgpu-native and its crates

wgpu-native, wgpu-core, wgpu-hal, wgpu-types, naga and the Rust standard library:
MIT OR Apache-2.0. Crates that the library names:

`)
	for _, name := range slices.Sorted(maps.Keys(crates)) {
		fmt.Fprintf(&notice, "  %-20s %s\n", name, crates[name])
	}
	modules := linked(t, ".", "../stories")
	owners := map[string][]string{}
	for path, dir := range modules {
		text := texts(t, dir)
		owners[text] = append(owners[text], path)
	}
	blocks := map[string]string{} // licence text by its first module
	for text, paths := range owners {
		slices.Sort(paths)
		blocks[paths[0]] = text
	}
	for _, first := range slices.Sorted(maps.Keys(blocks)) {
		text := blocks[first]
		fmt.Fprintln(&notice)
		for _, path := range owners[text] {
			fmt.Fprintf(&notice, "== %s (%s)\n", path, licences[path])
		}
		fmt.Fprintf(&notice, "\n%s\n", strings.TrimSpace(text))
	}
	const file = "../../NOTICE"
	if *update {
		if err := os.WriteFile(file, notice.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(have), notice.String()); diff != "" {
		t.Errorf("NOTICE is stale, run go test ./cmd/attn -run Notice -update:\n%.2000s", diff)
	}
}
