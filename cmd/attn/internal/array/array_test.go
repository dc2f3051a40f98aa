package array

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestHeaderForms reads the headers of other writers: without spaces, keys in another
// order, double quotes, Python 2's long integers.
func TestHeaderForms(t *testing.T) {
	for _, text := range []string{
		"{'descr':'<f4','fortran_order':False,'shape':(2,3)}",
		`{"shape": (2, 3), "fortran_order": False, "descr": "<f4"}   `,
		"{'shape': (2L, 3L), 'fortran_order': False, 'descr': '<f4', 'more': [1, [2]]}",
	} {
		text += "\n"
		path := filepath.Join(t.TempDir(), "x.npy")
		head := append([]byte("\x93NUMPY\x01\x00"), byte(len(text)), 0)
		must.Do(t, os.WriteFile(path, slices.Concat(head, []byte(text), make([]byte, 24)), 0o600))
		n, err := Open("x", path, false)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if !slices.Equal(n.Shape, []int{2, 3}) || n.Size != 4 {
			t.Errorf("%s: shape %v of %s", text, n.Shape, n.TypeName())
		}
	}
}
