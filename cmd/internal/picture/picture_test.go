package picture

import (
	"encoding/xml"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/cmd/internal/pagetest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestHeatMapSizes draws shapes with different layouts: one token, many tokens, long
// names, several batches, weights that are NaN or all 0.
func TestHeatMapSizes(t *testing.T) {
	names := func(n int, long string) []string {
		var l []string
		for i := range n {
			l = append(l, fmt.Sprint(long, i))
		}
		return l
	}
	for _, tt := range []struct {
		batch, n int
		label    string
		value    float32
	}{{1, 1, "x", 1}, {1, 13, "x", .1}, {3, 5, "a rather long token ", .2}, {1, 200, "x", .005}, {2, 2, "x", 0}, {1, 2, "x", float32(math.NaN())}, {1, 2, strings.Repeat("W", 63), .5}, {2, 1, strings.Repeat("東", 63), 1}} {
		w := matrix.Matrix{Batch: tt.batch, Rows: tt.n, Cols: tt.n, Data: slices.Repeat([]float32{tt.value}, tt.batch*tt.n*tt.n)}
		path := filepath.Join(t.TempDir(), "h.png")
		f := must.Get(os.Create(path))(t)
		tokens := Axis{Labels: names(tt.n, tt.label)}
		picture := HeatMap{Names: names(tt.batch, "batch "), Query: tokens, Key: tokens, Weights: w}
		must.Do(t, picture.WritePNG(f))
		must.Do(t, f.Close())
		pagetest.ReadPNG(t, path)
	}
	huge := HeatMap{Weights: matrix.Matrix{Batch: 1, Rows: 30000, Cols: 30000}}
	if err := huge.WritePNG(nil); err == nil || !strings.Contains(err.Error(), "million pixels") {
		t.Errorf("a map of 30000 tokens: %v", err)
	}
}

// TestNaN: the legend names the grey of NaN where there is one, and only there.
func TestNaN(t *testing.T) {
	for _, weight := range []float32{0.5, float32(math.NaN())} {
		h := HeatMap{Weights: matrix.Matrix{Batch: 1, Rows: 1, Cols: 2, Data: []float32{weight, 0.5}}}
		var svg strings.Builder
		must.Do(t, h.WriteSVG(&svg))
		if got := strings.Contains(svg.String(), "grey: NaN"); got != (weight != weight) {
			t.Errorf("a weight of %v: the legend names NaN: %t", weight, got)
		}
	}
}

// TestElement: the drawing of a page is one element without a size or a black of its own.
func TestElement(t *testing.T) {
	h := HeatMap{Title: `"quotes" & <b>`, Key: Axis{Labels: []string{"a<", "b"}}, Weights: matrix.Matrix{Batch: 1, Rows: 1, Cols: 2, Data: []float32{0.5, 0.5}}}
	got := string(must.Get(must.Get(h.layout(false))(t).element())(t))
	for _, want := range []string{`<svg role="img" aria-label="heat map of attention weights: &#34;quotes&#34; &amp; &lt;b&gt;" viewBox="0 0 `, "--drawn:236.73pt", ">a&lt;<"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in %s", want, got)
		}
	}
	for _, gone := range []string{"<?xml", "<!--", "#000000", "pt\" height="} {
		if strings.Contains(got, gone) {
			t.Errorf("%q is in %s", gone, got)
		}
	}
	if err := xml.Unmarshal([]byte(got), new(struct{})); err != nil || strings.Count(got, "<svg") != 1 || !strings.HasSuffix(got, "</svg>") {
		t.Errorf("%v in %s", err, got)
	}
}
