package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seed90331342/attn/cmd/internal/notice"
)

// licences lists the modules and the data that the commands and the tests link. Each licence
// permits use in an MIT-licensed program.
var licences = map[string]string{
	"codeberg.org/go-fonts/liberation":         "BSD-3-Clause, the fonts OFL-1.1",
	"codeberg.org/go-latex/latex":              "BSD-3-Clause",
	"codeberg.org/go-pdf/fpdf":                 "MIT",
	"git.sr.ht/~sbinet/gg":                     "MIT",
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
	"github.com/x448/float16":                  "MIT",
	"go.uber.org/goleak":                       "MIT",
	"golang.org/x/image":                       "BSD-3-Clause",
	"golang.org/x/sys":                         "BSD-3-Clause",
	"golang.org/x/term":                        "BSD-3-Clause",
	"golang.org/x/text":                        "BSD-3-Clause",
	"gonum.org/v1/gonum":                       "BSD-3-Clause",
	"gonum.org/v1/plot":                        "BSD-3-Clause",
	"stories260K":                              "MIT",
	"pgregory.net/rapid":                       "MPL-2.0, in tests only",
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

// TestLicences holds every linked module to the list of licences, and each module's own text
// to the entry.
func TestLicences(t *testing.T) {
	modules := notice.Linked(t, "-test", "../../...")
	for path, dir := range modules {
		entry, ok := licences[path]
		if !ok {
			t.Errorf("%s is linked, but has no entry in licences: read its licence and add it", path)
			continue
		}
		text := notice.Text(t, dir)
		for name, phrase := range notice.Phrases {
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
	dir := notice.Linked(t, ".")["github.com/rajveermalviya/go-webgpu/wgpu"]
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
	var head strings.Builder
	fmt.Fprint(&head, `attn is distributed under the MIT licence (file LICENSE). Its binaries, attn and stories,
contain the works below, under their own licences. The modules cmd/attn-beam and cmd/attn-onnx
have a NOTICE of their own.
Generated by go test ./cmd/attn -run Notice -update.

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
	notice.Compare(t, "../../NOTICE", head.String(), notice.Linked(t, ".", "../stories"), func(path string) string { return licences[path] }, *update)
}
