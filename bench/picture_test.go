package bench

import (
	"encoding/xml"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io"
	"math"
	"os"
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
			m := Measurement{Backend: name, Variant: Fused, DType: "f32", Batch: 1, Heads: 8, KVHeads: 8, SeqQ: seq, SeqK: seq, Dim: 64,
				Status: OK, Bound: BoundFMA, Repetitions: 10, Rounds: []Round{}, Memory: Memory{Operands: int64(seq) * 8192}}
			if b == 1 && i >= 3 {
				m.Status, m.Note, m.PredictedS = Predicted, "predicted, 1.00 s of the budget is left", figure(seconds)
				r.Cases = append(r.Cases, m)
				continue
			}
			m.FLOPs, m.Bytes = int64(seq)*int64(seq)*2048, int64(seq)*8192
			m.FLOPsFull, m.Intensity = m.FLOPs, float64(m.FLOPs)/float64(m.Bytes)
			m.MedianS, m.LowS, m.HighS = figure(seconds), figure(seconds*0.7), figure(seconds*1.2)
			m.GFLOPS, m.GBS = rate(float64(m.FLOPs)/seconds), rate(float64(m.Bytes)/seconds)
			m.CeilingGFLOPS, m.CeilingGBS = figure(2560/float64(1+b)), figure(40/float64(1+b)*float64(1+(i+1)%3))
			m.PercentOfBound = figure(100 * *m.GFLOPS / *m.CeilingGFLOPS)
			m.MaxError, m.ErrorBound = figure(1e-7), figure(1e-4)
			r.Cases = append(r.Cases, m)
		}
	}
	r.Growth = growth(r.Cases)
	return r
}

// TestPictures draws a report, decodes the pictures and looks for what must be on
// them.
func TestPictures(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "a", "new", "folder")
	paths, err := pictured().WritePictures(folder)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, name := range []string{"throughput", "time", "memory", "percent", "roofline"} {
		want = append(want, filepath.Join(folder, name+".png"), filepath.Join(folder, name+".svg"))
	}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != len(want) {
		t.Errorf("the folder holds %v, %v", entries, err)
	}
	for _, path := range paths {
		if filepath.Ext(path) == ".png" {
			lookAtPNG(t, path)
		} else {
			lookAtSVG(t, path)
		}
	}
}

// lookAtPNG checks size, margins, and that both lines are there: their colours,
// over most of the width for the longer one.
func lookAtPNG(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	size := img.Bounds().Size()
	if float64(size.X) != pictureWidth.Points()*2 || float64(size.Y) < pictureHeight.Points()*2 {
		t.Errorf("%s is %v, should be %v wide and at least %v high", path, size, pictureWidth.Points()*2, pictureHeight.Points()*2)
	}
	for x := range size.X {
		for _, y := range []int{0, size.Y - 1} {
			if color.NRGBAModel.Convert(img.At(x, y)) != color.Color(white) {
				t.Fatalf("%s: something reaches the border at %d,%d", path, x, y)
			}
		}
	}
	if filepath.Base(path) == "memory.png" {
		return // one line lies on the other there
	}
	for i, least := range []int{size.X / 2, size.X / 6} {
		if filepath.Base(path) == "roofline.png" {
			least = size.X / 20
		}
		if n := columnsWith(img, palette[i], size.Y/4); n < least {
			t.Errorf("%s: line %d is in %d columns, should be in %d at least", path, i, n, least)
		}
	}
}

