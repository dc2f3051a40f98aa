package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"image"
	"image/color"
	"image/png"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pictured is a report with two backends over five lengths, of which the second one
// ran only the first three.
func pictured() *Report {
	r := &Report{Schema: Schema, Environment: sample().Environment}
	for b, name := range []string{"cpu", "gpu:0"} {
		for i, seq := range []int{256, 512, 1024, 2048, 4096} {
			seconds := 1e-9 * float64(seq) * float64(seq) * float64(1+4*b)
			m := Measurement{Backend: name, Variant: "fused", DType: "f32", Batch: 1, Heads: 8, KVHeads: 8, SeqQ: seq, SeqK: seq, Dim: 64,
				Status: OK, Bound: BoundFMA, Repetitions: 10, Rounds: []Round{}, Memory: Memory{Operands: int64(seq) * 8192}}
			if b == 1 && i >= 3 {
				m.Status, m.Note, m.PredictedS = Predicted, "predicted, 1.00 s of the budget is left", Figure(seconds)
				r.Cases = append(r.Cases, m)
				continue
			}
			m.FLOPs, m.Bytes = int64(seq)*int64(seq)*2048, int64(seq)*8192
			m.FLOPsFull, m.Intensity = m.FLOPs, float64(m.FLOPs)/float64(m.Bytes)
			m.MedianS, m.LowS, m.HighS = Figure(seconds), Figure(seconds*0.7), Figure(seconds*1.2)
			m.GFLOPS, m.GBS = Figure(float64(m.FLOPs)/seconds/1e9), Figure(float64(m.Bytes)/seconds/1e9)
			m.CeilingGFLOPS, m.CeilingGBS = Figure(2560/float64(1+b)), Figure(40/float64(1+b)*float64(1+(i+1)%3))
			m.PercentOfBound = Figure(100 * *m.GFLOPS / *m.CeilingGFLOPS)
			m.MaxError, m.ErrorBound = Figure(1e-7), Figure(1e-4)
			r.Cases = append(r.Cases, m)
		}
	}
	return r
}

// The tests of cmd/attn open the page of this report in a browser.
func TestPicturedReport(t *testing.T) {
	var b bytes.Buffer
	if err := pictured().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "pictured.golden.json", b.Bytes())
}

// The first two colours of lines, as pixels and in SVG files.
var (
	colours = []color.NRGBA{{0x0b, 0x5c, 0xad, 255}, {0xc2, 0x41, 0x0c, 255}}
	hexes   = []string{"#0B5CAD", "#C2410C"}
)

// draw returns the pictures of a report by name.
func draw(r *Report) (names []string, files map[string][]byte, err error) {
	files = map[string][]byte{}
	err = r.WritePictures(func(name string, contents func(io.Writer) error) error {
		var b bytes.Buffer
		err := contents(&b)
		names, files[name] = append(names, name), b.Bytes()
		return err
	})
	return names, files, err
}

