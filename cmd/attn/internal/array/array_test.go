package array

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cmd/attn/internal/cli/clitest"
)

// FuzzHeader reads hostile headers: no panic, and a returned shape agrees with the
// size of the file.
func FuzzHeader(f *testing.F) {
	f.Add(clitest.RawNPY(clitest.Dict("<f4", false, 2, 3), make([]byte, 24)))
	f.Add(clitest.RawNPY(clitest.Dict("|b1", false, 3), make([]byte, 3)))
	f.Add(clitest.RawNPY("{'descr': [('a', '<f4')], 'fortran_order': True, 'shape': (3L,), }", nil))
	f.Add([]byte("\x93NUMPY\x03\x00\x04\x00\x00\x00{}()"))
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(t.TempDir(), "x.npy")
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		n, err := Open("x", path, true)
		if err != nil {
			return
		}
		if clitest.Elements(n.Shape) != n.Count || int(n.Start)+n.Count*n.Size != len(content) {
			t.Errorf("shape %v, %d elements from byte %d of %d", n.Shape, n.Count, n.Start, len(content))
		}
	})
}

// TestHeaderForms reads the headers of other writers: without spaces, keys in another
// order, double quotes, Python 2's long integers.
func TestHeaderForms(t *testing.T) {
	for _, text := range []string{
		"{'descr':'<f4','fortran_order':False,'shape':(2,3)}",
		`{"shape": (2, 3), "fortran_order": False, "descr": "<f4"}   `,
		"{'shape': (2L, 3L), 'fortran_order': False, 'descr': '<f4', 'more': [1, [2]]}",
	} {
		path := clitest.WriteFile(t, t.TempDir(), "x.npy", clitest.RawNPY(text, make([]byte, 24)))
		n, err := Open("x", path, false)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if !slices.Equal(n.Shape, []int{2, 3}) || n.Size != 4 {
			t.Errorf("%s: shape %v of %s", text, n.Shape, n.TypeName())
		}
	}
}
