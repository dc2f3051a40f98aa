package heatmap

import (
	"bytes"
	"context"
	"encoding/xml"
	"fmt"
	"image"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/pagetest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestPooled compares cells with a plain loop over their weights.
func TestPooled(t *testing.T) {
	rows, keys := span{5, 28}, span{2, 43}
	for _, size := range []int{1, 2, 7, 40, 100} {
		for _, mean := range []bool{false, true} {
			p := newPooled(rows, keys, size, mean)
			weight := func(i, j int) float32 {
				if j < 10 { // left out, as what no row of a chunk sees
					return 0
				}
				return float32((i*31+j*17)%101) / 101
			}
			for i := rows.lo; i < rows.hi; i++ {
				var row []float32
				for j := 10; j < keys.hi; j++ {
					row = append(row, weight(i, j))
				}
				p.add(i, 10, row)
			}
			m := p.matrix()
			if m.Rows > size || m.Cols > size {
				t.Errorf("size %d: %d x %d cells", size, m.Rows, m.Cols)
			}
			for r := range m.Rows {
				for c := range m.Cols {
					largest, sum, n := 0.0, 0.0, 0.0
					for i := rows.lo + r*p.perRow; i < min(rows.lo+(r+1)*p.perRow, rows.hi); i++ {
						for j := keys.lo + c*p.perKey; j < min(keys.lo+(c+1)*p.perKey, keys.hi); j++ {
							w := float64(weight(i, j))
							largest, sum, n = max(largest, w), sum+w, n+1
						}
					}
					want := largest
					if mean {
						want = sum / n
					}
					if got := float64(m.Row(r)[c]); !(math.Abs(got-want) <= 1e-6) {
						t.Errorf("size %d, mean %v, cell %d,%d is %v, should be %v", size, mean, r, c, got, want)
					}
				}
			}
		}
	}
	p := newPooled(span{0, 2}, span{0, 2}, 1, false)
	p.add(0, 0, []float32{float32(math.NaN()), 1})
	p.add(1, 0, []float32{1, 1})
	if x := p.matrix().Data[0]; x == x {
		t.Errorf("the largest of NaN and others is %v, should be NaN", x)
	}
}

// allocating records the largest allocation.
type allocating struct {
	backend.Backend
	largest *int64
}

// Alloc implements backend.Backend.
func (a allocating) Alloc(ctx context.Context, d kernels.DType, s kernels.Shape) (kernels.Tensor, error) {
	*a.largest = max(*a.largest, int64(s.Elements())*int64(d.Size()))
	return a.Backend.Alloc(ctx, d, s)
}

// TestHeatmapMemory draws a long range without its weights in memory, which would take 1 GiB.
func TestHeatmapMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: takes seconds on long sequences")
	}
	var largest int64
	backend.Register("allocating", clitest.OnCPU(func(be backend.Backend) backend.Backend { return allocating{be, &largest} }))
	const seq = 16384
	dir := t.TempDir()
	q := clitest.Save(t, dir, "q.npy", "<f4", clitest.Normal(1, seq*8), seq, 8)
	k := clitest.Save(t, dir, "k.npy", "<f4", clitest.Normal(2, seq*8), seq, 8)
	mustRun(t, "heatmap", "--backend=allocating", "--q", q, "--k", k, "--size=64", "--png", dir+"/h.png")
	if largest == 0 || largest > 64<<20 {
		t.Errorf("the largest allocation has %d bytes, should be at most %d", largest, 64<<20)
	}
}

// pointedInputs writes q and k of 40 tokens in which query i finds key 39-i.
func pointedInputs(t *testing.T, dir string) (q, k string) {
	const n = 40
	qs, ks := make([]float64, n*n), make([]float64, n*n)
	for i := range n {
		qs[i*n+i] = 200
		ks[(n-1-i)*n+i] = 1
	}
	return clitest.Save(t, dir, "q.npy", "<f4", qs, n, n), clitest.Save(t, dir, "k.npy", "<f4", ks, n, n)
}

