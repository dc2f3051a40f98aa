package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// FuzzHeader reads headers as hostile as the fuzzer makes them: no panic, and a
// shape that comes back agrees with the size of the file.
func FuzzHeader(f *testing.F) {
	f.Add(rawNPY(dict("<f4", false, 2, 3), make([]byte, 24)))
	f.Add(rawNPY(dict("|b1", false, 3), make([]byte, 3)))
	f.Add(rawNPY("{'descr': [('a', '<f4')], 'fortran_order': True, 'shape': (3L,), }", nil))
	f.Add([]byte("\x93NUMPY\x03\x00\x04\x00\x00\x00{}()"))
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(t.TempDir(), "x.npy")
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		n, err := openNPY("x", path, true)
		if err != nil {
			return
		}
		if elements(n.Shape) != n.Count || int(n.Start)+n.Count*n.Size != len(content) {
			t.Errorf("shape %v, %d elements from byte %d of %d", n.Shape, n.Count, n.Start, len(content))
		}
	})
}

// TestHeaderForms reads the headers that other writers make: without spaces,
// keys in another order, double quotes, Python 2's long integers.
func TestHeaderForms(t *testing.T) {
	for _, text := range []string{
		"{'descr':'<f4','fortran_order':False,'shape':(2,3)}",
		`{"shape": (2, 3), "fortran_order": False, "descr": "<f4"}   `,
		"{'shape': (2L, 3L), 'fortran_order': False, 'descr': '<f4', 'more': [1, [2]]}",
	} {
		path := writeFile(t, t.TempDir(), "x.npy", rawNPY(text, make([]byte, 24)))
		n, err := openNPY("x", path, false)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if !slices.Equal(n.Shape, []int{2, 3}) || n.Size != 4 {
			t.Errorf("%s: shape %v of %s", text, n.Shape, n.TypeName())
		}
	}
}

// TestRunBeyondMemory gives files that are as large as they say, and larger
// than any machine's memory: they are holes. Those of f8 must be converted in memory.
func TestRunBeyondMemory(t *testing.T) {
	dir := t.TempDir()
	head := rawNPY(dict("<f8", false, 1<<33, 64), nil)
	x := writeFile(t, dir, "x.npy", head)
	if err := os.Truncate(x, int64(len(head))+1<<42); err != nil {
		t.Skipf("this file system has no files of 4 TiB: %v", err)
	}
	code, stdout, stderr := attn(t, "run", "--backend=cpu", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy")
	wantFailure(t, code, stdout, stderr, "the inputs take 6 TiB in memory, the machine has")
}

// TestRunMapped reads the same numbers from a file that can be mapped and from
// those that cannot: of another byte order, at an odd place, of another type.
func TestRunMapped(t *testing.T) {
	dir := t.TempDir()
	data := normal(3, 40*8)
	for i := range data {
		data[i] = float64(backend.F16.Round(float32(data[i])))
	}
	head := func(descr string, start int) []byte {
		text := dict(descr, false, 40, 8)
		return rawNPY(text+strings.Repeat(" ", (start-11-len(text))), encode(descr, data))
	}
	var want []byte
	for _, f := range []struct {
		name, descr string
		start       int
		mapped      bool
	}{{"aligned", "<f4", 128, true}, {"odd", "<f4", 127, false}, {"big endian", ">f4", 128, false}, {"f8", "<f8", 128, false}, {"f2", "<f2", 128, false}} {
		x := writeFile(t, dir, "x.npy", head(f.descr, f.start))
		n, err := openNPY("x", x, false)
		if err != nil {
			t.Fatal(err)
		}
		if n.mappable(backend.F32) != f.mapped || int(n.Start) != f.start {
			t.Errorf("%s: begins at %d, mappable %t", f.name, n.Start, n.mappable(backend.F32))
		}
		if code, _, stderr := attn(t, "run", "--backend=cpu", "--dtype=f32", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy"); code != 0 {
			t.Fatalf("%s: %s", f.name, stderr)
		}
		got, err := os.ReadFile(dir + "/o.npy")
		if err != nil {
			t.Fatal(err)
		}
		if want == nil {
			want = got
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: another output", f.name)
		}
	}
}

// TestRunStreamed runs on a device that has room for none of the operands.
func TestRunStreamed(t *testing.T) {
	needBackend(t, "gpu")
	dir := t.TempDir()
	x := save(t, dir, "x.npy", "<f4", normal(5, 3000*64), 3000, 64) // 750 KiB
	args := func(out string) []string {
		return []string{"run", "--backend=gpu", "--q", x, "--k", x, "--v", x, "--causal", "--out", dir + "/" + out}
	}
	mustRun(t, args("resident.npy")...)
	t.Setenv("ATTN_GPU_MEMORY", "1MiB")
	plan := mustRun(t, append(args("o.npy"), "--plan")...)
	if !strings.Contains(plan, "streamed") || !strings.Contains(plan, "between host and device") {
		t.Errorf("the plan does not say that it streams:\n%s", plan)
	}
	mustRun(t, append(args("streamed.npy"), "--check")...)
	a, err := os.ReadFile(dir + "/resident.npy")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(dir + "/streamed.npy")
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("the streamed output differs, %v", err)
	}
	t.Setenv("ATTN_GPU_MEMORY", "lots")
	code, stdout, stderr := attn(t, args("o.npy")...)
	wantFailure(t, code, stdout, stderr, `ATTN_GPU_MEMORY is "lots"`)
}
