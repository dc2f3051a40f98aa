package npy

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestMap maps bytes on both sides of a page's edge.
func TestMap(t *testing.T) {
	page := os.Getpagesize()
	content := make([]byte, 3*page)
	for i := range content {
		content[i] = byte(i * 7 / 5)
	}
	path := filepath.Join(t.TempDir(), "x")
	must.Do(t, os.WriteFile(path, content, 0o600))
	f := must.Get(os.Open(path))(t)
	defer f.Close()
	for _, c := range [][2]int{{0, 1}, {0, 3 * page}, {1, page}, {page - 1, 2}, {page, page}, {2*page + 3, page - 3}} {
		got, unmap, err := (&Header{Start: int64(c[0]), Count: c[1], Size: 1}).Map(f)
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip("this system maps no files")
		}
		must.Do(t, err)
		if !bytes.Equal(got, content[c[0]:c[0]+c[1]]) {
			t.Errorf("bytes %d to %d differ", c[0], c[0]+c[1])
		}
		unmap()
	}
}
