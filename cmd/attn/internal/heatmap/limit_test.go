package heatmap

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/pagetest"
)

// TestHeatmapLimits: a picture that is too large is refused before it is computed, and a
// long label with control characters is drawn.
func TestHeatmapLimits(t *testing.T) {
	dir := t.TempDir()
	x := clitest.Save(t, dir, "x.npy", "<f4", make([]float64, 2048), 2048, 1)
	mustFail(t, "--head names 200 heads … at most 16 million", "heatmap", "--backend=none", "--q", x, "--k", x, "--size=2048", "--png", dir+"/h.png", "--head", strings.Repeat("0,", 199)+"0")

	empty := clitest.Save(t, dir, "empty.npy", "<f4", nil, 0, 1)
	mustFail(t, "2048 queries and 0 keys: there is nothing to draw", "heatmap", "--backend=none", "--q", x, "--k", empty, "--png", dir+"/h.png")

	y := clitest.Save(t, dir, "y.npy", "<f4", []float64{1, 2}, 2, 1)
	labels := clitest.WriteFile(t, dir, "labels", []byte(strings.Repeat("w", 65000)+"\n\x1b[31m\xff\n"))
	// The page names the files.
	hostile := clitest.Save(t, dir, "y\x1b[2J\u202e.npy", "<f4", []float64{1, 2}, 2, 1)
	mustRun(t, "heatmap", "--backend=cpu", "--q", hostile, "--k", y, "--html", dir+"/h.html", "--svg", dir+"/h.svg")
	for _, name := range []string{"h.html", "h.svg"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || bytes.ContainsAny(text, "\x1b\u202e") || !bytes.Contains(text, []byte("y\ufffd[2J\ufffd.npy")) {
			t.Errorf("%s: %v, %.300q", name, err, text)
		}
	}
	mustRun(t, "heatmap", "--backend=cpu", "--q", y, "--k", y, "--png", dir+"/h.png", "--labels", labels)
	if size := pagetest.ReadPNG(t, dir+"/h.png").Bounds().Size(); size.X > 4000 || size.Y > 4000 {
		t.Errorf("the picture has %v pixels", size)
	}
}