// TestPictures draws a report and decodes the pictures.
func TestPictures(t *testing.T) {
	names, files, err := draw(pictured())
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, name := range []string{"throughput", "time", "memory", "percent"} {
		want = append(want, name+".png", name+".svg")
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	for name, text := range files {
		if filepath.Ext(name) == ".png" {
			lookAtPNG(t, name, text)
		} else {
			lookAtSVG(t, name, string(text))
		}
	}
	full := errors.New("disk full")
	if err := pictured().WritePictures(func(string, func(io.Writer) error) error { return full }); !errors.Is(err, full) {
		t.Errorf("an error of a file: %v", err)
	}
}

// lookAtPNG checks size, margins, and that both lines are there: their colours,
// over most of the width for the longer one.
func lookAtPNG(t *testing.T, path string, text []byte) {
	t.Helper()
	img, err := png.Decode(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	size := img.Bounds().Size()
	if size.X != 1200 || size.Y < 660 {
		t.Errorf("%s is %v, should be 1200 wide and at least 660 high", path, size)
	}
	for x := range size.X {
		for _, y := range []int{0, size.Y - 1} {
			if color.NRGBAModel.Convert(img.At(x, y)) != color.Color(color.NRGBA{255, 255, 255, 255}) {
				t.Fatalf("%s: something reaches the border at %d,%d", path, x, y)
			}
		}
	}
	if filepath.Base(path) == "memory.png" {
		return // one line lies on the other there
	}
	for i, least := range []int{size.X / 2, size.X / 6} {
		if n := columnsWith(img, colours[i], size.Y*4/5); n < least {
			t.Errorf("%s: line %d is in %d columns, should be in %d at least", path, i, n, least)
		}
	}
}

// columnsWith counts the columns that hold a colour above the legend.
func columnsWith(img image.Image, c color.NRGBA, to int) int {
	n := 0
	for x := range img.Bounds().Dx() {
		for y := range to {
			if color.NRGBAModel.Convert(img.At(x, y)) == color.Color(c) {
				n++
				break
			}
		}
	}
	return n
}

// lookAtSVG parses it: one solid path through the points of each line, a dashed
// one for its ceiling, and the names of both.
func lookAtSVG(t *testing.T, path, text string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	through, dashed := map[string]int{}, map[string]int{}
	var words []string
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		switch e := token.(type) {
		case xml.CharData:
			words = append(words, strings.TrimSpace(string(e)))
		case xml.StartElement:
			attr := map[string]string{}
			for _, a := range e.Attr {
				attr[a.Name.Local] = a.Value
			}
			for i := range 2 {
				colour := "stroke:" + hexes[i]
				switch {
				case e.Name.Local != "path" || !strings.Contains(attr["style"], colour):
				case strings.Contains(attr["style"], "stroke-dasharray"):
					dashed[colour] = max(dashed[colour], strings.Count(attr["d"], "L"))
				case strings.Contains(attr["style"], "stroke-width:1.6"):
					through[colour] = max(through[colour], strings.Count(attr["d"], "L"))
				}
			}
		}
	}
	if !strings.Contains(text, "font-family:'Liberation Sans',Arimo,Arial,Helvetica,sans-serif;") {
		t.Errorf("%s names one font only", path)
	}
	cpu, gpu := "stroke:"+hexes[0], "stroke:"+hexes[1]
	if through[cpu] != 4 || through[gpu] != 2 {
		t.Errorf("%s: the lines have %v pieces, should have 4 and 2", path, through)
	}
	if dashed[cpu] < 1 {
		t.Errorf("%s: no ceiling, %v", path, dashed)
	}
	for _, word := range []string{"cpu", "gpu:0", "B=1 H=8 D=64 f32 · Some CPU"} {
		if !slices.Contains(words, word) {
			t.Errorf("%s: %q is not in %q", path, word, words)
		}
	}
}

// TestPicturesOfLittle: a report of one case, of one without a ceiling or
// operations, of a length twice and of wrong results is drawn as far as it goes.
func TestPicturesOfLittle(t *testing.T) {
	one := pictured()
	one.Cases = one.Cases[:1]
	bare := pictured()
	bare.Cases = bare.Cases[:2]
	for i := range bare.Cases {
		m := &bare.Cases[i]
		m.CeilingGFLOPS, m.CeilingGBS, m.PercentOfBound, m.LowS, m.HighS, m.Bound = nil, nil, nil, nil, nil, ""
		m.FLOPs, m.Intensity, m.GFLOPS = 0, 0, nil
	}
	twice := pictured()
	twice.Cases = append(twice.Cases, twice.Cases...)
	for _, tt := range []struct {
		name   string
		report *Report
		charts int
	}{{"one case", one, 4}, {"no operations, no ceilings", bare, 2}, {"twice", twice, 4}, {"of every kind", sample(), 4}} {
		names, _, err := draw(tt.report)
		if err != nil || len(names) != 2*tt.charts {
			t.Errorf("%s: %d pictures, %v, should be %d", tt.name, len(names)/2, err, tt.charts)
		}
	}
	none := pictured()
	for i := range none.Cases {
		none.Cases[i] = Measurement{Backend: "cpu", Status: Wrong, SeqK: 256}
	}
	if _, _, err := draw(none); err == nil || !strings.Contains(err.Error(), "nothing to draw") {
		t.Errorf("nothing measured: %v", err)
	}
	// A page has tables at least.
	var page strings.Builder
	if err := none.WritePage(&page); err != nil || !strings.Contains(page.String(), "<table") || strings.Contains(page.String(), "<svg") {
		t.Errorf("a page without pictures: %v", err)
	}
}

// TestLineNames: the names of lines contain what differs between them.
func TestLineNames(t *testing.T) {
	row := func(who, series, variant string, heads int) Measurement {
		return Measurement{Backend: who, Series: series, Variant: variant, DType: "f32", Batch: 1, Heads: heads, KVHeads: heads, Dim: 64}
	}
	for _, tt := range []struct {
		rows []Measurement
		want []string
	}{
		{[]Measurement{row("cpu", "", "fused", 8), row("cpu", "", "fused", 8)}, []string{"cpu"}},
		{[]Measurement{row("cpu", "", "fused", 8), row("gpu:0", "", "fused", 8)}, []string{"cpu", "gpu:0"}},
		{[]Measurement{row("cpu", "", "fused", 8), row("cpu", "", "qk", 8)}, []string{"cpu · fused", "cpu · qk"}},
		{[]Measurement{row("cpu", "A", "fused", 8), row("cpu", "B", "fused", 16)}, []string{"cpu · A", "cpu · B"}},
		{[]Measurement{row("cpu", "", "fused", 8), row("cpu", "", "fused", 16)}, []string{"cpu · B=1 H=8 D=64 f32", "cpu · B=1 H=16 D=64 f32"}},
		{[]Measurement{row("cpu", "B=1 H=8 D=64 f32", "fused", 8), row("cpu", "B=1 H=8 D=64 f32 qk", "qk", 8)}, []string{"cpu · fused", "cpu · qk"}},
		{[]Measurement{row("cpu", "A", "fused", 8), row("cpu", "A", "fused", 16), row("cpu", "B", "fused", 8)},
			[]string{"cpu · A · B=1 H=8 D=64 f32", "cpu · A · B=1 H=16 D=64 f32", "cpu · B · B=1 H=8 D=64 f32"}},
		{nil, nil},
	} {
		var got []string
		for _, l := range (&Report{Cases: tt.rows}).curves() {
			got = append(got, l.name)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestCommandLine: what is printed is what a shell runs.
func TestCommandLine(t *testing.T) {
	e := Environment{Variables: []string{"GOMAXPROCS=2", "A=b c"}, Args: []string{"bench", "--seq=256..4k", "--title", "it's", ""}}
	got := e.command()
	if want := `GOMAXPROCS=2 A='b c' attn bench --seq=256..4k --title 'it'\''s' ''`; got != want {
		t.Errorf("%s, should be %s", got, want)
	}
}

// TestCeilingsAreMerged: what two backends' cases share is one line.
func TestCeilingsAreMerged(t *testing.T) {
	r := pictured()
	for _, c := range r.charts() {
		var names []string
		for _, l := range c.Lines {
			if l.Ceiling {
				names = append(names, l.Name)
			}
		}
		want := map[string][]string{
			"throughput": {"ceiling of cpu", "ceiling of gpu:0"}, "time": {"ceiling of cpu", "ceiling of gpu:0"},
			"memory": {"S x S weights"}, "percent": {"ceiling"},
		}[c.Name]
		if diff := cmp.Diff(want, names); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.Name, diff)
		}
	}
}

// TestTicks: axes have round numbers with units.
func TestTicks(t *testing.T) {
	for _, tc := range []struct{ got, want string }{
		{durationTick(2), "2 s"}, {durationTick(0.02), "20 ms"}, {durationTick(1e-6), "1 µs"}, {durationTick(5e-8), "50 ns"},
		{sizeTick(4 << 30), "4 GiB"}, {sizeTick(1536), "1.5 KiB"},
	} {
		if tc.got != tc.want {
			t.Errorf("%q, want %q", tc.got, tc.want)
		}
	}
}
