package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
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
// than any machine's memory: they are holes.
func TestRunBeyondMemory(t *testing.T) {
	dir := t.TempDir()
	head := rawNPY(dict("<f4", false, 1<<34, 64), nil)
	x := writeFile(t, dir, "x.npy", head)
	if err := os.Truncate(x, int64(len(head))+1<<42); err != nil {
		t.Skipf("this file system has no files of 4 TiB: %v", err)
	}
	code, stdout, stderr := attn(t, "run", "--backend=cpu", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy")
	wantFailure(t, code, stdout, stderr, "the inputs take 12 TiB in memory, the machine has")
}