// columnsWith counts the columns that hold a colour below the legend.
func columnsWith(img image.Image, c color.NRGBA, from int) int {
	n := 0
	for x := range img.Bounds().Dx() {
		for y := from; y < img.Bounds().Dy(); y++ {
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
func lookAtSVG(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	d := xml.NewDecoder(strings.NewReader(string(text)))
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
				colour := "stroke:" + hex(palette[i])
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
	if !strings.Contains(string(text), "font-family:'Liberation Sans',Arimo,Arial,Helvetica,sans-serif;") {
		t.Errorf("%s names one font only", path)
	}
	cpu, gpu := "stroke:"+hex(palette[0]), "stroke:"+hex(palette[1])
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
		m.FLOPs, m.Intensity, m.GFLOPS = 0, 0, figure(0)
	}
	twice := pictured()
	twice.Cases = append(twice.Cases, twice.Cases...)
	for _, tt := range []struct {
		name   string
		report *Report
		charts int
	}{{"one case", one, 5}, {"no operations, no ceilings", bare, 2}, {"twice", twice, 5}, {"of every kind", sample(), 5}} {
		paths, err := tt.report.WritePictures(t.TempDir())
		if err != nil || len(paths) != 2*tt.charts {
			t.Errorf("%s: %d pictures, %v, should be %d", tt.name, len(paths)/2, err, tt.charts)
		}
	}
	none := pictured()
	for i := range none.Cases {
		none.Cases[i] = Measurement{Backend: "cpu", Status: Wrong, SeqK: 256}
	}
	if _, err := none.WritePictures(t.TempDir()); err == nil || !strings.Contains(err.Error(), "nothing to draw") {
		t.Errorf("nothing measured: %v", err)
	}
	// A page has tables at least.
	for _, r := range []*Report{none, {Ceilings: sample().Ceilings}} {
		var page strings.Builder
		if err := r.WritePage(&page); err != nil || !strings.Contains(page.String(), "<table") || strings.Contains(page.String(), "<svg") {
			t.Errorf("a page without pictures: %v", err)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := pictured().WritePictures(file); err == nil {
		t.Error("a folder that is a file is no error")
	}
}

// TestLineNames: lines are named by what tells them apart.
func TestLineNames(t *testing.T) {
	row := func(who, series, variant string, heads int) Measurement {
		return Measurement{Backend: who, Series: series, Variant: variant, DType: "f32", Batch: 1, Heads: heads, KVHeads: heads, Dim: 64}
	}
	for _, tt := range []struct {
		rows []Measurement
		want []string
	}{
		{[]Measurement{row("cpu", "", Fused, 8), row("cpu", "", Fused, 8)}, []string{"cpu"}},
		{[]Measurement{row("cpu", "", Fused, 8), row("gpu:0", "", Fused, 8)}, []string{"cpu", "gpu:0"}},
		{[]Measurement{row("cpu", "", Fused, 8), row("cpu", "", QK, 8)}, []string{"cpu · fused", "cpu · qk"}},
		{[]Measurement{row("cpu", "A", Fused, 8), row("cpu", "B", Fused, 16)}, []string{"cpu · A", "cpu · B"}},
		{[]Measurement{row("cpu", "", Fused, 8), row("cpu", "", Fused, 16)}, []string{"cpu · B=1 H=8 D=64 f32", "cpu · B=1 H=16 D=64 f32"}},
		{[]Measurement{row("cpu", "B=1 H=8 D=64 f32", Fused, 8), row("cpu", "B=1 H=8 D=64 f32 qk", QK, 8)}, []string{"cpu · fused", "cpu · qk"}},
		{[]Measurement{row("cpu", "A", Fused, 8), row("cpu", "A", Fused, 16), row("cpu", "B", Fused, 8)},
			[]string{"cpu · A · B=1 H=8 D=64 f32", "cpu · A · B=1 H=16 D=64 f32", "cpu · B · B=1 H=8 D=64 f32"}},
		{nil, nil},
	} {
		var got []string
		for _, l := range (&Report{Cases: tt.rows}).lines() {
			got = append(got, l.name)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestScales: an axis holds what it is for and has a readable number of round
// ticks, whatever the range.
func TestScales(t *testing.T) {
	for _, tt := range []struct {
		s      scale
		lo, hi float64
		want   string
	}{
		{scale{format: plainText}, 1, 100, "[1 2 3 5 10 20 30 50 100]"},
		{scale{format: plainText}, 190, 211, "[150 200 300]"},
		{scale{format: plainText}, 1e-3, 1e9, "[0.01 1 100 10000 1000000 1e+08]"},
		{scale{format: plainText, linear: true}, 3, 90, "[0 20 40 60 80]"},
		{scale{format: plainText, linear: true}, 3, 3.5, "[0 1 2 3]"},
		{scale{format: sizeTick, binary: true}, 1 << 20, 1 << 30, "[1 MiB 4 MiB 16 MiB 64 MiB 256 MiB 1 GiB]"},
		{scale{format: durationTick}, 4e-7, 8, "[1 µs 10 µs 100 µs 1 ms 10 ms 100 ms 1 s 10 s]"},
	} {
		tt.s.fit(tt.lo, tt.hi)
		var got []string
		for _, x := range tt.s.ticks {
			got = append(got, tt.s.format(x))
		}
		if fmt.Sprint(got) != tt.want {
			t.Errorf("%v to %v: %v, should be %v", tt.lo, tt.hi, got, tt.want)
		}
	}
	for lo := 1e-9; lo < 1e9; lo *= 7 {
		for ratio := 1.0; ratio < 1e15; ratio *= 3.3 {
			s := scale{format: plainText}
			s.fit(lo, lo*ratio)
			if s.min >= lo || s.max <= lo*ratio || len(s.ticks) < 1 || len(s.ticks) > maxTicks {
				t.Errorf("%v to %v: %v to %v, ticks %v", lo, lo*ratio, s.min, s.max, s.ticks)
			}
		}
	}
	r := &Report{}
	for seq := 1; seq <= 1<<20; seq *= 2 {
		r.Cases = append(r.Cases, Measurement{SeqK: seq})
	}
	s := lengthScale(r)
	s.fit(1, 1<<20)
	if len(s.ticks) < 4 || len(s.ticks) > maxTicks {
		t.Errorf("21 lengths: ticks %v", s.ticks)
	}
	for _, x := range s.ticks {
		if math.Exp2(math.Round(math.Log2(x))) != x {
			t.Errorf("tick %v is none of the lengths", x)
		}
	}
}

// TestCommandLine: what is printed is what a shell runs.
func TestCommandLine(t *testing.T) {
	got := commandLine([]string{"GOMAXPROCS=2", "A=b c"}, []string{"bench", "--seq=256..4k", "--title", "it's", ""})
	if want := `GOMAXPROCS=2 A='b c' attn bench --seq=256..4k --title 'it'\''s' ''`; got != want {
		t.Errorf("%s, should be %s", got, want)
	}
}

// TestCeilingsAreMerged: what two backends' cases share is one line.
func TestCeilingsAreMerged(t *testing.T) {
	r := pictured()
	for _, c := range r.charts() {
		var names []string
		for _, l := range c.lines {
			if l.ceiling {
				names = append(names, l.name)
			}
		}
		want := map[string][]string{
			"throughput": {"ceiling of cpu", "ceiling of gpu:0"}, "time": {"ceiling of cpu", "ceiling of gpu:0"},
			"memory": {"S x S weights"}, "percent": {"ceiling"},
			"roofline": {"cpu roof, reading 120 GB/s", "cpu roof, reading 40.0 GB/s", "gpu:0 roof, reading 60.0 GB/s", "gpu:0 roof, reading 20.0 GB/s"},
		}[c.name]
		if diff := cmp.Diff(want, names); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
	// Cases that read at one rate have one roof.
	for i := range r.Cases {
		if r.Cases[i].CeilingGBS != nil {
			r.Cases[i].CeilingGBS = figure(40)
		}
	}
	charts := r.charts()
	if lines := charts[len(charts)-1].lines; len(lines) != 4 {
		t.Errorf("the roofline has %d lines, should have two and their roofs", len(lines))
	}
}