// TestHeatmapCommand checks pictures of all weights, of a range, and of pooled cells.
func TestHeatmapCommand(t *testing.T) {
	dir := t.TempDir()
	q, k := pointedInputs(t, dir)
	for _, tt := range []struct {
		args       []string
		rows, cols int
		dark       func(i, j int) bool
	}{
		{nil, 40, 40, func(i, j int) bool { return j == 39-i }},
		{[]string{"--queries", "10:20", "--keys", "20:"}, 10, 20, func(i, j int) bool { return j == 9-i }},
		{[]string{"--size", "10"}, 10, 10, func(i, j int) bool { return j == 9-i }},
		{[]string{"--size", "10", "--pool=mean"}, 10, 10, func(i, j int) bool { return j == 9-i }},
		{[]string{"--log", "--queries=:12", "--keys=28:"}, 12, 12, func(i, j int) bool { return j == 11-i }},
	} {
		out := filepath.Join(dir, "h.png")
		mustRun(t, append([]string{"heatmap", "--backend=cpu", "--q", q, "--k", k, "--png", out}, tt.args...)...)
		at := darkCells(pagetest.ReadPNG(t, out), tt.rows, tt.cols)
		for i := range tt.rows {
			for j := range tt.cols {
				if at(i, j) != tt.dark(i, j) {
					t.Fatalf("%v: row %d, key %d: dark is %v", tt.args, i, j, at(i, j))
				}
			}
		}
	}
}

// TestHeatmapLayout draws the second of two heads in [B,S,H,D] files, with a mask that hides key 0 from its query.
func TestHeatmapLayout(t *testing.T) {
	dir := t.TempDir()
	const n = 5
	q, k := make([]float64, n*2*n), make([]float64, n*2*n)
	for i := range n {
		q[(i*2+1)*n+i] = 200
		k[(i*2+1)*n+(i+1)%n] = 1 // query i finds key i-1, and query 0 the last
	}
	mask := slices.Repeat([]float64{0, 1, 1, 1, 1}, n)
	out := dir + "/h.png"
	mustRun(t, "heatmap", "--backend=cpu", "--layout=bshd", "--head=1", "--png", out, "--mask", clitest.Save(t, dir, "m.npy", "|b1", mask, n, n),
		"--q", clitest.Save(t, dir, "q.npy", "<f4", q, 1, n, 2, n), "--k", clitest.Save(t, dir, "k.npy", "<f4", k, 1, n, 2, n))
	at := darkCells(pagetest.ReadPNG(t, out), n, n)
	for i := range n {
		for j := range n {
			want := i != 1 && j == (i+n-1)%n // query 1 sees the others alike
			if at(i, j) != want {
				t.Errorf("row %d, key %d: dark is %v", i, j, at(i, j))
			}
		}
	}
}

// darkCells finds the cells of a picture by its first coloured pixel.
func darkCells(img image.Image, rows, cols int) func(i, j int) bool {
	shade := func(x, y int) bool {
		r, g, b, _ := img.At(x, y).RGBA()
		return b > r && b > g // none of text, ground and axes
	}
	cell := min(88, 1120/max(rows, cols)) // pixels
	bounds := img.Bounds()
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			if !shade(x, y) {
				continue
			}
			return func(i, j int) bool {
				r, _, _, _ := img.At(x+j*cell+cell/4, y+i*cell+cell/4).RGBA()
				return r>>8 == 0x08
			}
		}
	}
	return func(int, int) bool { return false }
}

// TestHeatmapSVG: the picture is well-formed, has an image of the cells and one of the colour
// bar, numbers in few cells, and labels with special characters.
func TestHeatmapSVG(t *testing.T) {
	dir := t.TempDir()
	q, k := pointedInputs(t, dir)
	var lines []string
	for i := range 40 {
		lines = append(lines, fmt.Sprintf("<t%d> & \"x\"", i))
	}
	labels := clitest.WriteFile(t, dir, "tokens.txt", []byte(strings.Join(lines, "\n")+"\n"))
	for _, tt := range []struct {
		args    []string
		numbers int
	}{{[]string{"--queries=:5", "--keys=30:36"}, 30}, {nil, 0}} {
		out := filepath.Join(dir, "h.svg")
		mustRun(t, append([]string{"heatmap", "--backend=cpu", "--q", q, "--k", k, "--labels", labels, "--svg", out}, tt.args...)...)
		found, text := svgElements(t, out)
		numbers := 0
		for _, s := range text {
			if s == "0.00" || s == "1.00" {
				numbers++
			}
		}
		if found["image"] != 2 || numbers != tt.numbers {
			t.Errorf("%v: %v, %d numbers, should have 2 images and %d numbers", tt.args, found, numbers, tt.numbers)
		}
		if !slices.Contains(text, lines[0]) || !slices.Contains(text, lines[30]) {
			t.Errorf("%v: no label %s in %q", tt.args, lines[0], text)
		}
	}
	long := clitest.Save(t, dir, "long.npy", "<f4", clitest.Normal(1, 200*4), 200, 4)
	mustRun(t, "heatmap", "--backend=cpu", "--q", long, "--k", long, "--svg", dir+"/h.svg", "--size=100", "--title=Mine")
	found, text := svgElements(t, dir+"/h.svg")
	if found["image"] != 2 {
		t.Errorf("%v, should have 2 images", found)
	}
	if want := "Mine · each cell is the maximum of 2 x 2 weights"; !slices.Contains(text, want) {
		t.Errorf("no %q in %q", want, text)
	}
}

