package gpu

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest"
)

// TestDigests holds the output bits on the software driver to those that were recorded
// on that driver's version: compilers order sums as they like.
func TestDigests(t *testing.T) {
	b := open(t, Options{})
	t.Cleanup(func() { b.Close() })
	info := b.Info()
	t.Logf("%+v", info)
	name := strings.ToLower(strings.NewReplacer(" ", "-", "(", "", ")", "", ",", "", "/", "-").Replace(info.Device))
	backendtest.Digest(t, b, filepath.Join("testdata", "digests-"+name+".txt"))
}
