//go:build ignore

// Command bills checks the bill of materials of each archive in the current folder, a release of the
// VERSION in its first argument: it has the modules of the binary in that archive, as the linker
// recorded them, and no others. Each has its version, its hash, and a licence that NOTICE, the second
// argument, has for it.
package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

type component struct {
	Name, Version string
	Hashes        []struct{ Content string }
	Evidence      struct {
		Licenses []struct{ License struct{ ID string } }
	}
}

type bill struct {
	BOMFormat  string
	Metadata   struct{ Component component }
	Components []component
}

// noticed has the licences of each module by the NOTICE of the release.
var noticed = map[string][]string{}

func main() {
	log.SetFlags(0)
	for _, m := range regexp.MustCompile(`(?m)^== (\S+) \((.+)\)$`).FindAllSubmatch(get(os.ReadFile(os.Args[2])), -1) {
		noticed[string(m[1])] = strings.Split(string(m[2]), ", ")
	}
	archives := append(get(filepath.Glob("*.tar.gz")), get(filepath.Glob("*.zip"))...)
	for _, archive := range archives {
		name := strings.TrimSuffix(strings.TrimSuffix(archive, ".tar.gz"), ".zip")
		if err := check(binary(archive), get(os.ReadFile(name+".cdx.json")), os.Args[1]); err != nil {
			log.Fatalf("%s: %v", archive, err)
		}
	}
	if len(archives) != 10 {
		log.Fatalf("%d archives, there should be 6 of attn and 4 of attn-cpu", len(archives))
	}
	fmt.Printf("ok: %d bills have the modules of their binaries\n", len(archives))
}

// check compares a bill with the modules in a binary.
func check(program, text []byte, version string) error {
	info := get(buildinfo.Read(bytes.NewReader(program)))
	var b bill
	if err := json.Unmarshal(text, &b); err != nil || b.BOMFormat != "CycloneDX" {
		return fmt.Errorf("the bill is of format %q, %v", b.BOMFormat, err)
	}
	if main := b.Metadata.Component; main.Name != info.Main.Path || main.Version != version || info.Main.Version != version {
		return fmt.Errorf("the bill is of %s %s, the binary of %s %s, should be %s", main.Name, main.Version, info.Main.Path, info.Main.Version, version)
	}
	listed := map[string]bool{}
	for _, c := range b.Components {
		if listed[c.Name+" "+c.Version] = true; c.Name == "std" {
			continue // Go's own library, without hash and licence
		}
		if len(c.Hashes) == 0 || len(c.Evidence.Licenses) == 0 {
			return fmt.Errorf("%s has no hash or no licence", c.Name)
		}
		if id := c.Evidence.Licenses[0].License.ID; !slices.Contains(noticed[c.Name], id) {
			return fmt.Errorf("%s has the licence %q, in NOTICE %q", c.Name, id, noticed[c.Name])
		}
	}
	modules := []string{"std " + info.GoVersion}
	for _, m := range info.Deps {
		modules = append(modules, m.Path+" "+m.Version)
	}
	for _, m := range modules {
		if !listed[m] {
			return fmt.Errorf("the bill lacks %s", m)
		}
		delete(listed, m)
	}
	if len(listed) > 0 {
		return fmt.Errorf("the binary does not have %v", listed)
	}
	return nil
}

// binary returns the program in an archive.
func binary(archive string) []byte {
	if strings.HasSuffix(archive, ".zip") {
		return get(fs.ReadFile(get(zip.OpenReader(archive)), "attn.exe"))
	}
	files := tar.NewReader(get(gzip.NewReader(get(os.Open(archive)))))
	for get(files.Next()).Name != "attn" {
	}
	return get(io.ReadAll(files))
}

func get[T any](x T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return x
}
