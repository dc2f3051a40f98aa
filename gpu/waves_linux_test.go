package gpu

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var updateWaves = flag.Bool("update-waves", false, "write testdata/waves.txt for the drivers of this machine instead of comparing it")

var wavesFile = filepath.Join("testdata", "waves.txt")

const wavesHead = "# Waves a SIMD of each kernel, by family of AMD GPUs and version of Mesa's compiler. TestCompiler compares\n" +
	"# them, and writes them with: ATTN_RADV=MANIFEST go test ./gpu -run TestCompiler -update-waves\n"

// waves is the table of testdata/waves.txt.
type waves struct {
	columns []string // FAMILY@VERSION
	rows    map[string][]string
}

func readWaves(t *testing.T) *waves {
	t.Helper()
	w := &waves{rows: map[string][]string{}}
	text, err := os.ReadFile(wavesFile)
	if err != nil && !*updateWaves {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 0 && f[0] == "kernel" {
			w.columns = f[1:]
		} else if len(f) > 0 && f[0] != "#" {
			w.rows[f[0]] = f[1:]
		}
	}
	return w
}

// check compares the waves of kernels with those of the column of the family. A column is for one
// version of the compiler.
func (w *waves) check(t *testing.T, family, version string, kernels []*compiledKernel) {
	t.Helper()
	i := slices.IndexFunc(w.columns, func(c string) bool { return strings.HasPrefix(c, family+"@") })
	if *updateWaves {
		if i < 0 {
			i = len(w.columns)
			w.columns = append(w.columns, "")
		}
		w.columns[i] = family + "@" + version
		for _, k := range kernels {
			row := w.rows[k.name]
			for len(row) < len(w.columns) {
				row = append(row, "-")
			}
			row[i] = strconv.Itoa(k.stats["Subgroups per SIMD"])
			w.rows[k.name] = row
		}
		return
	}
	if i < 0 || w.columns[i] != family+"@"+version {
		t.Logf("the waves for %s are not compared: %s has %q, this is Mesa %s", family, wavesFile, w.columns, version)
		return
	}
	for _, k := range kernels {
		row := w.rows[k.name]
		if len(row) <= i || row[i] == "-" {
			if !testing.Short() { // else kernels of several head sizes have other names
				t.Errorf("%s has no waves of %s for %s: run the test with -update-waves", wavesFile, k.name, family)
			}
			continue
		}
		if least, err := strconv.Atoi(row[i]); err != nil || k.stats["Subgroups per SIMD"] < least {
			t.Errorf("%s for %s: %d waves a SIMD, %s has %s", k.name, family, k.stats["Subgroups per SIMD"], wavesFile, row[i])
		}
	}
}

// write writes the table of kernels with -update-waves. Otherwise it reports rows of other kernels.
func (w *waves) write(t *testing.T, kernels []*compiledKernel) {
	t.Helper()
	if testing.Short() {
		return // some kernels are not compiled
	}
	var out bytes.Buffer
	line := func(name string, fields []string) {
		fmt.Fprintf(&out, "%-36s", name)
		for i, f := range fields {
			fmt.Fprintf(&out, " %-*s", len(w.columns[i]), f)
		}
		out.Truncate(len(bytes.TrimRight(out.Bytes(), " ")))
		out.WriteByte('\n')
	}
	out.WriteString(wavesHead)
	line("kernel", w.columns)
	for _, k := range kernels {
		line(k.name, w.rows[k.name])
		delete(w.rows, k.name)
	}
	if *updateWaves {
		check(t, os.WriteFile(wavesFile, out.Bytes(), 0o644))
		return
	}
	for name := range w.rows {
		t.Errorf("%s has %s, which is no kernel: run the test with -update-waves", wavesFile, name)
	}
}