// svgElements parses an SVG file. It returns the number of elements of each name, and their texts.
func svgElements(t *testing.T, path string) (count map[string]int, text []string) {
	t.Helper()
	data := clitest.ReadFile(t, path)
	count = map[string]int{}
	d := xml.NewDecoder(bytes.NewReader(data))
	for {
		token, err := d.Token()
		if err == io.EOF {
			return count, text
		}
		must.Do(must.In(t, "%s", path), err)
		switch e := token.(type) {
		case xml.StartElement:
			count[e.Name.Local]++
		case xml.CharData:
			text = append(text, strings.TrimSpace(string(e)))
		}
	}
}

// TestHeatmapPage checks the page in a browser: the tip has the number of the cell,
// also when zoomed; nothing overflows at any width, without scripts or in dark mode.
func TestHeatmapPage(t *testing.T) {
	browser := pagetest.Start(t)
	dir := t.TempDir()
	q, k := pointedInputs(t, dir)
	labels := clitest.WriteFile(t, dir, "tokens.json", []byte(`["</script>"`+strings.Repeat(`, "a & b"`, 39)+`]`))
	file := filepath.Join(dir, "h.html")
	mustRun(t, "heatmap", "--backend=cpu", "--q", q, "--k", k, "--labels", labels, "--keys=20:", "--html", file)

	page := browser.Open(file, pagetest.Look{})
	// Query 10 finds key 29: cell 10, 9 of 40 x 20.
	at := pagetest.Eval[[]float64](page, `(() => {
		const d = JSON.parse(document.getElementById("weights").textContent), v = document.querySelector("figure svg").viewBox.baseVal;
		const [x, y, w, h] = d.data[0];
		return [(x + w * 9.5 / d.cols) / v.width, (y + h * 10.5 / d.rows) / v.height];
	})()`)
	page.Hover("figure svg", at[0], at[1])
	want := "query 10 (a & b)\nkey 29 (a & b)\nweight 1"
	if got := pagetest.Eval[string](page, `document.querySelector(".tip").textContent`); got != want {
		t.Errorf("the tip is %q, should be %q", got, want)
	}
	page.Click(`.tools button[aria-label="zoom in"]`)
	if w := pagetest.Eval[[]float64](page, `(() => { const v = document.querySelector("figure svg").viewBox.baseVal; return [v.x, v.y, v.width, v.height] })()`); w[0] <= 0 {
		t.Errorf("zoomed in, the drawing shows %v", w)
	}
	for _, look := range []pagetest.Look{
		{Width: 360, Height: 740}, {Width: 800, Height: 800}, {Width: 1600, Height: 1000},
		{Width: 360, Height: 740, Dark: true}, {Width: 800, Height: 800, NoScript: true},
	} {
		page := browser.Open(file, look)
		page.Quiet()
		if n := pagetest.Eval[int](page, `document.querySelectorAll("table tbody tr").length`); n != 20 {
			t.Errorf("%+v: the table has %d rows, should have the 20 largest weights", look, n)
		}
		if n := pagetest.Eval[int](page, `document.querySelectorAll("figure svg image").length`); n != 2 {
			t.Errorf("%+v: %d images, should have one of the cells and one of the colour bar", look, n)
		}
	}
	page.Quiet()
}

var _, mustRun, mustFail = clitest.Named(cli.Program{Name: "attn", Grammar: func() any {
	return &struct {
		HeatMap Command `cmd:"" name:"heatmap"`
	}{}
}})

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
