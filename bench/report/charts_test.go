package report

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seed90331342/attn/bench/internal/chart"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// pictured is a report with two backends over five lengths, of which the second one ran only the first three.
func pictured() *Report {
	r := &Report{Schema: Schema, Environment: sample().Environment}
	for b, name := range []string{"cpu", "gpu:0"} {
		for i, seq := range []int{256, 512, 1024, 2048, 4096} {
			seconds := 1e-9 * float64(seq) * float64(seq) * float64(1+4*b)
			m := Measurement{Backend: name, Case: Case{Variant: "fused", DType: "f32", Batch: 1, Heads: 8, KVHeads: 8, SeqQ: seq, SeqK: seq, Dim: 64},
				Status: OK, Rates: Rates{Bound: BoundFMA}, Repetitions: 10, Rounds: []Round{}, Memory: Memory{Operands: int64(seq) * 8192}}
			m.FLOPs, m.Bytes = int64(seq)*int64(seq)*2048, int64(seq)*8192
			if b == 1 && i >= 3 {
				m.Status, m.Note, m.PredictedS = Predicted, "predicted, 1.00 s of the budget is left", Figure(seconds)
				r.Cases = append(r.Cases, m)
				continue
			}
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
	must.Do(t, pictured().WriteJSON(&b))
	golden(t, "pictured.golden.json", b.Bytes())
}

// TestPictures draws a report: a solid line through the measured points of each curve, dots
// through the predicted ones, dashes for its ceiling, a spot for each point, and the names.
func TestPictures(t *testing.T) {
	charts := pictured().charts()
	var titles []string
	for _, c := range charts {
		titles = append(titles, c.Title)
		solid, dashed, marks, spots, words := look(t, &c)
		want := "[4 2] [4 2]"
		if c.Title == "Memory of a call" { // whose limit follows from the lengths
			want = "[4 2] [4 4]"
		}
		if got := fmt.Sprint(solid, dashed); got != want {
			t.Errorf("%s: lines and ceilings have %s pieces, want %s", c.Title, got, want)
		}
		if marks != 10 || spots != 10 {
			t.Errorf("%s: %d marks and %d spots, want 10", c.Title, marks, spots)
		}
		for _, word := range []string{"cpu", "gpu:0", "256", "4k", "S, sequence length", c.Y.Label} {
			if !words[word] {
				t.Errorf("%s: %q is not in %v", c.Title, word, words)
			}
		}
	}
	if diff := cmp.Diff([]string{"Throughput", "Time of a call", "Memory of a call"}, titles); diff != "" {
		t.Errorf("pictures (-want +got):\n%s", diff)
	}
}

// look parses a drawing: the straight pieces of the solid and of the dashed path of each line,
// the numbers of marks and spots, and the texts.
func look(t *testing.T, c *chart.Chart) (solid, dashed []int, marks, spots int, words map[string]bool) {
	t.Helper()
	words = map[string]bool{}
	d := xml.NewDecoder(strings.NewReader(string(c.Draw())))
	for {
		token, err := d.Token()
		if err == io.EOF {
			return solid, dashed, marks, spots, words
		}
		must.Do(must.In(t, "%s", c.Title), err)
		if text, ok := token.(xml.CharData); ok {
			words[string(text)] = true
		}
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		attr := map[string]string{}
		for _, a := range e.Attr {
			attr[a.Name.Local] = a.Value
		}
		pieces := strings.Count(attr["d"], "L")
		switch {
		case e.Name.Local == "circle" && attr["data-tip"] != "":
			spots++
		case attr["class"] == "mark":
			marks++
		case attr["stroke-dasharray"] == "5 3":
			dashed = append(dashed, pieces)
		case attr["stroke-dasharray"] == "none":
			solid = append(solid, pieces)
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
		m.FLOPs, m.GFLOPS = 0, nil
	}
	twice := pictured()
	twice.Cases = append(twice.Cases, twice.Cases...)
	none := pictured()
	for i := range none.Cases {
		none.Cases[i] = Measurement{Backend: "cpu", Status: Wrong, Case: Case{SeqK: 256}}
	}
	for _, tt := range []struct {
		name   string
		report *Report
		charts int
	}{{"one case", one, 3}, {"no operations, no ceilings", bare, 2}, {"twice", twice, 3}, {"of every kind", sample(), 3}, {"nothing measured", none, 0}} {
		charts := tt.report.charts()
		for _, c := range charts {
			look(t, &c)
			if drawn := string(c.Draw()); strings.Contains(drawn, "NaN") || strings.Contains(drawn, "Inf") {
				t.Errorf("%s: %s", tt.name, drawn)
			}
		}
		var page strings.Builder // has a table at least
		if err := tt.report.WritePage(&page); err != nil || !strings.Contains(page.String(), "<table") || strings.Count(page.String(), "<svg") != tt.charts {
			t.Errorf("%s: %d pictures, %v, should be %d", tt.name, len(charts), err, tt.charts)
		}
	}
}

// TestLineNames: the cases of a device and a series are one line.
func TestLineNames(t *testing.T) {
	r := &Report{Cases: []Measurement{{Backend: "cpu", Threads: 2}, {Backend: "cpu", Threads: 2, Case: Case{SeqK: 7}}, {Backend: "cpu", Threads: 1}, {Backend: "gpu:0", Series: "A"}, {Backend: "gpu:0", Series: "B"}}}
	var got []string
	for _, l := range r.curves() {
		got = append(got, l.name)
	}
	if diff := cmp.Diff([]string{"cpu · 2 threads", "cpu · 1 thread", "gpu:0 · A", "gpu:0 · B"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestTicks: axes have round numbers with units.
func TestTicks(t *testing.T) {
	duration, size := quantities[1].Y.Format, quantities[2].Y.Format
	for _, tc := range []struct{ got, want string }{
		{duration(2), "2 s"}, {duration(0.02), "20 ms"}, {duration(1e-6), "1 µs"}, {duration(5e-8), "50 ns"},
		{size(4 << 30), "4 GiB"}, {size(1536), "1.5 KiB"},
	} {
		if tc.got != tc.want {
			t.Errorf("%q, want %q", tc.got, tc.want)
		}
	}
}
