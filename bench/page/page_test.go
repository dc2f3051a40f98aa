package page

import (
	"encoding/xml"
	"io"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
)

// TestPlainText: no escape, direction mark or broken UTF-8 reaches a page.
func TestPlainText(t *testing.T) {
	var got strings.Builder
	must.Do(t, Write(&got, Page{Title: "a\x1b[2Jb", Body: "<p>c\u202ed\xffe</p>"}))
	for _, want := range []string{"a\ufffd[2Jb", "<p>c\ufffdd\ufffde</p>"} {
		if !strings.Contains(got.String(), want) {
			t.Errorf("%q is not in %s", want, got.String())
		}
	}
	if strings.ContainsAny(got.String(), "\x1b\u202e") {
		t.Error("the page has the characters")
	}
}

// TestDrawing: what is left of an SVG file is one element without a size or colours
// of its own.
func TestDrawing(t *testing.T) {
	file := `<?xml version="1.0"?>
<!-- a comment -->
<svg width="600pt" height="330.5pt" viewBox="0 0 600 330.5"
	xmlns="http://www.w3.org/2000/svg"
	xmlns:xlink="http://www.w3.org/1999/xlink">
<g><path d="M0,0L1,1" style="stroke:#0B5CAD;fill:none"/><text>a &lt; b</text></g>
</svg>
`
	got := must.Get(Drawing(file, `"quotes" & <b>`, map[string]string{"#0B5CAD": "--c1"}, `<circle r="1"/>`))(t)
	for _, want := range []string{`viewBox="0 0 600 330.5"`, "--drawn:600pt", "stroke:var(--c1)", "&#34;quotes&#34; &amp; &lt;b&gt;", `<circle r="1"/></svg>`, "a &lt; b"} {
		if !strings.Contains(string(got), want) {
			t.Errorf("%q is not in %s", want, got)
		}
	}
	for _, gone := range []string{"<?xml", "<!--", "height=", "#0B5CAD"} {
		if strings.Contains(string(got), gone) {
			t.Errorf("%q is in %s", gone, got)
		}
	}
	d := xml.NewDecoder(strings.NewReader(string(got)))
	for {
		if _, err := d.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%v in %s", err, got)
		}
	}
	for _, bad := range []string{"", "text", `<svg viewBox="0 0 1 1"></svg>`, `<svg width="1pt" viewBox="0 0 1 1">`, `</svg><svg width="1pt" viewBox="0 0 1 1">`} {
		if _, err := Drawing(bad, "", nil, ""); err == nil {
			t.Errorf("%q is a drawing", bad)
		}
	}
}

// TestWrite: a title is text, whatever is in it, and there is one script and one style.
func TestWrite(t *testing.T) {
	var b strings.Builder
	must.Do(t, Write(&b, Page{Title: "</title><script>alert(1)</script>", Body: "<p>here</p>", Script: "/* mine */"}))
	for part, want := range map[string]int{"<script": 1, "<style>": 1, "<p>here</p>": 1, "/* mine */": 1, "alert(1)": 2, "http:": 0, "https:": 0, "ZgotmplZ": 0} {
		if n := strings.Count(b.String(), part); n != want {
			t.Errorf("%q is there %d times, should be %d", part, n, want)
		}
	}
}
